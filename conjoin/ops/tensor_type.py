"""What is known of a tensor without its values: shape, dtype, and how it lies on the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import assert_never

import torch

from conjoin.ops.placement import At, Copies, Greatest, Invariant, Partial, Placement, Split

_SHORT_PREFIXES = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def _short_name(dtype: torch.dtype) -> str:
    name = {torch.bool: "b1", torch.float8_e4m3fn: "f8e4m3"}.get(dtype, str(dtype).removeprefix("torch."))
    prefix, short = next((pair for pair in _SHORT_PREFIXES if name.startswith(pair[0])), ("", ""))
    return short + name.removeprefix(prefix).replace("_", "")


_DTYPES = {_short_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
"""Every dtype that torch has, by its short name."""
_SHORT_DTYPES = {dtype: short for short, dtype in _DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype in text and JSON.

    >>> dtype_name(torch.bfloat16)
    'bf16'
    """
    return _SHORT_DTYPES[dtype]


def parse_dtype(name: str) -> torch.dtype:
    """Read what `dtype_name` wrote."""
    if name not in _DTYPES:
        raise ValueError(f"{name!r} is not a dtype; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


Layout = tuple[tuple[str, Placement], ...]
"""(axis, placement) for each mesh axis on which the tensor is not I, as `make_layout` orders them. Axes that split the
same dim stand from the outermost to the innermost: the first cuts the dim, the next cuts each piece."""


def make_layout(entries: Iterable[tuple[str, Placement]]) -> Layout:
    """The one way to write a layout: splits dim by dim in their nesting order, then B, P, At; I left out.

    >>> make_layout([("y", Copies()), ("x", Invariant()), ("z", Split(1)), ("w", Split(0))])
    (('w', Split(dim=0)), ('z', Split(dim=1)), ('y', Copies()))
    """
    kept = [(axis, placement) for axis, placement in entries if not isinstance(placement, Invariant)]
    axes = [axis for axis, _ in kept]
    if len(set(axes)) < len(axes):
        raise ValueError(f"an axis is placed twice: {', '.join(axes)}")
    return tuple(sorted(kept, key=_order))


@lru_cache(maxsize=1 << 14)
def _is_made(layout: Layout) -> bool:
    return layout == make_layout(layout)


def _order(entry: tuple[str, Placement]) -> tuple[int, str]:
    axis, placement = entry
    match placement:
        case Split(dim):
            return dim, ""
        case Copies():
            return _LAST, axis
        case Partial():
            return _LAST + 1, axis
        case Greatest():
            return _LAST + 2, axis
        case At():
            return _LAST + 3, axis
        case Invariant():
            return -1, axis
        case _:
            assert_never(placement)


_LAST = 1 << 16
"""After every dim."""


def placement_on(layout: Layout, axis: str) -> Placement:
    """What a layout says of one axis."""
    for name, placement in layout:
        if name == axis:
            return placement
    return Invariant()


def split_axes(layout: Layout, dim: int) -> tuple[str, ...]:
    """The axes that split a dim, outermost first."""
    wanted = Split(dim)
    return tuple([axis for axis, placement in layout if placement is wanted])


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
        assert _is_made(self.layout), "layouts are made by make_layout"

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        where = ",".join(f"{axis}:{placement}" for axis, placement in self.layout)
        return f"{dtype_name(self.dtype)}[{dims}]" + (f"{{{where}}}" if where else "")

    def laid_out(self, layout: Layout) -> TensorType:
        """The same tensor in another layout."""
        return self if layout == self.layout else TensorType(self.shape, self.dtype, layout)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize
