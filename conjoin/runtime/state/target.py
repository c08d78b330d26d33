"""Where state of a module is kept: a path and a module are told from each other before anything is done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from conjoin.errors import UsageError
from conjoin.runtime.parallel import ParallelModule


def target_of(path: Any, step: Any) -> tuple[Path, ParallelModule]:
    """The whole path of where the state of a module is, or is to be, and the module, which may be given compiled;
    refused where one of the two is something else."""
    if not isinstance(path, str | os.PathLike):
        raise UsageError(
            f"A {type(path).__name__} was given as the path of a checkpoint or of weights. The path, a str or a Path, "
            f"comes first, then the module. Write it as in conjoin.save_checkpoint('folder', step)."
        )
    step = step.get_submodule("_orig_mod") if hasattr(step, "_orig_mod") else step
    if not isinstance(step, ParallelModule):
        raise UsageError(
            f"A {type(step).__name__} was given as the module of {os.fspath(path)}. What knows which pieces of the "
            f"weights are on which rank is the module that conjoin.load gave. Pass that one."
        )
    return Path(os.path.abspath(path)), step
