"""Bytes on the wire are those of the movement tables."""

from __future__ import annotations

import time

import pytest

from conjoin.comm import Route, Step, StepKind, bytes_sent, changes_places, movement, reshard, route_bytes, total_bytes
from conjoin.comm.volume import bytes_received
from conjoin.ir import num_elements
from conjoin.machine import Mesh
from conjoin.ops import At
from tests.comm.layouts import INVARIANT, PARTIAL, all_layouts, make_mesh, pairs, parse_layout


def table_bytes(step: Step, shape: tuple[int, ...], itemsize: int, mesh: Mesh, rank: int) -> int:
    if step.kind.is_local or step.kind is StepKind.ALL_REDUCE:
        return bytes_sent(step, shape, itemsize, mesh, rank)
    table = movement(step, shape, mesh, rank)
    me = table.group.index(rank)
    return itemsize * sum(num_elements(region) for position, region in table.sends if position != me)


def check_bytes(route: Route, itemsize: int, mesh: Mesh) -> None:
    """Closed forms, and what is computed for a few ranks only, agree with all tables of all ranks."""
    by_rank = [sum(table_bytes(s, route.shape, itemsize, mesh, r) for s in route.steps) for r in range(mesh.size)]
    assert route_bytes(route, itemsize, mesh) == max(by_rank), str(route)
    assert total_bytes(route, itemsize, mesh) == sum(by_rank), str(route)


@pytest.mark.parametrize(("shape", "sizes", "stride"), [
    ((5, 7), (2, 3), 1), ((6, 6), (3, 2), 1), ((8, 8), (2, 2, 2), 13), ((7, 9), (2, 3, 2), 13),
])  # fmt: skip
def test_bytes_are_those_of_the_tables(shape: tuple[int, ...], sizes: tuple[int, ...], stride: int) -> None:
    mesh = make_mesh(*sizes)
    for source, target in list(pairs(all_layouts(shape, mesh, (INVARIANT, PARTIAL))))[::stride]:
        check_bytes(reshard(shape, source, target, mesh), 4, mesh)


@pytest.mark.parametrize(("shape", "sizes", "stride"), [
    ((5, 7), (2, 3), 3), ((6, 6), (3, 2), 3), ((), (2, 3), 1), ((8, 6), (2, 2, 2), 211),
])  # fmt: skip
def test_where_places_change_bytes_sent_and_received_are_those_of_the_tables(
    shape: tuple[int, ...], sizes: tuple[int, ...], stride: int
) -> None:
    mesh, kinds = make_mesh(*sizes), set()
    for source, target in list(pairs(all_layouts(shape, mesh, (INVARIANT, PARTIAL, At(0), At(1)))))[::stride]:
        for step in reshard(shape, source, target, mesh).steps:
            if step.kind.is_local or not changes_places(step):
                continue
            kinds.add(step.kind)
            for rank in range(mesh.size):
                table = movement(step, shape, mesh, rank)
                received = sum(num_elements(part) for place, part in table.receives if table.group[place] != rank)
                assert bytes_sent(step, shape, 4, mesh, rank) == table_bytes(step, shape, 4, mesh, rank), step
                assert bytes_received(step, shape, 4, mesh, rank) == 4 * received, step
    assert len(kinds) > 2 and StepKind.REDUCE in kinds


def test_the_check_fails_for_a_wrong_group() -> None:
    mesh = make_mesh(2, 2)
    step = Step(StepKind.ALL_GATHER, ("x", "y"), parse_layout("x:S(0)"), ())
    with pytest.raises((AssertionError, KeyError)):
        check_bytes(Route((4,), step.source, (), (step,)), 4, mesh)


def test_well_known_figures() -> None:
    mesh = make_mesh(2, 2)
    figures = {
        ("x:P y:P", ""): 2 * 3 * 64 * 4 // 4,
        ("x:S(0) y:S(0)", ""): 3 * 16 * 4,
        ("x:P y:P", "x:S(0) y:S(0)"): 3 * 16 * 4,
        ("x:S(0)", "x:S(1)"): 16 * 4,
        ("", "x:S(1)"): 0,
    }
    for (source, target), expected in figures.items():
        assert route_bytes(reshard((8, 8), parse_layout(source), parse_layout(target), mesh), 4, mesh) == expected


def test_512_ranks_are_quick() -> None:
    mesh = Mesh.of_nodes(64, 8)
    source = parse_layout(" ".join(f"{axis}:P" for axis in mesh.names))
    target = parse_layout(" ".join(f"{axis}:S(0)" for axis in mesh.names))
    for route in (reshard((4096, 4096), source, target, mesh), reshard((4096, 4096), target, (), mesh)):
        start = time.process_time()
        assert route_bytes(route, 2, mesh) == 511 * 4096 * 4096 * 2 // 512
        assert total_bytes(route, 2, mesh) == 511 * 4096 * 4096 * 2
        assert time.process_time() - start < 0.05
