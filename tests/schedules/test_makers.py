"""The schedules people know: whole for all counts, with the bubbles and the memory that formulas give."""

from __future__ import annotations

import pytest

from conjoin.errors import ScheduleError
from conjoin.schedules import (
    Kind,
    Memory,
    Schedule,
    Times,
    breadth_first,
    chain,
    check,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    least_weight_delay,
    one_f_one_b,
    play,
    there_and_back,
    with_late_weights,
    zero_bubble,
    zero_bubble_v,
)

COUNTS = [(stages, micro_batches) for stages in (1, 2, 3, 5) for micro_batches in (1, 2, 3, 4, 7, 11)]


def all_made(stages: int, micro_batches: int) -> list[Schedule]:
    return [
        gpipe(stages, micro_batches),
        one_f_one_b(stages, micro_batches),
        one_f_one_b(stages, micro_batches, max_in_flight=2),
        eager_one_f_one_b(stages, micro_batches),
        *(eager_one_f_one_b(stages, micro_batches, delay) for delay in (0, 1, 3)),
        zero_bubble(stages, micro_batches),
        zero_bubble(stages, micro_batches, max_in_flight=2 * stages - 1),
        zero_bubble_v(stages, micro_batches),
        *(interleaved(stages, each, micro_batches) for each in (1, 2, 3)),
        breadth_first(stages, 2, micro_batches),
        there_and_back(stages, micro_batches),
        with_late_weights(interleaved(stages, 2, micro_batches), range(stages)),
    ]


@pytest.mark.parametrize(("stages", "micro_batches"), COUNTS)
def test_every_schedule_is_whole_and_comes_to_its_end(stages: int, micro_batches: int) -> None:
    for schedule in all_made(stages, micro_batches):
        check(schedule)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 3), (4, 8), (5, 5), (8, 32)])
def test_bubbles_are_those_of_the_formulas(stages: int, micro_batches: int) -> None:
    seconds = (1.0, 1.25, 0.75)
    for schedule in (gpipe(stages, micro_batches), one_f_one_b(stages, micro_batches)):
        timeline = play(schedule, Times.alike(stages, schedule.edges, seconds))
        assert timeline.seconds == pytest.approx((micro_batches + stages - 1) * 3)
        assert timeline.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1))
    loops = interleaved(stages, 2, stages * 3)
    half = tuple(each / 2 for each in seconds)
    timeline = play(loops, Times.alike(2 * stages, loops.edges, half))
    assert timeline.seconds == pytest.approx(stages * 3 * 3 + (stages - 1) * 3 / 2)


def test_gpipe_waits_for_transfers_once_each_way() -> None:
    schedule = gpipe(4, 8)
    timeline = play(schedule, Times.alike(4, schedule.edges, transfer=0.5))
    assert timeline.seconds == (8 + 3) * 3 + 2 * 3 * 0.5


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_memory_is_that_of_the_papers(stages: int) -> None:
    many = 20
    assert check(gpipe(stages, many)).in_flight == (many,) * stages
    assert check(one_f_one_b(stages, many)).in_flight == tuple(range(stages, 0, -1))
    assert check(eager_one_f_one_b(stages, many)).in_flight == tuple(2 * i - 1 for i in range(stages, 0, -1))
    assert max(check(zero_bubble(stages, many)).in_flight) == stages
    assert max(check(zero_bubble_v(stages, many)).held) <= 2 * stages
    assert max(check(one_f_one_b(stages, many, max_in_flight=2)).in_flight) == 2


def test_eager_delays_weight_gradients_no_more_than_asked() -> None:
    for delay in (0, 1, 4):
        for rows in eager_one_f_one_b(3, 6, delay).rows:
            owed = 0
            for row in rows:
                owed += {Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: -1}.get(row.kind, 0)
                assert 0 <= owed <= delay + 1


def test_the_least_delay_is_no_worse_than_any_and_none_where_nothing_travels() -> None:
    for transfer in (0.0, 0.5, 2.0):
        schedule = eager_one_f_one_b(3, 12)
        times = Times.alike(3, schedule.edges, (1.0, 1.0, 1.0), transfer)
        best = least_weight_delay(3, 12, times)
        every = [play(eager_one_f_one_b(3, 12, delay), times).seconds for delay in (None, 0, 1, 2, 3)]
        assert play(eager_one_f_one_b(3, 12, best), times).seconds == pytest.approx(min(every))
        fewer = [None, 0, 1, 2, 3][: [None, 0, 1, 2, 3].index(best)]
        assert all(play(eager_one_f_one_b(3, 12, delay), times).seconds > min(every) + 1e-6 for delay in fewer)


@pytest.mark.parametrize(("stages", "num"), [(2, 8), (4, 8), (4, 12), (8, 16)])
def test_zero_bubble_is_what_its_paper_says(stages: int, num: int) -> None:
    """Qi et al. 2023: (S - 1)(F + I - W) of bubble in the memory of 1F1B, none with twice as much."""
    edges = chain(stages)
    for seconds in ((1.0, 1.0, 1.0), (1.0, 1.0, 0.5)):
        times = Times.alike(stages, edges, seconds)
        timeline = play(zero_bubble(stages, num, times=times), times)
        assert min(timeline.idle) == pytest.approx((stages - 1) * (seconds[0] + seconds[1] - seconds[2]))
    alike = Times.alike(stages, edges)
    assert play(zero_bubble(stages, num, max_in_flight=2 * stages - 1), alike).seconds == 3 * num + stages - 1
    assert play(zero_bubble_v(stages, num), Times.alike(2 * stages, chain(2 * stages))).seconds == 6 * num + stages - 1


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: gpipe(0, 2), "0 stages"),
        (lambda: one_f_one_b(2, 0), "0 micro-batches"),
        (lambda: one_f_one_b(2, 4, max_in_flight=0), "0 micro-batches in flight"),
        (lambda: gpipe(2, 1 << 20), "1,048,576 micro-batches"),
        (lambda: eager_one_f_one_b(2, 2, weight_delay=-1), "-1 micro-batches late"),
    ],
)
def test_counts_that_no_schedule_has_are_refused(make, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        make()


def test_less_memory_than_one_micro_batch_takes_is_refused() -> None:
    with pytest.raises(ScheduleError, match="One micro-batch at each of its 2 stages holds 2"):
        zero_bubble_v(2, 4, max_in_flight=1)
    assert Memory.in_flight(2, (1, 1)).held == (1, 1)
