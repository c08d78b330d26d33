"""Reshards as graph nodes: what each parallelization operator does to a layout, and the chain between two layouts.

    Partition(d, axes)  I -> S(d)   each axis cuts the pieces that are there       Combine(d, axes)  S(d) -> I
    Replicate(axes)     I -> B                                                    Unify(axes)       B -> I
    Reduce(axes)        P -> I                                                    Assign(axes)      I -> P
    Greatest(axes)      P(max) -> I
    Confine(k, axes)    I -> At(k)                                                Share(k, axes)    At(k) -> I
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conjoin.ir.nodes import Leaf, LeafKind, Node, Value
from conjoin.ops import (
    ASSIGN,
    CAST,
    COMBINE,
    CONFINE,
    GREATEST,
    PARALLEL_OPS,
    PARTITION,
    REDUCE,
    REPLICATE,
    SHARE,
    UNIFY,
    At,
    Copies,
    Greatest,
    Invariant,
    Layout,
    Partial,
    Placement,
    Split,
    make_layout,
    placement_on,
    split_axes,
)

_WHOLE: dict[str, tuple[Placement, Placement]] = {
    REPLICATE: (Invariant(), Copies()),
    UNIFY: (Copies(), Invariant()),
    REDUCE: (Partial(), Invariant()),
    ASSIGN: (Invariant(), Partial()),
    GREATEST: (Greatest(), Invariant()),
}


class LayoutError(ValueError):
    """Why a layout cannot be what is asked for."""


def is_parallel(node: Node) -> bool:
    """Whether a node is a parallelization operator: it changes where a value lies, not the value."""
    return node.op in PARALLEL_OPS


@dataclass(frozen=True, slots=True)
class Elementary:
    """One parallelization operator with its attributes."""

    op: str
    attributes: tuple[Any, ...]

    def apply(self, layout: Layout) -> Layout:
        """The layout after it; LayoutError when it does not fit."""
        axes = self.attributes[-1]
        if not isinstance(axes, tuple) or not axes or not all(isinstance(axis, str) for axis in axes):
            raise LayoutError(f"{self.op} needs the names of axes, not {axes!r}")
        if len(set(axes)) < len(axes):
            raise LayoutError(f"{self.op} names an axis twice: {', '.join(axes)}")
        if self.op in _WHOLE:
            before, after = _WHOLE[self.op]
        else:
            there = _at(self.attributes[0]) if self.op in (CONFINE, SHARE) else _split_of(self.attributes[0])
            before, after = (Invariant(), there) if self.op in (PARTITION, CONFINE) else (there, Invariant())
        for axis in axes:
            if placement_on(layout, axis) != before:
                raise LayoutError(
                    f"{self.op} takes {before} to {after} on axis {axis}, where the tensor is "
                    f"{placement_on(layout, axis)}"
                )
        kept = [entry for entry in layout if entry[0] not in axes]
        return make_layout([*kept, *((axis, after) for axis in axes)])


def _split_of(dim: Any) -> Split:
    if type(dim) is not int or dim < 0:
        raise LayoutError(f"a dim is a number from 0, not {dim!r}")
    return Split(dim)


def _at(place: Any) -> At:
    if type(place) is not int or place < 0:
        raise LayoutError(f"a place along an axis is a number from 0, not {place!r}")
    return At(place)


def elementary(node: Node) -> Elementary:
    """The parallelization operator that a node is."""
    return Elementary(node.op, node.args[1:])


def reshard_chain(source: Layout, target: Layout) -> tuple[Elementary, ...]:
    """The shortest chain of parallelization operators from one layout to another: first to I, then from I.

    >>> [step.op for step in reshard_chain((("d0", Partial()),), (("d0", Split(0)),))]
    ['conjoin::reduce', 'conjoin::partition']
    """
    steps: list[Elementary] = []
    dims = sorted({p.dim for layout in (source, target) for _, p in layout if isinstance(p, Split)})
    kept = {dim: _common_prefix(split_axes(source, dim), split_axes(target, dim)) for dim in dims}
    for op, placement in ((REDUCE, Partial()), (GREATEST, Greatest()), (UNIFY, Copies())):
        steps += _whole(op, [a for a, p in source if p == placement and placement_on(target, a) != placement])
    steps += _between(SHARE, source, target)
    for dim in dims:
        steps += _along(COMBINE, dim, split_axes(source, dim)[kept[dim] :])
    steps += _between(CONFINE, target, source)
    for dim in dims:
        steps += _along(PARTITION, dim, split_axes(target, dim)[kept[dim] :])
    for op, placement in ((REPLICATE, Copies()), (ASSIGN, Partial())):
        steps += _whole(op, [a for a, p in target if p == placement and placement_on(source, a) != placement])
    return tuple(steps)


def _common_prefix(one: Sequence[str], other: Sequence[str]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _whole(op: str, axes: list[str]) -> list[Elementary]:
    return [Elementary(op, (tuple(axes),))] if axes else []


def _between(op: str, at: Layout, elsewhere: Layout) -> list[Elementary]:
    """Confine or Share for the axes that one layout has at one place and the other has not so."""
    places: dict[int, list[str]] = {}
    for axis, placement in at:
        if isinstance(placement, At) and placement_on(elsewhere, axis) != placement:
            places.setdefault(placement.place, []).append(axis)
    return [Elementary(op, (place, tuple(axes))) for place, axes in sorted(places.items())]


def _along(op: str, dim: int, axes: Sequence[str]) -> list[Elementary]:
    return [Elementary(op, (dim, tuple(axes)))] if axes else []


def stored_leaf(value: Value) -> Leaf | None:
    """The parameter that a value is, or is cast from as it is stored; None where it is neither."""
    owner = value.owner
    if isinstance(owner, Node):
        if owner.op != CAST or not value.type.dtype.is_floating_point:
            return None
        source = owner.inputs[0]
        if not isinstance(source.owner, Leaf) or source.type.layout != value.type.layout:
            return None
        owner = source.owner
    return owner if owner.kind is LeafKind.PARAMETER else None


def origin(value: Value) -> Value:
    """The value that a chain of parallelization operators starts from."""
    while isinstance(value.owner, Node) and is_parallel(value.owner):
        value = value.owner.inputs[0]
    return value
