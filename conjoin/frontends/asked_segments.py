"""Where a model says by `torch.utils.checkpoint` what the backward pass is to run again.

Export would trace through one kind of it and forget it, and take the other for a region without gradients. Here both
are traced as plain calls, and each call that is made inside notes the number of the segment it stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conjoin.frontends.torch_private import replaced_checkpoints


@dataclass(slots=True)
class AskedSegments:
    """How many were met so far, and how many are open."""

    trains: bool
    """Whether gradients are followed while the model is traced."""
    count: int = 0
    depth: int = 0

    @property
    def current(self) -> int:
        """The number of the outermost one that is open, counted from 1; 0 where none is."""
        return self.count if self.depth else 0

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.count += not self.depth
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def run(self, function: Callable[..., Any], _: bool, *args: Any) -> Any:
        """A reentrant one, in which gradients flow only where an argument has one."""
        flows = not self.trains or any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
        with self.opened(), torch.set_grad_enabled(flows and torch.is_grad_enabled()):
            return function(*args)

    def begin(self, *_: Any, **__: Any) -> Iterator[None]:
        """Any other: torch takes the first step before the call and the next after it."""
        with self.opened():
            yield


@contextmanager
def follow_segments(trains: bool) -> Iterator[AskedSegments]:
    """Number the segments that a model asks for while it is traced inside."""
    met = AskedSegments(trains)
    with replaced_checkpoints(met.run, met.begin):
        yield met
