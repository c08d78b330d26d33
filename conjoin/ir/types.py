"""Reading tensor types back from text: `f32[4,8]`, `f32[4,8]{x:S(0)}`."""

from __future__ import annotations

import re
from math import prod

from conjoin.ir.limits import MAX_ELEMENTS, MAX_RANK
from conjoin.ops import Invariant, Layout, TensorType, make_layout, parse_dtype, parse_placement

_TYPE = re.compile(r"(\w+)\[((?:[0-9]{1,18}(?:,[0-9]{1,18})*)?)\](?:\{([^{}]+)\})?")


def parse_type(text: str) -> TensorType:
    """Read what `str` of a tensor type wrote.

    >>> parse_type("bf16[2,3]{x:S(1),y:P}").layout
    (('x', Split(dim=1)), ('y', Partial()))
    """
    found = _TYPE.fullmatch(text)
    if not found:
        raise ValueError(f"{text[:40]!r} is not a tensor type such as f32[4,8]")
    shape = tuple(int(size) for size in found[2].split(",")) if found[2] else ()
    if len(shape) > MAX_RANK or prod(shape) > MAX_ELEMENTS:
        raise ValueError(f"{text[:40]!r} is larger than any tensor")
    return TensorType(shape, parse_dtype(found[1]), parse_layout(found[3]))


def parse_layout(text: str | None) -> Layout:
    """Read the layout of a type, as it stands between braces; nothing is I on every axis.

    >>> parse_layout("x:S(1),y:P")
    (('x', Split(dim=1)), ('y', Partial()))
    """
    entries = []
    for entry in text.split(",") if text else ():
        axis, _, placement = entry.partition(":")
        parsed = parse_placement(placement)
        if not axis.isidentifier() or isinstance(parsed, Invariant):
            raise ValueError(f"{entry!r} is not an axis with S(dim), B, P, P(max) or At(place)")
        entries.append((axis, parsed))
    return make_layout(entries)
