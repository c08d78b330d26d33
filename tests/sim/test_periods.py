"""Periods that are timed a few times and multiplied, against the engine, which times them all."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from conjoin.sim import periods
from conjoin.sim.engine import (
    BETWEEN,
    COMPUTE,
    INSIDE,
    MAX_TICKS,
    NUM_STREAMS,
    Fragment,
    Instruction,
    Span,
    State,
    advance,
    run,
)
from conjoin.sim.periods import last_tick

SHAPE = (2, 3)


def random_task(rng: Random, shape: tuple[int, ...]) -> Instruction:
    """Something on a stream; its collectives wait for what was computed, or for anything."""
    stream = rng.choice((COMPUTE, COMPUTE, INSIDE, BETWEEN))
    ticks, host = rng.choice((0, 1, 5, 30, 100)), rng.choice((0, 1, 7, 40))
    waits = tuple(row for row in (COMPUTE, INSIDE, BETWEEN) if rng.random() < 0.3)
    if not shape:
        return Instruction("task", stream, ticks, host, waits=waits)
    by_class = np.array([[rng.choice((1, 10, 60)) for _ in range(3)] for _ in range(2)], np.int64)
    where = np.array([[True, False, True], [True, True, True]]) if rng.random() < 0.1 else None
    group = rng.choice(((), (0,), (1,), (0, 1)))
    return Instruction("task", stream, by_class if rng.random() < 0.5 else ticks, host, group, waits, where=where)


def stack(rng: Random, count: int, shape: tuple[int, ...]) -> tuple[list[Fragment], int]:
    """A prologue, periods in which some tasks wait for those of the period before, the way back, and an epilogue."""
    fragments = [tuple(random_task(rng, shape) for _ in range(rng.randrange(3))) for _ in range(2)]
    event = NUM_STREAMS
    for _ in range(2):
        period = [random_task(rng, shape) for _ in range(rng.randrange(1, 6))]
        setters = [i for i, task in enumerate(period) if task.where is None and rng.random() < 0.4]
        waiting = [i for i in range(len(period)) if setters and rng.random() < 0.5]
        awaited = {i: (rng.choice(setters), rng.randrange(1, 3)) for i in waiting}
        first = event
        for k in range(count):
            for i, task in enumerate(period):
                made = task
                if i in awaited:
                    setter, back = awaited[i]
                    row = first + len(setters) * (k - back) + setters.index(setter)
                    made = replace(made, waits=(*made.waits, row)) if k >= back else made
                if i in setters:
                    made = replace(made, event=event)
                    event += 1
                fragments.append((made,))
        fragments += [(random_task(rng, shape),)]
    return [*fragments, (random_task(rng, shape),)], event - NUM_STREAMS


@pytest.mark.parametrize("shape", [(), SHAPE])
@pytest.mark.parametrize("slowed", [0, 30])
def test_a_random_stack_takes_as_long_as_the_engine_says(shape: tuple[int, ...], slowed: int) -> None:
    folded = 0
    for seed in range(80):
        fragments, num_events = stack(Random(seed), 12 + seed % 9, shape)
        found = last_tick(fragments, num_events, shape, slowed)
        folded += found is not None
        assert found in (None, run(fragments, num_events, shape, slowed).ticks), seed
    assert folded > 50


def test_of_many_periods_few_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def counted(state: State, tasks: Fragment, slowed: int, shape: tuple[int, ...]) -> tuple[State, tuple[Span, ...]]:
        timed.append(len(tasks))
        return advance(state, tasks, slowed, shape)

    monkeypatch.setattr(periods, "advance", counted)
    for count in (100, 1000):
        fragments, num_events = stack(Random(3), count, ())
        assert last_tick(fragments, num_events) == run(fragments, num_events).ticks
    assert sum(timed) < 400


def test_a_lead_that_shrinks_is_seen() -> None:
    """What is sent is behind at first and catches up later: periods look alike until it has."""
    late, work = Instruction("late", BETWEEN, 10_000), Instruction("work", COMPUTE, 11)
    send, wait = Instruction("send", BETWEEN, 10), Instruction("wait", COMPUTE, 0, waits=(BETWEEN,))
    for fragments in ([(late,), *[(work, send)] * 20, (wait,)], [(late,), *[(work, send)] * 20_000, (wait,)]):
        assert last_tick(fragments) in (None, run(fragments).ticks)


def test_what_waits_for_the_middle_of_a_stretch_is_timed_in_full() -> None:
    work = [(Instruction("work", BETWEEN, 5, event=NUM_STREAMS + i),) for i in range(50)]
    fragments = [*work, (Instruction("wait", COMPUTE, 1, waits=(NUM_STREAMS + 20,)),)]
    assert last_tick(fragments, 50) is None
    assert last_tick(fragments[:-1], 50) == 250


def test_more_than_times_can_tell_is_left_to_the_engine() -> None:
    assert last_tick([(Instruction("work", COMPUTE, MAX_TICKS // 10),)] * 20) is None
