"""Timelines: exact on small tables, the same by another player, and quick on large ones."""

from __future__ import annotations

from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import ScheduleError
from conjoin.schedules import (
    Schedule,
    Times,
    check,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    one_f_one_b,
    play,
    with_transfers,
    zero_bubble,
    zero_bubble_v,
)
from tests.schedules.slow_play import slow_seconds

MADE = [gpipe, one_f_one_b, eager_one_f_one_b, zero_bubble, zero_bubble_v, lambda s, m: interleaved(s, 2, m)]
numbers = st.sampled_from([0.25, 0.5, 1.0, 1.5, 3.0])


@st.composite
def played(draw: st.DrawFn) -> tuple[Schedule, Times]:
    """A schedule, at times with a skip connection, and times that differ from stage to stage."""
    schedule = draw(st.sampled_from(MADE))(draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    if schedule.num_stages > 2 and draw(st.booleans()):
        schedule = replace(schedule, edges=(*schedule.edges, (0, schedule.num_stages - 1)))
    stages, edges = schedule.num_stages, len(schedule.edges)
    some = lambda n, least: tuple(draw(st.lists(numbers.map(lambda x: x - least), min_size=n, max_size=n)))
    return schedule, Times(some(stages, 0), some(stages, 0), some(stages, 0), some(edges, 0.25), some(edges, 0.25))


@settings(max_examples=50, deadline=None)
@given(played())
def test_another_player_gets_the_same(drawn: tuple[Schedule, Times]) -> None:
    schedule, times = drawn
    timeline = play(schedule, times)
    assert timeline.seconds == pytest.approx(slow_seconds(schedule, times))
    for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
        assert np.all(starts[1:] >= ends[:-1]) and np.all(ends >= starts)


@settings(max_examples=50, deadline=None)
@given(played())
def test_transfers_as_rows_that_are_started_in_time_change_nothing(drawn: tuple[Schedule, Times]) -> None:
    schedule, times = drawn
    lowered = with_transfers(schedule, times)
    check(lowered)
    plain, started = play(schedule, times), play(lowered, times)
    assert started.seconds == pytest.approx(plain.seconds)
    assert started.exposed_seconds == pytest.approx(plain.exposed_seconds, abs=1e-9)
    blocked = with_transfers(schedule, times, blocking=True)
    check(blocked)
    assert play(blocked, times, blocking=True).seconds >= plain.seconds - 1e-9


def test_one_f_one_b_with_transfers_by_hand() -> None:
    """Two stages, two micro-batches, half a second each way:

    owner 0: F 0-1, F 1-2, B 4-6 (gradient made at 3.5), B 6.5-8.5
    owner 1: F 1.5-2.5, B 2.5-4.5 …
    """
    schedule = one_f_one_b(2, 2)
    timeline = play(schedule, Times.alike(2, schedule.edges, transfer=0.5))
    assert timeline.starts[0].tolist() == [0, 1, 5, 8]
    assert timeline.starts[1].tolist() == [1.5, 2.5, 4.5, 5.5]
    assert timeline.seconds == 10 and timeline.busy == (6, 6) and timeline.idle == (4, 4)
    assert timeline.transfer_seconds == 2.0
    assert timeline.exposed_seconds == 0.5 + 0.5 + 0.5  # the first output, and both gradients


def test_transfers_that_block_take_up_both_ends() -> None:
    schedule = with_transfers(gpipe(2, 1))
    timeline = play(schedule, Times.alike(2, schedule.edges, transfer=0.5), blocking=True)
    assert timeline.seconds == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert timeline.exposed_seconds == 1.0 and timeline.hidden_seconds == 0


def test_eager_hides_what_one_f_one_b_does_not() -> None:
    """AlpaComm section 4: with a transfer of half a forward, eager waits for the first and the last transfers only."""
    times = Times.alike(2, one_f_one_b(2, 64).edges, transfer=0.5)
    plain, eager = play(one_f_one_b(2, 64), times), play(eager_one_f_one_b(2, 64), times)
    still = play(one_f_one_b(2, 64), Times.alike(2, one_f_one_b(2, 64).edges))
    assert eager.seconds <= still.seconds + 2 * 0.5 + 1e-9 < plain.seconds
    assert eager.exposed_seconds < 0.1 * plain.exposed_seconds


def test_a_late_receive_delays_its_transfer() -> None:
    schedule = one_f_one_b(2, 4)
    times = Times.alike(2, schedule.edges, transfer=0.5)
    late = with_transfers(schedule, times, early=0)
    check(late, rendezvous=False)
    assert play(late, times).seconds > play(schedule, times).seconds


def test_sixty_four_stages_and_thousands_of_micro_batches_are_played_in_about_a_second() -> None:
    schedule = one_f_one_b(64, 1024)
    begin = process_time()
    timeline = play(schedule, Times.alike(64, schedule.edges, transfer=0.125))
    assert process_time() - begin < 2  # 0.3 on a core of 2026, which is 1.2 for 4,096
    assert timeline.bubble < 0.2


def test_what_cannot_be_played_is_told() -> None:
    schedule = gpipe(2, 2)
    backwards = replace(schedule, rows=tuple(tuple(reversed(rows)) for rows in schedule.rows))
    with pytest.raises(ScheduleError, match="does not come to its end"):
        play(backwards, Times.alike(2, schedule.edges))
    with pytest.raises(ScheduleError, match="Give one time for each"):
        play(schedule, Times.alike(3, schedule.edges))
    with pytest.raises(ScheduleError, match="No time is less than 0"):
        play(schedule, Times.alike(2, schedule.edges, (1, 1, -1)))
    late = with_transfers(eager_one_f_one_b(3, 6), early=0)
    with pytest.raises(ScheduleError, match="does not come to its end"):
        play(late, Times.alike(3, late.edges), blocking=True)
    with pytest.raises(ScheduleError, match="It has some already"):
        with_transfers(late)
