"""Regions: the parts of a cut cover it exactly, cuts inside cuts compose, and every element is where it should be."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from conjoin.ir import cut, cut_along, cut_for_all, num_elements, overlap, region_of, region_shape
from conjoin.machine import Axis, Cut, Mesh
from conjoin.ops import Copies, Split, make_layout, split_axes
from tests.ir.meshes import all_layouts

MESH = Mesh((Axis("x", 2), Axis("y", 3), Axis("z", 2)))


@pytest.mark.parametrize("size", range(14))
def test_the_parts_cover_the_whole_once_the_larger_first(size: int) -> None:
    for parts in range(1, 6):
        found = [cut((5, 5 + size), parts, part) for part in range(parts)]
        assert found[0][0] == 5 and found[-1][1] == 5 + size
        assert all(one[1] == other[0] for one, other in pairwise(found))
        lengths = [stop - start for start, stop in found]
        assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_a_cut_inside_a_cut() -> None:
    for size in range(12, 30):
        for rank in range(MESH.size):
            place = MESH.coordinates(rank)
            outer = cut((0, size), 3, place["y"])
            assert cut_along(size, ("y", "x"), MESH, rank) == cut(outer, 2, place["x"])
            assert cut_along(size, (), MESH, rank) == (0, size)


@pytest.mark.parametrize("axes", [(), ("y",), ("y", "x"), ("z", "y", "x"), ("x", "y", "z")])
def test_all_ranks_are_cut_at_once_as_one_by_one(axes: tuple[str, ...]) -> None:
    said = Mesh(MESH.axes, (Cut(20, ("y", "x"), (0, 1, 5, 5, 11, 12, 20)),))
    for mesh, size in ((MESH, 12), (MESH, 13), (MESH, 29), (said, 20), (said, 21)):
        found = [tuple(piece) for piece in cut_for_all(size, axes, mesh).tolist()]
        assert found == [cut_along(size, axes, mesh, rank) for rank in range(mesh.size)]


def test_the_order_of_axes_says_who_has_which_piece() -> None:
    mesh = Mesh((Axis("x", 2), Axis("y", 2)))
    pieces = {order: [cut_along(7, tuple(order), mesh, rank) for rank in range(4)] for order in ("xy", "yx")}
    assert pieces == {
        "xy": [(0, 2), (2, 4), (4, 6), (6, 7)],
        "yx": [(0, 2), (4, 6), (2, 4), (6, 7)],
    }


def test_every_element_is_held_once_by_each_group_of_copies() -> None:
    """For all layouts on three axes of a tensor that nothing divides evenly."""
    shape = (13, 12)
    for layout in all_layouts("xyz", 2):
        held = torch.zeros(shape, dtype=torch.int64)
        for rank in range(MESH.size):
            region = region_of(shape, layout, MESH, rank)
            assert num_elements(region) == region_shape(region)[0] * region_shape(region)[1] > 0
            held[tuple(slice(*span) for span in region)] += 1
        splitting = [axis for dim in range(2) for axis in split_axes(layout, dim)]
        copies = MESH.size
        for axis in splitting:
            copies //= MESH.sizes[axis]
        assert held.unique().tolist() == [copies]


def test_copies_and_numbers_are_whole() -> None:
    assert region_of((4, 5), make_layout([("x", Copies())]), MESH, 3) == ((0, 4), (0, 5))
    assert region_of((), (), MESH, 3) == () and num_elements(()) == 1
    assert region_of((4, 5), make_layout([("y", Split(1))]), MESH, 2) == ((0, 4), (2, 4))


def test_what_two_regions_share() -> None:
    assert overlap(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert overlap(((0, 4),), ((4, 6),)) is None
    assert overlap((), ()) == ()
