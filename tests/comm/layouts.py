"""All layouts of small tensors on small meshes, and texts for them, for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations, product
from math import prod

from conjoin.machine import Axis, Mesh
from conjoin.ops import Copies, Invariant, Layout, Partial, Placement, Split, make_layout, parse_placement, split_axes

INVARIANT, COPIES, PARTIAL = Invariant(), Copies(), Partial()


def make_mesh(*sizes: int) -> Mesh:
    """A mesh with axes x, y, z … of the given sizes."""
    return Mesh(tuple(Axis(name, size) for name, size in zip("xyzuvwpqr", sizes, strict=False)))


def parse_layout(text: str) -> Layout:
    """Read `x:S(0) y:P`."""
    entries = (entry.split(":") for entry in text.split())
    return make_layout((axis, parse_placement(placement)) for axis, placement in entries)


def all_layouts(shape: tuple[int, ...], mesh: Mesh, others: Iterable[Placement]) -> list[Layout]:
    """Every legal layout, in every nesting order, with the given placements besides splits."""
    placements = [*others, *(Split(dim) for dim in range(len(shape)))]
    found: dict[Layout, None] = {}
    for order in permutations(mesh.names):
        for placed in product(placements, repeat=len(order)):
            layout = make_layout(zip(order, placed, strict=True))
            if is_legal(shape, layout, mesh):
                found[layout] = None
    return list(found)


def is_legal(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> bool:
    """Whether no piece is empty."""
    return all(prod(mesh.sizes[axis] for axis in split_axes(layout, dim)) <= size for dim, size in enumerate(shape))


def pairs(layouts: list[Layout]) -> Iterator[tuple[Layout, Layout]]:
    return product(layouts, layouts)
