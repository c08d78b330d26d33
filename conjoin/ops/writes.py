"""Writes to a tensor as functions of its old value and what is written, with the derivatives that the writes have.

torch's functional forms of these lack a derivative (`copy`), or have that of the part that was overwritten for the rest
(`as_strided_scatter` in torch 2.11 to 2.13). Writing to a copy has the right one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def overwrite(self: Tensor, src: Tensor) -> Tensor:
    """All of a tensor is written to: what it was gets a gradient of zeros, as a written tensor does, and not none.

    What is made lies in memory as the tensor does.
    """
    made = torch.empty_like(self)
    return (made.copy_(self) if self.requires_grad else made).copy_(src)


Ints = tuple[int, ...]


def _in_memory(x: Tensor, given: Ints) -> Tensor:
    """A copy in the strides that a tensor had when the model was captured."""
    return torch.empty_strided(x.shape, given, dtype=x.dtype, device=x.device).copy_(x)


def strided_view(self: Tensor, given: Ints, size: Ints, stride: Ints, offset: int) -> Tensor:
    """Elements of a tensor by where they lie in memory, which is laid out with the strides given."""
    return _in_memory(self, given).as_strided(size, stride, offset)


def strided_write(self: Tensor, src: Tensor, given: Ints, size: Ints, stride: Ints, offset: int) -> Tensor:
    """A tensor some elements of which, by where they lie in memory, are written to."""
    written = _in_memory(self, given)
    written.as_strided(size, stride, offset).copy_(src)
    return written
