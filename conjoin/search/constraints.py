"""What a plan has to keep to besides memory: layouts of given tensors, and axes over which nothing is split.

A tensor is named as in plan files: `param:fc.weight` or `fc.weight`, `input:x`, `%3` for what an operator of the
captured graph makes, or the path of a module for what its last operator makes. Its layout is what a plan says of it
where it is stored or made. The contest refuses what breaks a constraint, and the exact core looks at nothing else.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from conjoin.errors import UsageError
from conjoin.ir import Graph, Leaf, LeafKind, Node, Value, layout_fault, parse_layout, plain_call, rules_for
from conjoin.machine import Mesh
from conjoin.ops import Copies, Layout, Partial, Placement, placement_on
from conjoin.search.exact.units import Units, make_unit
from conjoin.search.request import nearest
from conjoin.search.tensor_names import find_tensor
from conjoin.sim import Layouts, Skeleton

_MAX_UNITS = 3
_MAX_GROUPS = 4
"""More units than are searched otherwise: tables grow with the square of what an operator can do on all of them."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor of the captured graph, and the layout it is to have."""

    name: str
    """As it was asked for."""
    value: Value
    layout: Layout

    def __str__(self) -> str:
        return f"{self.name}={layout_text(self.layout)}"


@dataclass(frozen=True)
class Constraints:
    """What was asked for, in terms of one captured graph."""

    captured: Graph | None = None
    fixed: tuple[Fixed, ...] = ()
    forbidden: frozenset[str] = frozenset()
    """Axes along which all devices do the same."""
    _known: dict[int, tuple[Skeleton, Mapping[int, Layout] | None]] = field(default_factory=dict, compare=False)

    def __bool__(self) -> bool:
        return bool(self.fixed or self.forbidden)

    def free(self, mesh: Mesh) -> Mesh:
        """The axes that may be used."""
        return Mesh(tuple(axis for axis in mesh.axes if axis.name not in self.forbidden)) if self.forbidden else mesh

    def role(self, axis: str) -> tuple[Placement, ...]:
        """What the fixed layouts say of an axis: axes of which they say the same may be used as one."""
        return tuple(placement_on(fixed.layout, axis) for fixed in self.fixed)

    def roots(self, skeleton: Skeleton) -> Mapping[int, Layout] | None:
        """The fixed layouts by the numbers of their tensors; None where one is not in this variant of the graph."""
        if id(skeleton) not in self._known:
            found = [self._root(skeleton, fixed.value) for fixed in self.fixed]
            pairs = zip(found, self.fixed, strict=True)
            roots = {root: fixed.layout for root, fixed in pairs if root is not None}
            self._known[id(skeleton)] = skeleton, roots if None not in found else None
        return self._known[id(skeleton)][1]

    def _root(self, skeleton: Skeleton, value: Value) -> int | None:
        owner = value.owner
        if isinstance(owner, Leaf):
            same = (i for i, root in enumerate(skeleton.roots) if root.leaf and _name(root.leaf) == _name(owner))
            return next(same, None)
        assert self.captured is not None
        position = _alike(self.captured, owner, [op.node for op in skeleton.operators], skeleton.graph)
        return None if position is None else skeleton.operators[position].makes[value.index]

    def broken_by(self, skeleton: Skeleton, layouts: Layouts) -> str | None:
        """Which of them a plan does not keep to; None where it keeps to all."""
        if self.forbidden:
            used = {axis for layout in _all_layouts(layouts) for axis, _ in layout} & self.forbidden
            if used:
                return f"nothing split over {', '.join(sorted(used))}"
        roots = self.roots(skeleton) if self.fixed else {}
        if roots is None:
            return "a tensor with a fixed layout, which it has not"
        for (root, layout), fixed in zip(roots.items(), self.fixed, strict=False):
            if layout_of_root(skeleton, layouts, root) != layout:
                return str(fixed)
        return None


def layout_of_root(skeleton: Skeleton, layouts: Layouts, root: int) -> Layout:
    """The layout in which a tensor is stored or made."""
    maker = skeleton.roots[root].maker
    if maker < 0:
        return layouts.leaves.get(root, ())
    return layouts.choices[maker].outputs[skeleton.operators[maker].makes.index(root)]


def _all_layouts(layouts: Layouts) -> Iterator[Layout]:
    yield from layouts.leaves.values()
    yield from layouts.results
    for choice in layouts.choices:
        yield from choice.operands
        yield from choice.outputs


def _name(leaf: Leaf) -> tuple[LeafKind, str]:
    return leaf.kind, leaf.name


