"""Is a node legal in its layouts? The type checker of parallel graphs, derived from the operator declarations.

On every axis the placements of operands and outputs must be one of the operator's sharding rules, or all be at one and
the same place: then the devices there run the node and the others do not. The axes that split one index must nest in
the same order in every tensor that has it; and no piece may be empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from conjoin.ir.nodes import Node
from conjoin.ir.regions import cut_along
from conjoin.ir.reshards import LayoutError
from conjoin.machine import Mesh
from conjoin.ops import (
    At,
    Call,
    Layout,
    Placement,
    ShardingRule,
    Split,
    TensorType,
    call_cache,
    call_on,
    placement_on,
    replicated_rules,
    sharding_rules,
    space_of,
    spec_for,
    split_axes,
)


@dataclass(frozen=True, slots=True)
class Placed:
    """How a node lies on the mesh: for every split index the axes that split it, outermost first."""

    splits: tuple[tuple[str, tuple[str, ...]], ...]
    at: tuple[tuple[str, int], ...] = ()
    """The axes of which only one place runs the node, with that place."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which devices do different parts of the work."""
        return (*(axis for _, axes in self.splits for axis in axes), *(axis for axis, _ in self.at))

    def runs_on(self, mesh: Mesh, rank: int) -> bool:
        """Whether a rank has anything to do with the node."""
        return not self.at or all(mesh.coordinates(rank)[axis] == place for axis, place in self.at)

    def pieces(self, sizes: Mapping[str, int], mesh: Mesh, rank: int) -> dict[str, tuple[int, int]]:
        """The range of every split index that a rank computes."""
        return {index: cut_along(sizes[index], axes, mesh, rank) for index, axes in self.splits}


Layouts = tuple[Layout, ...]


@lru_cache(maxsize=1 << 16)
def plain_call(node: Node) -> Call:
    """The call on types without layouts: what declarations are asked about."""
    return call_on(node.op, node.args, lambda value: value.type.laid_out(()))


@call_cache()
def rules_for(call: Call, num_outputs: int) -> tuple[ShardingRule, ...]:
    """Every legal way to place a call on one axis; an opaque operator is the same everywhere."""
    spec = spec_for(call)
    return replicated_rules(len(call.tensors), num_outputs) if spec is None else sharding_rules(spec, call)


@call_cache()
def place(node: Node, mesh: Mesh) -> Placed:
    """How a node lies on the mesh; LayoutError says why it cannot lie as its types state."""
    operands, outputs = (tuple(t.layout for t in types) for types in ((v.type for v in node.inputs), node.types))
    return _place(plain_call(node), operands, outputs, mesh)


@call_cache()  # layers that are equal lie alike
def _place(call: Call, operands: Layouts, outputs: Layouts, mesh: Mesh) -> Placed:
    axes = list(dict.fromkeys(axis for layout in (*operands, *outputs) for axis, _ in layout))
    splits: dict[str, list[str]] = {}
    at: list[tuple[str, int]] = []
    for axis in axes:
        if axis not in mesh.sizes:
            raise LayoutError(f"there is no axis {axis}: the mesh is {str(mesh) or 'one device'}")
        where = _place_on(axis, operands, outputs)
        if where is not None:
            at.append((axis, where))
            continue
        rule = _rule_on(axis, call, operands, outputs)
        if rule.index is not None:
            splits.setdefault(rule.index, []).append(axis)
    ordered = {index: _nesting(index, found, operands, outputs) for index, found in splits.items()}
    _check_sizes(call, ordered, mesh)
    return Placed(tuple(sorted(ordered.items())), tuple(sorted(at)))


def _place_on(axis: str, operands: Layouts, outputs: Layouts) -> int | None:
    """The one place along an axis where a node runs; None where all run it, in one of its sharding rules."""
    found = [placement_on(layout, axis) for layout in (*operands, *outputs)]
    if not any(isinstance(placement, At) for placement in found):
        return None
    first = found[-1]
    if not isinstance(first, At) or any(placement != first for placement in found):
        shown = _arrow(tuple(found[: len(operands)]), tuple(found[len(operands) :]))
        raise LayoutError(
            f"on axis {axis} {shown} is not legal; where one tensor is at one place, all operands and outputs are"
        )
    return first.place


def _rule_on(axis: str, call: Call, operands: Layouts, outputs: Layouts) -> ShardingRule:
    given = tuple(placement_on(layout, axis) for layout in operands)
    made = tuple(placement_on(layout, axis) for layout in outputs)
    rules = rules_for(call, len(outputs))
    for rule in rules:
        if rule.operands == given and rule.outputs == made:
            return rule
    raise LayoutError(f"on axis {axis} {_arrow(given, made)} is not legal; {_alternatives(rules, given)}")


def _arrow(operands: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> str:
    return f"{', '.join(map(str, operands)) or 'nothing'} -> {', '.join(map(str, outputs))}"


def _alternatives(rules: tuple[ShardingRule, ...], given: tuple[Placement, ...]) -> str:
    """What would be legal: with these operands, else the legal way that differs in the fewest operands."""
    same = [rule for rule in rules if rule.operands == given]
    if same:
        return "these operands give " + " or ".join(", ".join(map(str, rule.outputs)) for rule in same)
    nearest = min(rules, key=lambda rule: sum(a != b for a, b in zip(rule.operands, given, strict=True)))
    return f"the nearest legal way is {nearest}"


def _nesting(index: str, axes: list[str], operands: Layouts, outputs: Layouts) -> tuple[str, ...]:
    """The order in which axes split an index: the same in all tensors that have it."""
    orders = {
        tuple(axis for axis in split_axes(layout, dim) if axis in axes)
        for layout in (*operands, *outputs)
        for dim in {p.dim for _, p in layout if isinstance(p, Split)}
    }
    full = {order for order in orders if len(order) == len(axes)}
    if len(full) > 1:
        shown = " and ".join(",".join(order) for order in sorted(full))
        raise LayoutError(f"the axes that split index {index} nest in different orders: {shown}")
    return full.pop() if full else tuple(axes)


def _check_sizes(call: Call, splits: Mapping[str, tuple[str, ...]], mesh: Mesh) -> None:
    spec = spec_for(call)
    if spec is None:
        return
    sizes = space_of(spec, call).sizes
    for index, axes in splits.items():
        ways = prod(mesh.sizes[axis] for axis in axes)
        if ways > sizes[index]:
            raise LayoutError(f"index {index} of size {sizes[index]} cannot be split {ways} ways")


def layout_fault(type: TensorType, mesh: Mesh) -> str | None:
    """Why a tensor cannot lie as its type states; None when it can."""
    for axis, placement in type.layout:
        if axis not in mesh.sizes:
            return f"there is no axis {axis}: the mesh is {str(mesh) or 'one device'}"
        if isinstance(placement, Split) and placement.dim >= len(type.shape):
            return f"axis {axis} splits dim {placement.dim} of {len(type.shape)}"
        if isinstance(placement, At) and placement.place >= mesh.sizes[axis]:
            return f"axis {axis} has no place {placement.place}: its places are 0 to {mesh.sizes[axis] - 1}"
    for dim, size in enumerate(type.shape):
        ways = prod(mesh.sizes[axis] for axis in split_axes(type.layout, dim))
        if ways > 1 and ways > size:
            return f"dim {dim} of size {size} cannot be split {ways} ways"
    return None
