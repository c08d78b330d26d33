"""Calls whose shape depends on values that constants decide: what a mask selects, where it holds, how often a row is
repeated. What follows from constants alone becomes one; a tensor is read at the indices where a known mask holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from conjoin.frontends.canonical_forms import Refused
from conjoin.frontends.folded_constants import is_fixed, known_value
from conjoin.ir import Value
from conjoin.ops import bind_args, execute, find_spec, map_tensors, walk_tensors

Constant = Callable[[Tensor], Value]
"""Writes a tensor into the graph."""
_INDEX, _PUT, _SELECT, _REPEAT = "index.Tensor", "index_put", "masked_select", "repeat_interleave.self_Tensor"
_UNTAGGED = (_REPEAT, "where")
"""Torch does not say of these that values decide their shape."""


def takes_values(op: str, args: tuple[Any, ...]) -> bool:
    """Whether a call may take values for numbers: those of a mask, or such as decide its shape."""
    if op in (_INDEX, _PUT):
        return any(map(_is_mask, args[1]))
    if op in _UNTAGGED:
        return True
    name, _, overload = op.partition(".")
    found = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    return isinstance(found, OpOverload) and torch.Tag.dynamic_output_shape in found.tags


def known_results(op: str, args: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """What a call gives whose operands are all made of constants."""
    known = [_known(value) for _, value in walk_tensors(op, args)]
    if not known or any(value is None for value in known):
        return None
    feed = iter(known)
    made = execute(op, *map_tensors(op, args, lambda _: next(feed)))
    return tuple(made) if isinstance(made, tuple | list) else (made,)


def read_at_indices(op: str, args: tuple[Any, ...], constant: Constant) -> tuple[str, tuple[Any, ...]]:
    """The same call with indices in place of masks and numbers of repeats, where they are known."""
    if op in (_INDEX, _PUT):
        indices = _at_indices(args[1], constant)
        if op == _PUT or not any(map(_is_mask, indices)):
            return op, (args[0], indices, *args[2:])
    source, told = args[0], _known(args[1]) if op in (_SELECT, _REPEAT) else None
    if op == _SELECT and told is not None and _fits(told.shape, source.type.shape):
        places = told.expand(source.type.shape).nonzero(as_tuple=True)
        return _INDEX, (source, tuple(map(constant, places)))
    if op == _REPEAT and told is not None and (args[2] is not None or len(source.type.shape) == 1):
        dim = args[2] or 0
        rows = torch.arange(source.type.shape[dim]).repeat_interleave(told)
        return "index_select", bind_args("index_select", (source, dim, constant(rows)), {})
    if op not in (_INDEX, _SELECT, _REPEAT) and find_spec(op) is not None:  # it was told its size, as `one_hot` may be
        return op, args
    raise Refused("the shape of its result depends on tensor values: use fixed shapes")


def _fits(mask: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a mask is of a shape, or is repeated to be."""
    return len(mask) <= len(shape) and all(a in (1, b) for a, b in zip(mask[::-1], shape[::-1], strict=False))


def _at_indices(indices: Sequence[Value | None], constant: Constant) -> tuple[Value | None, ...]:
    made: list[Value | None] = []
    for index in indices:
        mask = _known(index) if index is not None and _is_mask(index) else None
        made += [index] if mask is None else map(constant, mask.nonzero(as_tuple=True))
    return tuple(made)


def _known(value: Value) -> Tensor | None:
    return known_value(value) if is_fixed(value) else None


def _is_mask(index: Value | None) -> bool:
    return index is not None and index.type.dtype in (torch.bool, torch.uint8)
