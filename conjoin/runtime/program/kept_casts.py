"""Parameters in the dtypes in which they are used, cast once in a step where bundles cast them: all its micro-batches
use the same copies.

A copy is made when it is first asked for, and stands as long as its parameter is not changed, at most until the step is
over. What is cast otherwise is made of parameters alone like much else (`step_values.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Copies:
    """What some tensors were made into, as long as they are the same."""

    def __init__(self) -> None:
        self._state: tuple[tuple[int, int], ...] = ()
        self._made: tuple[Tensor, ...] = ()

    def of(self, held: Sequence[Tensor], make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What was made of them, or is made now; without a gradient."""
        if any(x.is_inference() for x in held):  # nobody tells when such a tensor is changed
            return make()
        state = tuple((x.data_ptr(), x._version) for x in held)
        if state != self._state or not self._made:
            with torch.no_grad():
                self._state, self._made = state, make()
        return tuple(x.detach() for x in self._made)

    def forget(self) -> None:
        self._state = self._made = ()
