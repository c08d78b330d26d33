"""What cannot be captured, and where in the user's program it stands."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import fx

from conjoin.ir import Source

HIDDEN = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}", "<")
"""How files begin that are not the user's: torch, this package, generated code."""
MODEL_PREFIX, LOSS_PREFIX = "model.", "loss."
"""How names begin in an exported step: those of the model, those of a loss that is a module."""
_FRAME = re.compile(r'File "(.+)", line (\d+)(?:, segment (\d+))?')


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that cannot be captured: what, where, and what to do."""

    what: str
    source: Source | None
    advice: str

    def __str__(self) -> str:
        return f"{self.what}{f' at {self.source}' if self.source else ''}: {self.advice}"


def find_user_line(frame: FrameType | None, outermost: CodeType) -> tuple[str, int] | None:
    """File and number of the innermost line of the user's among the frames up to the outermost."""
    while frame is not None and frame.f_code is not outermost:
        if not frame.f_code.co_filename.startswith(HIDDEN):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def source_of(node: fx.Node) -> Source | None:
    """The user's line a call comes from, and the module it belongs to."""
    found = _FRAME.search(node.meta.get("stack_trace") or "")
    if not found or found[1].startswith(HIDDEN):
        return None
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    module = path.removeprefix("L['self'].").removeprefix(MODEL_PREFIX)
    named = "" if module == MODEL_PREFIX.rstrip(".") else module
    return Source(found[1], int(found[2]), named, int(found[3] or 0))
