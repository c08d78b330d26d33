"""What is known of a tensor without its values: shape, dtype, and how it lies on the mesh."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from conjoin.ops.placement import Invariant, Placement

_SHORT_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b1", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_DTYPES = {short: dtype for dtype, short in _SHORT_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype in text and JSON.

    >>> dtype_name(torch.bfloat16)
    'bf16'
    """
    if dtype not in _SHORT_DTYPES:
        raise ValueError(f"{dtype} has no short name; known are {', '.join(_DTYPES)}")
    return _SHORT_DTYPES[dtype]


def parse_dtype(name: str) -> torch.dtype:
    """Read what `dtype_name` wrote."""
    if name not in _DTYPES:
        raise ValueError(f"{name!r} is not a dtype; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


Layout = tuple[tuple[str, Placement], ...]
"""(axis, placement) for each mesh axis on which the tensor is not I."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Global shape, dtype and layout of a tensor; an empty layout is I on every axis.

    >>> str(TensorType((2, 3), torch.float32))
    'f32[2,3]'
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout = ()

    def __post_init__(self) -> None:
        assert all(not isinstance(placement, Invariant) for _, placement in self.layout), (
            "I is written by leaving it out"
        )

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        where = ",".join(f"{axis}:{placement}" for axis, placement in self.layout)
        return f"{dtype_name(self.dtype)}[{dims}]" + (f"{{{where}}}" if where else "")

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize
