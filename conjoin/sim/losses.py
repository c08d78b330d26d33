"""Losses that keep the memory of all their terms: the number that comes out lies in a block as large as its operand.

Kernels of some losses lay out their result for one number per element and then shrink it, and a tensor that shrinks
keeps its memory: as long as the loss is there, so is the block. torch on meta makes a block of one number instead.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

SHRINKING = frozenset({"binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss"})
"""On CPUs and on GPUs alike. `tests/sim/test_autograd_keeps.py` asks torch whether it is these and no others."""


def storage_bytes(op: str, args: tuple[Any, ...], made: Tensor) -> int:
    """The bytes behind what an operator made of some arguments on meta, as a device holds them."""
    if op in SHRINKING and not made.dim():
        terms: torch.Size = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        return prod(terms) * made.itemsize
    return made.untyped_storage().nbytes()
