"""Groups of mesh axes: axes with one role in a strategy, such as tp or dp, and how degrees are dealt to axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from conjoin.errors import StrategyError
from conjoin.machine import Mesh


@dataclass(frozen=True, slots=True)
class Group:
    """Axes with the same role, outermost first; together they are one axis of size `degree`."""

    role: str
    axes: tuple[str, ...]
    degree: int

    def __str__(self) -> str:
        return f"{self.role}={self.degree}"


def make_groups(mesh: Mesh, degrees: Mapping[str, int]) -> dict[str, Group]:
    """A group for every role; the first role named gets the innermost axes that fit its degree.

    >>> [(role, group.axes) for role, group in make_groups(Mesh.of_nodes(2, 6), {"tp": 3, "dp": 4}).items()]
    [('tp', ('d1',)), ('dp', ('n0', 'd0'))]
    """
    free, groups = mesh.names, {}
    for role, degree in degrees.items():
        axes = _take(mesh, free, role, degree)
        groups[role] = Group(role, axes, degree)
        free = tuple(axis for axis in free if axis not in axes)
    if free:
        asked = " × ".join(f"{role}={degree}" for role, degree in degrees.items())
        raise StrategyError(
            f"The degrees {asked} ask for {prod(degrees.values())} devices. The mesh {mesh} has {mesh.size}, and every "
            f"device must be used. Multiply one degree by {prod(mesh.sizes[axis] for axis in free)}."
        )
    return groups


def _take(mesh: Mesh, free: Sequence[str], role: str, degree: int) -> tuple[str, ...]:
    """The innermost free axes whose sizes multiply to a degree: they are prime, so taking any that fits is safe."""
    taken, left = set(), degree
    for axis in reversed(free):
        if left % mesh.sizes[axis] == 0:
            taken.add(axis)
            left //= mesh.sizes[axis]
    if left != 1:
        raise _not_a_product(mesh, role, degree, free)
    return mesh.in_order(taken)


def _not_a_product(mesh: Mesh, role: str, degree: int, free: Sequence[str]) -> StrategyError:
    sizes = [mesh.sizes[axis] for axis in free]
    nearest = min(products(sizes), key=lambda size: (abs(size - degree), size))
    left = f"axes of sizes {' × '.join(map(str, sizes))} are left for it" if sizes else "no axis is left for it"
    return StrategyError(
        f"The degree {role}={degree} was asked for on the mesh {str(mesh) or 'of one device'}. A degree is a product "
        f"of axes, and {left}. The nearest degree that fits is {role}={nearest}."
    )


def products(sizes: Sequence[int]) -> list[int]:
    """Every product of some of the sizes, smallest first.

    >>> products((2, 2, 3))
    [1, 2, 3, 4, 6, 12]
    """
    found = {1}
    for size in sizes:
        found |= {product * size for product in found}
    return sorted(found)


def deal(sizes: Sequence[int], roles: Sequence[str]) -> dict[str, int]:
    """Degrees for roles that were left out: the axes are dealt to them in turn, from the last.

    >>> deal((2, 2, 3), ("h", "w"))
    {'h': 6, 'w': 2}
    """
    degrees = dict.fromkeys(roles, 1)
    for turn, size in enumerate(reversed(sizes)):
        degrees[roles[turn % len(roles)]] *= size
    return degrees


def sizes_left(mesh: Mesh, given: Mapping[str, int]) -> tuple[int, ...]:
    """The sizes of the axes that the degrees given leave to others."""
    free = mesh.names
    for role, degree in given.items():
        axes = _take(mesh, free, role, degree)
        free = tuple(axis for axis in free if axis not in axes)
    return tuple(mesh.sizes[axis] for axis in free)