def _alike(graph: Graph, node: Node, others: Sequence[Node], other_graph: Graph) -> int | None:
    """Where a node of a graph stands in a variant: among as many calls of the operator from the same line, as there."""
    key = node.op, graph.source_of(node)
    same = [n for n in graph.nodes if (n.op, graph.source_of(n)) == key]
    positions = [i for i, n in enumerate(others) if (n.op, other_graph.source_of(n)) == key]
    if len(same) != len(positions):
        return None
    position = positions[same.index(node)]
    shapes = [[type.shape for type in n.types] for n in (node, others[position])]
    return position if shapes[0] == shapes[1] else None


def layout_text(layout: Layout) -> str:
    """A layout as it stands in plan files.

    >>> layout_text((("d0", Copies()),)), layout_text(())
    ('{d0:B}', '{}')
    """
    return f"{{{','.join(f'{axis}:{placement}' for axis, placement in layout)}}}"


def make_constraints(graph: Graph, mesh: Mesh, fixed: Mapping[str, str], forbidden: Sequence[str]) -> Constraints:
    """What was asked for, checked against model and mesh; UsageError says what cannot be."""
    for axis in forbidden:
        if axis not in mesh.sizes:
            raise UsageError(
                f"Nothing was to be split over the axis {axis[:40]!r}. The mesh is {str(mesh) or 'one device'}. "
                f"{nearest(axis, mesh.names)}"
            )
    if mesh.axes and set(mesh.names) <= set(forbidden):
        raise UsageError(
            f"Nothing was to be split over {', '.join(mesh.names)}. These are all axes of the mesh, so all "
            f"{mesh.size} devices would do the same. Leave one of them free, or make a plan for one device."
        )
    found = tuple(_fix(graph, mesh, name, text, forbidden) for name, text in fixed.items())
    values: dict[Value, Fixed] = {}
    for one in found:
        other = values.setdefault(one.value, one)
        if other.layout != one.layout:
            raise UsageError(
                f"The layouts {other} and {one} were asked for. Both names mean one tensor, which has one layout. "
                f"Leave one of them out."
            )
    return Constraints(graph, tuple(values.values()), frozenset(forbidden))


def _fix(graph: Graph, mesh: Mesh, name: str, text: str, forbidden: Sequence[str]) -> Fixed:
    value = find_tensor(graph, name)
    try:
        layout = parse_layout(text.strip().removeprefix("{").removesuffix("}").replace(" ", ""))
    except ValueError as error:
        raise UsageError(
            f"The layout {text[:60]!r} was asked for {name}: {error}. A layout says for each axis that does not hold "
            f"the whole how it is held. Write d0:S(0),d1:S(1), or {{}} for the whole."
        ) from None
    taken = [axis for axis, _ in layout if axis in forbidden]
    fault = layout_fault(value.type.laid_out(layout), mesh) or _fault(value, layout)
    if taken:
        fault = f"nothing may be split over {taken[0]}"
    if fault is not None:
        raise UsageError(
            f"The layout {layout_text(layout)} was asked for {name}, a tensor {value.type} on {mesh.told}. That "
            f"cannot be: {fault}. Ask for another layout of it."
        )
    return Fixed(name, value, layout)


def _fault(value: Value, layout: Layout) -> str | None:
    """Why a tensor cannot be stored or made so."""
    if isinstance(value.owner, Leaf):
        bad = [axis for axis, placement in layout if isinstance(placement, Copies | Partial)]
        return f"what is stored is whole or split, never B or P as on {bad[0]}" if bad else None
    rules = rules_for(plain_call(value.owner), len(value.owner.types))
    for axis, placement in layout:
        can = dict.fromkeys(str(rule.outputs[value.index]) for rule in rules)
        if str(placement) not in can:
            return f"{value.owner.op} makes it {', '.join(can)} along an axis, not {placement} as on {axis}"
    return None


def refined(some: Sequence[Units], mesh: Mesh, constraints: Constraints) -> list[Units]:
    """The units in which fixed layouts can be told: with axes of which they say different things in different units.

    Where that makes too many of all of them, what the layouts tell apart are the units.
    """
    found = [_apart(units, mesh, constraints) for units in some]
    few = [units for units in dict.fromkeys(found) if len(units) <= _MAX_UNITS]
    if few or not found:
        return few
    least = _apart((make_unit(mesh, mesh.names),), mesh, constraints)
    if len(least) > _MAX_GROUPS:
        raise UsageError(
            f"The layouts {', '.join(map(str, constraints.fixed))[:300]} were asked for. They treat the axes {mesh} in "
            f"{len(least)} different ways, and at most {_MAX_GROUPS} can be searched. Leave some of them out."
        )
    return [least]


def _apart(units: Units, mesh: Mesh, constraints: Constraints) -> Units:
    found: dict[Hashable, list[str]] = {}
    for number, unit in enumerate(units):
        for axis in unit.axes:
            found.setdefault((number, constraints.role(axis)), []).append(axis)
    return tuple(make_unit(mesh, tuple(axes)) for axes in found.values())
