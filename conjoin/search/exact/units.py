"""Units: neighbouring axes of the mesh that are given to one role together, so that few things are left to decide.

A mesh of ten axes of size 2 cut into three units has 36 cuts; in each cut an operator chooses a rule for each of three
units instead of ten axes. A plan that splits nothing finer than some cut does is found in that cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations
from math import prod

from conjoin.ir import Choice
from conjoin.machine import Mesh
from conjoin.ops import Placement, placement_on


@dataclass(frozen=True, slots=True)
class Unit:
    """Some axes of a mesh, outermost first."""

    axes: tuple[str, ...]
    degree: int


Units = tuple[Unit, ...]


def cuts(mesh: Mesh, num_units: int) -> Iterator[Units]:
    """Every way to cut the row of axes into so many units, or into as many as there are axes.

    >>> [[unit.degree for unit in units] for units in cuts(Mesh.of_nodes(4, 2), 2)]
    [[2, 4], [4, 2]]
    """
    num_axes = len(mesh.axes)
    for positions in combinations(range(1, num_axes), max(0, min(num_units, num_axes) - 1)):
        bounds = (0, *positions, num_axes)
        yield tuple(make_unit(mesh, mesh.names[a:b]) for a, b in pairwise(bounds) if a < b)


def make_unit(mesh: Mesh, axes: tuple[str, ...]) -> Unit:
    """The unit of some axes."""
    return Unit(axes, prod(mesh.sizes[axis] for axis in axes))


def neighbours(units: Units, mesh: Mesh) -> Iterator[Units]:
    """The same units but for one axis, which goes from one to another; of equal axes only one is moved.

    >>> one, other = make_unit(Mesh.of_nodes(2, 2), ("n0",)), make_unit(Mesh.of_nodes(2, 2), ("d0",))
    >>> list(neighbours((one, other), Mesh.of_nodes(2, 2)))
    []
    """
    kinds = {axis.name: (axis.size, axis.between_nodes) for axis in mesh.axes}
    for source, target in permutations(range(len(units)), 2):
        seen: set[tuple[int, bool]] = set()
        for axis in units[source].axes:
            if len(units[source].axes) > 1 and kinds[axis] not in seen:
                seen.add(kinds[axis])
                changed = list(units)
                changed[source] = make_unit(mesh, tuple(a for a in units[source].axes if a != axis))
                changed[target] = make_unit(mesh, mesh.in_order((*units[target].axes, axis)))
                yield tuple(changed)


def canonical(units: Units, mesh: Mesh) -> tuple[tuple[tuple[int, bool], ...], ...]:
    """What cuts that differ only in the names of equal axes, or the order of units, have in common."""
    kinds = {axis.name: (axis.size, axis.between_nodes) for axis in mesh.axes}
    return tuple(sorted(tuple(sorted(kinds[axis] for axis in unit.axes)) for unit in units))


def kinds_text(units: Units, mesh: Mesh) -> str:
    """What `canonical` tells, in a word.

    >>> kinds_text(next(cuts(Mesh.of_nodes(4, 6), 2)), Mesh.of_nodes(4, 6))
    '2d2n3d|2n'
    """
    return "|".join("".join(f"{size}{'dn'[between]}" for size, between in kinds) for kinds in canonical(units, mesh))


def natural_units(choices: Sequence[Choice], mesh: Mesh) -> Units:
    """The axes that every operator treats alike, as one unit each."""
    alike: dict[tuple[Placement, ...], list[str]] = {}
    for axis in mesh.names:
        seen = tuple(placement_on(layout, axis) for c in choices for layout in (*c.operands, *c.outputs))
        alike.setdefault(seen, []).append(axis)
    return tuple(make_unit(mesh, tuple(axes)) for axes in alike.values())


def splits(units: Units, mesh: Mesh, num_units: int) -> Iterator[Units]:
    """The units with one of them cut in two, or two put together, so that there are so many; equal axes count once."""
    if len(units) > num_units:
        for a, b in combinations(range(len(units)), 2):
            rest = [unit for i, unit in enumerate(units) if i not in (a, b)]
            merged = make_unit(mesh, mesh.in_order((*units[a].axes, *units[b].axes)))
            yield from splits((*rest, merged), mesh, num_units)
        return
    if len(units) == num_units:
        yield units
        return
    seen: set[object] = set()
    for position, unit in enumerate(units):
        for size in range(1, len(unit.axes)):
            for taken in combinations(unit.axes, size):
                parts = make_unit(mesh, tuple(a for a in unit.axes if a not in taken)), make_unit(mesh, taken)
                found = (*units[:position], *parts, *units[position + 1 :])
                name = canonical(found, mesh)
                if name not in seen:
                    seen.add(name)
                    yield from splits(found, mesh, num_units)


def shown(units: Units) -> str:
    """The degrees of units, outermost first."""
    return "×".join(str(unit.degree) for unit in units)
