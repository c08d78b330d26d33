"""In what form tensors travel: flat, without gaps, in a dtype that every backend carries and adds."""

from __future__ import annotations

import torch
from torch import Tensor

CARRIED = frozenset({
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64,
})  # fmt: skip
"""What both Gloo and NCCL carry, and add as they should."""

_ADDED_AS = {torch.bool: torch.int32, torch.int16: torch.int32, torch.uint16: torch.int32}
"""Where a sum is taken: an integer that wraps around, and so does when it is cut to its size again."""


def flat(x: Tensor) -> Tensor:
    """The elements one after the other in memory, without conjugation or sign left to be done."""
    found = x.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return found.as_strided((1,), (1,)) if found.numel() == 1 else found  # torch takes any stride of it for contiguous


def to_send(x: Tensor) -> Tensor:
    """A tensor as it is sent, or as memory to receive it in: what no backend knows goes as bytes."""
    return carried(flat(x))


def carried(x: Tensor) -> Tensor:
    """Elements one after the other in a dtype that every backend knows."""
    return x if x.dtype in CARRIED else x.view(torch.uint8)


def to_add(x: Tensor) -> Tensor:
    """A tensor as it is summed up over ranks: complex numbers as pairs, others in a dtype that can be added."""
    summed = flat(x)
    if summed.dtype in CARRIED:
        return summed
    if summed.is_complex():
        return torch.view_as_real(summed).view(-1)
    wide = torch.float32 if summed.is_floating_point() else torch.int64
    return summed.to(_ADDED_AS.get(summed.dtype, wide))


def from_sum(total: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_add` made of elements of a dtype, as these again."""
    if not dtype.is_complex:
        return total.to(dtype)
    return torch.view_as_complex(total.view(-1, 2))


def total(parts: Tensor) -> Tensor:
    """The sum of equal parts that stand one after the other, in their own dtype."""
    summed = to_add(parts)
    rows = summed.view(len(parts), summed.numel() // len(parts))
    return from_sum(rows.sum(0, dtype=rows.dtype), parts.dtype).view(parts.shape[1:])
