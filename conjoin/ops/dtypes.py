"""The dtype of an operator's outputs, following torch's type promotion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import assert_never

import torch

from conjoin.ops.tensor_type import TensorType

Number = bool | int | float | complex


class Dtype(Enum):
    """How the dtype of the outputs follows from the call; an explicit `dtype` argument always wins."""

    PROMOTE = "torch's type promotion over the operands and the numbers among them"
    FLOAT = "promotion, integers becoming the default float"
    NUMERIC = "promotion, truth values becoming int64"
    TOTAL = "that of the first operand, integers becoming int64"
    FIRST = "that of the first operand"
    LAST = "that of the last operand"
    EACH = "of every output that of its own operand"
    REAL = "that of the real part of the first operand"
    WIDE = "that of the first operand, at least float32"
    COMPLEX = "complex, as wide as the first operand"
    NUMBER = "that torch gives to the numbers of the call"
    BOOL = "bool"
    INT64 = "int64"
    INT32 = "int32"
    FLOAT64 = "float64"


_WITH_AUTOCAST = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))
"""Asked once: torch's compiler does not follow the question."""


def under_autocast(kind: str) -> bool:
    """Whether the caller runs under an autocast for a kind of device."""
    return kind in _WITH_AUTOCAST and torch.is_autocast_enabled(kind)


_FIXED = {
    Dtype.BOOL: torch.bool, Dtype.INT64: torch.int64, Dtype.INT32: torch.int32, Dtype.FLOAT64: torch.float64,
}  # fmt: skip


def output_dtype(
    rule: Dtype, operands: Sequence[TensorType], numbers: Sequence[Number], default: torch.dtype = torch.float32
) -> torch.dtype:
    """The dtype that a rule gives for these operands and numbers, where floats without a dtype are of the default one.

    What torch's default is in this process does not count: a graph means the same everywhere.

    >>> output_dtype(Dtype.FLOAT, [TensorType((2,), torch.int64)], [3])
    torch.float32
    """
    match rule:
        case Dtype.BOOL | Dtype.INT64 | Dtype.INT32 | Dtype.FLOAT64:
            return _FIXED[rule]
        case Dtype.NUMBER:
            return _number_dtype(numbers, default)
        case Dtype.PROMOTE:
            return _promote(operands, numbers, default)
        case Dtype.NUMERIC:
            promoted = _promote(operands, numbers, default)
            return torch.int64 if promoted == torch.bool else promoted
        case Dtype.FLOAT:
            promoted = _promote(operands, numbers, default)
            return default if _integral(promoted) else promoted
        case Dtype.LAST:
            return operands[-1].dtype
        case Dtype.FIRST | Dtype.EACH | Dtype.REAL | Dtype.WIDE | Dtype.COMPLEX | Dtype.TOTAL:
            first = operands[0].dtype if operands else default
            return _changed(rule, first)
        case _:
            assert_never(rule)


def _changed(rule: Dtype, first: torch.dtype) -> torch.dtype:
    match rule:
        case Dtype.TOTAL:
            return torch.int64 if _integral(first) else first
        case Dtype.WIDE:
            return torch.promote_types(first, torch.float32)
        case Dtype.REAL:
            return first.to_real()
        case Dtype.COMPLEX:
            return first.to_complex()
        case _:
            return first


def _integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _number_dtype(numbers: Iterable[Number], default: torch.dtype) -> torch.dtype:
    kinds = {type(number) for number in numbers} or {float}
    if complex in kinds:
        return default.to_complex()
    if float in kinds:
        return default
    return torch.bool if kinds == {bool} else torch.int64


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype | None:
    widest = None
    for dtype in dtypes:
        if dtype is not widest:
            widest = dtype if widest is None else torch.promote_types(widest, dtype)
    return widest


def _promote(operands: Sequence[TensorType], numbers: Sequence[Number], default: torch.dtype) -> torch.dtype:
    """Tensors with dims decide, then those without, then plain numbers."""
    dimmed = _widest(tensor.dtype for tensor in operands if tensor.shape)
    scalars = _widest(tensor.dtype for tensor in operands if not tensor.shape)
    result = _lift(_lift(dimmed, scalars), _number_dtype(numbers, default) if numbers else None)
    return default if result is None else result


def _lift(upper: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
    """What ranks lower only counts where its category is higher: bool, integer, float, complex."""
    if upper is None or lower is None:
        return upper or lower
    return torch.result_type(torch.empty(0, dtype=upper, device="meta"), torch.empty((), dtype=lower, device="meta"))
