"""Tables of who sends what agree with each other, and a wrong table is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from conjoin.comm import Movement, Step, StepKind, move_regions, movement, reshard
from conjoin.ir import Region, num_elements, overlap
from conjoin.machine import Mesh
from tests.comm.layouts import INVARIANT, all_layouts, make_mesh, pairs, parse_layout
from tests.comm.simulator import read, run_route, spread


def check_tables(tables: list[Movement]) -> None:
    """What one sends to another is what that one receives; all that is wanted arrives once."""
    sends = {(s, t, region) for s, table in enumerate(tables) for t, region in table.sends}
    receives = {(s, t, region) for t, table in enumerate(tables) for s, region in table.receives}
    assert sends == receives, "sender and receiver disagree"
    for table in tables:
        parts = [region for _, region in table.receives]
        assert all(overlap(part, table.want) == part for part in parts), "not wanted"
        assert sum(map(num_elements, parts)) == num_elements(table.want), "missing or twice"
        assert all(overlap(a, b) is None for i, a in enumerate(parts) for b in parts[:i]), "twice"


def tables_of(have: list[Region], want: list[Region]) -> list[Movement]:
    group = tuple(range(10, 10 + len(have)))
    return [move_regions(have, want, group, rank) for rank in group]


def test_moves_agree_for_all_splits() -> None:
    mesh, shape = make_mesh(2, 3), (7, 5)
    for source, target in pairs(all_layouts(shape, mesh, (INVARIANT,))):
        for step in reshard(shape, source, target, mesh).steps:
            if not step.kind.is_local:
                for group in mesh.groups(step.axes):
                    check_tables([movement(step, shape, mesh, rank) for rank in group])


def test_halos() -> None:
    have: list[Region] = [((0, 3),), ((3, 6),), ((6, 8),)]
    want: list[Region] = [((0, 4),), ((2, 7),), ((5, 8),)]
    tables = tables_of(have, want)
    check_tables(tables)
    assert tables[1].receives == ((0, ((2, 3),)), (1, ((3, 6),)), (2, ((6, 7),)))
    assert tables[1].sends == ((0, ((3, 4),)), (1, ((3, 6),)), (2, ((5, 6),)))


def test_holders_take_turns_and_keep_their_own() -> None:
    left, right = ((0, 2),), ((2, 4),)
    tables = tables_of([left, left, right, right], [right, right, left, right])
    check_tables(tables)
    assert [len(table.sends) for table in tables] == [1, 0, 1, 2]
    assert tables[3].receives == ((3, right),)


def test_reduce_scatter_sends_each_member_its_region() -> None:
    mesh = make_mesh(2)
    step = Step(StepKind.REDUCE_SCATTER, ("x",), parse_layout("x:P"), parse_layout("x:S(0)"))
    table = movement(step, (3,), mesh, 1)
    assert table.sends == ((0, ((0, 2),)), (1, ((2, 3),)))
    assert table.receives == ((0, ((2, 3),)), (1, ((2, 3),)))


def test_steps_that_move_no_regions_have_no_table() -> None:
    step = Step(StepKind.ALL_REDUCE, ("x",), parse_layout("x:P"), ())
    with pytest.raises(ValueError, match="all-reduce moves no regions"):
        movement(step, (3,), make_mesh(2), 0)


def _without_last_send(table: Movement) -> Movement:
    return replace(table, sends=table.sends[:-1])


def _shifted_receive(table: Movement) -> Movement:
    (sender, ((start, stop), *rest)), *others = table.receives
    return replace(table, receives=((sender, ((start + 1, stop), *rest)), *others))


@pytest.mark.parametrize("corrupt", [_without_last_send, _shifted_receive])
@pytest.mark.parametrize(("source", "target"), [("x:S(0)", "x:S(1)"), ("x:S(0)", ""), ("x:P", "x:S(0)")])
def test_a_corrupted_table_is_noticed(corrupt, source: str, target: str) -> None:  # type: ignore[no-untyped-def]
    mesh, shape = make_mesh(2), (4, 4)
    route = reshard(shape, parse_layout(source), parse_layout(target), mesh)
    value = numpy.arange(16).reshape(shape)
    held = spread(value, route.source, mesh, numpy.random.default_rng(0))

    def wrong(step: Step, shape: tuple[int, ...], mesh: Mesh, rank: int) -> Movement:
        table = movement(step, shape, mesh, rank)
        return corrupt(table) if rank == 1 else table

    assert (read(run_route(route, held, mesh), shape, route.target, mesh) == value).all()
    with pytest.raises((AssertionError, KeyError)):
        run_route(route, held, mesh, wrong)
    with pytest.raises(AssertionError):
        check_tables([wrong(route.steps[0], shape, mesh, rank) for rank in range(2)])
