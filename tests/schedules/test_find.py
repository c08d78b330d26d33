"""The best schedule: as good as brute force finds, within memory, no worse than what others' tables are."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations, product
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from conjoin.schedules import (
    Kind,
    Memory,
    Pipeline,
    Row,
    Schedule,
    Times,
    chain,
    check,
    find_schedule,
    looped,
    one_each,
    peaks,
    play,
    v_shaped,
)
from tests.schedules.slow_play import slow_seconds


@cache
def orders(num: int, apart: bool) -> tuple[tuple[tuple[Kind, int], ...], ...]:
    """Every order in which one owner of one stage can run its rows."""
    kinds = (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT) if apart else (Kind.FORWARD, Kind.BACKWARD)
    rows = [(kind, m) for kind in kinds for m in range(num)]
    steps = list(pairwise(kinds))

    def right(order: tuple[tuple[Kind, int], ...]) -> bool:
        return all(order.index((one, m)) < order.index((next_one, m)) for one, next_one in steps for m in range(num))

    return tuple(order for order in permutations(rows) if right(order))


def brute_force(pipeline: Pipeline) -> float:
    """The best of all orders of all owners."""
    best = float("inf")
    stages, num = len(pipeline.owners), pipeline.num_micro_batches
    for choice in product(orders(num, pipeline.apart), repeat=stages):
        rows = tuple(tuple(Row(kind, stage, m) for kind, m in order) for stage, order in enumerate(choice))
        schedule = Schedule(pipeline.owners, num, rows, pipeline.edges)
        held = peaks(schedule, pipeline.memory).held
        if all(mine <= limit for mine, limit in zip(held, pipeline.memory.limits, strict=True)):
            best = min(best, slow_seconds(schedule, pipeline.times))
    return best


TINY = [
    (2, 2, True, (2, 2), 0.0), (2, 2, True, (2, 1), 0.5), (2, 2, True, (1, 1), 2.0),
    (2, 3, False, (2, 1), 1.0), (3, 2, False, (2, 2, 2), 0.75), (3, 2, False, (2, 1, 1), 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("stages", "num", "apart", "limits", "transfer"), TINY)
def test_the_best_of_all_orders_is_found_and_said_to_be_proven(
    stages: int, num: int, apart: bool, limits: tuple[int, ...], transfer: float
) -> None:
    edges = chain(stages)
    uneven = Times(
        (1.0, 1.5, 0.5)[:stages], (1.0, 0.75, 2.0)[:stages], (0.5, 1.0, 1.0)[:stages], *[(transfer,) * len(edges)] * 2
    )
    for times in (Times.alike(stages, edges, transfer=transfer), uneven):
        pipeline = Pipeline(one_each(stages), num, times, Memory.in_flight(stages, limits), edges, apart)
        found = find_schedule(pipeline)
        check(found.schedule, pipeline.memory)
        assert found.proven
        assert (
            found.seconds == pytest.approx(brute_force(pipeline)) == pytest.approx(slow_seconds(found.schedule, times))
        )


@pytest.mark.parametrize("owners", [one_each(4), looped(2, 2), v_shaped(2)])
def test_never_below_its_bound_and_never_beyond_its_memory(owners: tuple[int, ...]) -> None:
    for limit, transfer in ((2, 0.5), (3, 0.0), (4, 1.0)):
        times = Times.alike(len(owners), chain(len(owners)), transfer=transfer)
        pipeline = Pipeline.of(owners, 5, times, Memory.in_flight(len(owners), [limit] * (max(owners) + 1)))
        found = find_schedule(pipeline, max_steps=300)
        check(found.schedule, pipeline.memory)
        assert found.seconds >= found.bound - 1e-9
        assert found == find_schedule(pipeline, max_steps=300), "the same question has the same answer"
        whole = find_schedule(replace(pipeline, apart=False), max_steps=300)
        assert found.seconds <= whole.seconds + 1e-9
        assert not any(row.kind is Kind.WEIGHT_GRADIENT for rows in whole.schedule.rows for row in rows)


def their_table(kind: type, owners: int, stages_each: int, num: int) -> Schedule:
    """A schedule of torch as one of ours; its 1F1B counts micro-batches of some ranks from 1 instead of 0."""
    count = owners * stages_each
    stages = [
        SimpleNamespace(num_stages=count, group_size=owners, group_rank=0, stage_index=i * owners, submod=None,
                        has_backward=True, is_first=i == 0, is_last=False)
        for i in range(stages_each)
    ]  # fmt: skip
    made = kind(stages[0], num) if issubclass(kind, theirs.PipelineScheduleSingle) else kind(stages, num)
    belongs, table = [0] * count, []
    for owner in range(owners):
        actions = [part for action in made.pipeline_order[owner] if action for part in action.sub_actions or (action,)]
        actions = [action for action in actions if action.computation_type.value in ("F", "B", "I", "W")]
        first = min(a.microbatch_index for a in actions if a.computation_type.value == "F")
        table.append(
            tuple(
                Row(
                    Kind(a.computation_type.value),
                    a.stage_index,
                    a.microbatch_index - first * (a.computation_type.value == "F"),
                )
                for a in actions
            )
        )
        for action in actions:
            belongs[action.stage_index] = owner
    return Schedule(tuple(belongs), num, tuple(table), chain(count), kind.__name__)


THEIRS = [
    (theirs.ScheduleGPipe, 1), (theirs.Schedule1F1B, 1), (theirs.ScheduleLoopedBFS, 2),
    (theirs.ScheduleInterleaved1F1B, 2), (theirs.ScheduleInterleavedZeroBubble, 2), (theirs.ScheduleZBVZeroBubble, 2),
    (theirs.ScheduleDualPipeV, 2),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "stages_each"), THEIRS, ids=[kind.__name__ for kind, _ in THEIRS])
def test_never_behind_the_tables_of_torch_at_equal_memory(kind: type, stages_each: int) -> None:
    for owners, num in ((2, 4), (3, 6)):
        table = their_table(kind, owners, stages_each, num)
        memory = Memory.in_flight(table.num_stages, check(table).held)
        for transfer in (0.0, 0.25, 1.0):
            times = Times.alike(table.num_stages, table.edges, transfer=transfer)
            found = find_schedule(Pipeline.of(table.owners, num, times, memory), max_steps=1000)
            check(found.schedule, memory)
            assert found.seconds <= play(table, times).seconds + 1e-9, (owners, num, transfer)
