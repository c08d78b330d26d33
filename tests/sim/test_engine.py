"""Timelines worked out by hand; and a timeline made from another one is the one made from the beginning."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from conjoin.errors import UsageError
from conjoin.sim.engine import (
    BETWEEN,
    COMPUTE,
    INSIDE,
    MAX_TICKS,
    NUM_STREAMS,
    Fragment,
    Instruction,
    Timeline,
    rerun,
    run,
    to_ticks,
)
from tests.ir.wording import assert_three_sentences

FIRST, SECOND = NUM_STREAMS, NUM_STREAMS + 1


def compute(ticks: int | list[int], *waits: int, host: int = 0) -> Instruction:
    amount = np.array(ticks, np.int64) if isinstance(ticks, list) else ticks
    return Instruction("compute", COMPUTE, amount, host=host, waits=waits)


def send(ticks: int, stream: int = BETWEEN, group: tuple[int, ...] = (), event: int = -1) -> Instruction:
    return Instruction("send", stream, ticks, group=group, waits=(COMPUTE,), event=event)


def spans(timeline: Timeline) -> list[tuple[int, int]]:
    return [(int(np.max(start)), int(np.max(end))) for _, start, end in timeline.times()]


def test_a_line_runs_one_after_the_other() -> None:
    line = [(compute(3),), (send(5), compute(2, BETWEEN)), (compute(4),)]
    assert spans(run(line)) == [(0, 3), (3, 8), (8, 10), (10, 14)]


def test_a_diamond_hides_the_transfer_of_one_branch_behind_the_other() -> None:
    root, left, right, join = compute(2), compute(3), compute(6), compute(1, FIRST)
    diamond = [(root,), (left, send(4, event=FIRST)), (right,), (join,)]
    assert spans(run(diamond, 1)) == [(0, 2), (2, 5), (5, 9), (5, 11), (11, 12)]
    slow = [(root,), (left, send(40, event=FIRST)), (right,), (join,)]
    assert run(slow, 1).ticks == 2 + 3 + 40 + 1


def test_transfers_on_one_link_queue_and_on_two_do_not() -> None:
    start, wait = compute(1), compute(0, BETWEEN, INSIDE)
    assert spans(run([(start, send(5), send(7), wait)]))[1:3] == [(1, 6), (6, 13)]
    assert spans(run([(start, send(5), send(7, INSIDE), wait)]))[1:3] == [(1, 6), (1, 8)]


def test_a_gradient_reduction_overlaps_the_rest_of_the_backward_pass() -> None:
    backward = [(compute(4), send(6)), (compute(4), send(6)), (compute(4), send(6))]
    timeline = run([*backward, (compute(0, BETWEEN), compute(2))])
    assert timeline.ticks == 4 + 3 * 6 + 2


def test_a_group_starts_together_and_others_do_not_wait() -> None:
    uneven = compute([[1, 5], [2, 9]])
    timeline = run([(uneven, send(10, group=(1,)), compute(0, BETWEEN))], 0, (2, 2))
    assert np.broadcast_to(timeline.end, (2, 2)).tolist() == [[15, 15], [19, 19]]
    timeline = run([(uneven, send(10, group=(0,)), compute(0, BETWEEN))], 0, (2, 2))
    assert np.broadcast_to(timeline.end, (2, 2)).tolist() == [[12, 19], [12, 19]]


def test_the_host_holds_up_a_device_that_is_faster() -> None:
    assert spans(run([tuple(compute(2, host=5) for _ in range(3))])) == [(5, 7), (10, 12), (15, 17)]
    assert spans(run([tuple(compute(9, host=5) for _ in range(3))])) == [(5, 14), (14, 23), (23, 32)]


def random_fragment(rng: Random, shape: tuple[int, ...], hosts: bool) -> Fragment:
    made = []
    for _ in range(rng.randint(0, 4)):
        stream = rng.choice((COMPUTE, COMPUTE, COMPUTE, INSIDE, BETWEEN))
        ticks: int | np.ndarray = rng.randint(0, 50)
        if shape and rng.random() < 0.3:
            ticks = np.array([rng.randint(0, 50) for _ in range(int(np.prod(shape)))], np.int64).reshape(shape)
        others = rng.sample((INSIDE, BETWEEN, FIRST, SECOND), rng.randint(0, 2))
        waits = (COMPUTE,) if stream != COMPUTE else tuple(others)
        group = rng.choice(((0,), (1,), (0, 1))) if shape and stream != COMPUTE else ()
        event = rng.choice((-1, FIRST, SECOND)) if stream != COMPUTE else -1
        host: int | np.ndarray = rng.choice((0, 0, 20)) if hosts else 0
        where = None
        if shape and rng.random() < 0.3:  # some places of an axis along which nobody is waited for
            axis = rng.choice([a for a in range(2) if a not in group] or [-1])
            places = np.arange(shape[axis]) == rng.randrange(shape[axis])
            where = np.broadcast_to(places[:, None] if axis == 0 else places, shape) if axis >= 0 else None
            host = host if where is None else host * where.astype(np.int64)
        made.append(Instruction("any", stream, ticks, host, group, waits, event, where=where))
    return tuple(made)


@pytest.mark.parametrize("slowed", [0, 40], ids=["", "slowed"])
@pytest.mark.parametrize("hosts", [False, True], ids=["no host", "host"])
@pytest.mark.parametrize("shape", [(), (2, 3)], ids=["one class", "six classes"])
def test_a_changed_timeline_is_that_of_the_changed_program_to_the_last_bit(
    shape: tuple[int, ...], hosts: bool, slowed: int
) -> None:
    rng = Random(0)
    timed = in_full = 0
    for _ in range(25):
        fragments = [random_fragment(rng, shape, hosts) for _ in range(40)]
        timeline = run(fragments, 2, shape, slowed)
        for _ in range(5):
            changed = sorted(rng.sample(range(40), rng.randint(1, 3)))
            fragments = list(fragments)
            for place in changed:
                fragments[place] = random_fragment(rng, shape, hosts)
            timeline, full = rerun(timeline, fragments, changed), run(fragments, 2, shape, slowed)
            assert timeline.ticks == full.ticks
            for (task, *mine), (same, *theirs) in zip(timeline.times(), full.times(), strict=True):
                assert task is same and all(map(np.array_equal, mine, theirs))
            timed, in_full = timed + timeline.num_timed, in_full + full.num_timed
    assert hosts or timed < 0.5 * in_full, "nothing was saved"


@pytest.mark.parametrize("shape", [(), (1,)], ids=["numbers", "arrays"])
def test_what_is_computed_beside_communication_takes_longer(shape: tuple[int, ...]) -> None:
    """As many per cent as are said, over as much of it as there is communication for; nothing else is later."""
    beside = [(compute(10), send(100), compute(40), compute(60), compute(20), compute(7))]
    found = [(int(np.max(start)), int(np.max(end))) for start, end in spans(run(beside, 0, shape, slowed=25))]
    assert found == [(0, 10), (10, 110), (10, 60), (60, 130), (130, 150), (150, 157)]
    alone = [(compute(10), compute(40), send(100))]
    assert run(alone, 0, shape, slowed=25).ticks == run(alone, 0, shape).ticks == 150
    waited = [(compute(10), send(100), compute(40, BETWEEN))]
    assert run(waited, 0, shape, slowed=25).ticks == 150


@pytest.mark.parametrize("shape", [(), (2,)])
def test_a_step_that_is_too_long_to_be_counted_is_refused(shape: tuple[int, ...]) -> None:
    """107 days of picoseconds are all that fit: there is no traceback, nor do times begin anew at the other end."""
    long, short = (Instruction("work", COMPUTE, ticks) for ticks in (MAX_TICKS // 2, 1))
    assert run([(long,), (long, short)], 0, shape).ticks <= MAX_TICKS
    with pytest.raises(UsageError, match="counted up to 9") as total:
        run([(long,), (long, long)], 0, shape)
    with pytest.raises(UsageError, match=r"take 1e\+09 seconds or more") as single:
        to_ticks(1e9)
    with pytest.raises(UsageError, match="take inf seconds") as endless:
        to_ticks(float("inf"))
    for told in (total, single, endless):
        assert_three_sentences(told.value)


def test_a_change_that_makes_a_step_too_long_is_refused() -> None:
    long, short = (Instruction("work", COMPUTE, ticks) for ticks in (MAX_TICKS // 2, 1))
    before = run([(short,)] * 4)
    with pytest.raises(UsageError, match="times are counted up to"):
        rerun(before, [(long,)] * 4, [0, 1, 2, 3])
