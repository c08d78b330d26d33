"""Transfers that share links: as in a simulation in small steps, by hand, and never sooner than with links apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import process_time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.errors import ScheduleError
from conjoin.schedules import (
    Memory,
    Problem,
    Schedule,
    SharedLinks,
    Times,
    eager_one_f_one_b,
    events,
    find_schedule,
    gpipe,
    one_f_one_b,
    play,
    with_transfers,
)
from conjoin.schedules.bounds import Bounds
from conjoin.schedules.events import play_events
from conjoin.schedules.periods import Shortened
from tests.schedules.fluid_play import fluid_seconds
from tests.schedules.test_play import played


def one_link_each(schedule: Schedule, times: Times) -> Times:
    """Every owner has one uplink and one downlink."""

    def up_and_down(source: int, target: int, seconds: float) -> tuple[tuple[int, float], ...]:
        return (2 * schedule.owners[source], seconds), (2 * schedule.owners[target] + 1, seconds)

    there = tuple(up_and_down(a, b, s) for (a, b), s in zip(schedule.edges, times.activations, strict=True))
    back = tuple(up_and_down(b, a, s) for (a, b), s in zip(schedule.edges, times.gradients, strict=True))
    return replace(times, links=SharedLinks(there, back))


@st.composite
def shared(draw: st.DrawFn) -> tuple[Schedule, Times]:
    """A schedule and times with links: of each owner, or any of four that transfers take up in part."""
    schedule, times = draw(played())
    if draw(st.booleans()):
        return schedule, one_link_each(schedule, times)
    part, links = st.sampled_from([0.25, 0.5, 1.0]), st.lists(st.integers(0, 3), max_size=3, unique=True)

    def some(seconds: tuple[float, ...]) -> tuple[tuple[tuple[int, float], ...], ...]:
        return tuple(tuple((link, draw(part) * each) for link in draw(links)) for each in seconds)

    return schedule, replace(times, links=SharedLinks(some(times.activations), some(times.gradients)))


@settings(max_examples=60, deadline=None)
@given(shared())
def test_a_simulation_in_small_steps_gets_the_same(drawn: tuple[Schedule, Times]) -> None:
    schedule, times = drawn
    timeline = play(schedule, times)
    assert timeline.seconds == pytest.approx(fluid_seconds(schedule, times), abs=1e-6)
    assert timeline.seconds >= play(schedule, replace(times, links=None)).seconds - 1e-9
    memory = Memory.unlimited(schedule.num_stages, schedule.num_owners)
    problem = Problem(schedule.owners, schedule.num_micro_batches, times, memory, schedule.edges)
    assert Bounds(problem).least() <= timeline.seconds + 1e-9
    for starts, ends in zip(timeline.starts, timeline.ends, strict=True):
        assert np.all(starts[1:] >= ends[:-1]) and np.all(ends >= starts)


@settings(max_examples=30, deadline=None)
@given(played())
def test_links_that_nobody_shares_change_nothing(drawn: tuple[Schedule, Times]) -> None:
    schedule, times = drawn
    quick = play(schedule, times)
    starts, ends, exposed, stuck = play_events(schedule, times)
    assert not stuck and exposed == pytest.approx(quick.exposed_seconds)
    for mine, theirs in zip((*starts, *ends), (*quick.starts, *quick.ends), strict=True):
        assert mine == pytest.approx(theirs)


def test_a_middle_stage_sends_both_ways_over_one_uplink() -> None:
    """Three stages, one micro-batch there and back: nothing is under way at once. With two, activations of the second
    and the gradient of the first meet where they would not have waited."""
    alone = gpipe(3, 1)
    times = Times.alike(3, alone.edges, transfer=4)
    assert play(alone, one_link_each(alone, times)).seconds == play(alone, times).seconds == 3 + 8 + 6 + 8
    several = one_f_one_b(3, 8)
    assert play(several, one_link_each(several, times)).seconds > 1.05 * play(several, times).seconds


def test_two_transfers_on_one_link_each_go_at_half_its_rate() -> None:
    """Stage 0 sends to 1 and to 2 at once, over one uplink: both come after 4 seconds, in place of 2."""
    schedule = replace(gpipe(3, 1), edges=((0, 1), (0, 2)))
    links = SharedLinks((((0, 2.0),), ((0, 2.0),)), ((), ()))
    times = Times((1, 1, 1), (1, 1, 1), (0, 0, 0), (2, 2), (0, 0), links=links)
    timeline = play(schedule, times)
    assert timeline.starts[1][0] == timeline.starts[2][0] == 1 + 4
    half = replace(times, links=SharedLinks((((0, 2.0),), ((0, 1.0),)), ((), ())))
    assert play(schedule, half).starts[2][0] == 1 + 3  # three halves of the link are wanted, and both end together
    assert play(schedule, replace(times, links=None)).starts[2][0] == 1 + 2


def test_rows_that_send_and_receive_share_links_too() -> None:
    schedule = eager_one_f_one_b(4, 6)
    times = one_link_each(schedule, Times.alike(4, schedule.edges, transfer=2.0))
    lowered = with_transfers(schedule, times)
    assert play(lowered, times).seconds >= play(schedule, times).seconds - 1e-9
    assert play(lowered, times).seconds > play(lowered, replace(times, links=None)).seconds
    blocked = with_transfers(schedule, times, blocking=True)
    apart = play(blocked, replace(times, links=None), blocking=True).seconds
    assert play(blocked, times, blocking=True).seconds == pytest.approx(apart), "an owner has one at a time"


def test_the_best_schedule_is_played_with_shared_links_and_above_its_bound() -> None:
    schedule = one_f_one_b(3, 4)
    for transfer in (0.5, 2.0):
        times = one_link_each(schedule, Times.alike(3, schedule.edges, transfer=transfer))
        problem = Problem.of((0, 1, 2), 4, times, Memory.in_flight(3, (4, 3, 2)))
        found = find_schedule(problem, 500)
        assert found.seconds == pytest.approx(fluid_seconds(found.schedule, times))
        assert found.bound <= found.seconds + 1e-9 and found.proven == (found.seconds <= found.bound * (1 + 1e-9))
        assert Bounds(problem).least() <= min(found.seconds, fluid_seconds(schedule, times)) + 1e-9


def test_links_of_another_number_of_edges_are_refused() -> None:
    schedule = gpipe(3, 2)
    times = one_link_each(schedule, Times.alike(3, schedule.edges, transfer=1.0))
    with pytest.raises(ScheduleError, match="Give one time for each"):
        play(schedule, replace(times, links=SharedLinks((), ())))
    backwards = replace(schedule, rows=tuple(tuple(reversed(rows)) for rows in schedule.rows))
    with pytest.raises(ScheduleError, match="wait for ever at"):
        play(backwards, times)


@pytest.mark.parametrize("make", [one_f_one_b, eager_one_f_one_b])
@pytest.mark.parametrize("transfer", [0.125, 0.7, 2.0])
def test_a_long_schedule_is_played_by_a_short_one_where_it_repeats(
    make: Callable[[int, int], Schedule], transfer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make(4, 200)
    times = one_link_each(schedule, Times.alike(4, schedule.edges, transfer=transfer))
    whole = play(schedule, times)
    monkeypatch.setattr(events, "LONG", 0)
    short = play(schedule, times)
    left = Shortened(schedule).schedule
    assert left is not None and left.num_micro_batches < 100, "most of it is taken out"
    assert (Shortened(schedule).period(play(left, times).starts) is None) == (transfer == 2.0), "or played whole"
    assert short.exposed_seconds == pytest.approx(whole.exposed_seconds)
    for mine, theirs in zip((*short.starts, *short.ends), (*whole.starts, *whole.ends), strict=True):
        assert mine == pytest.approx(theirs)


def test_many_stages_that_share_links_are_played_quickly() -> None:
    schedule = one_f_one_b(64, 1024)
    times = one_link_each(schedule, Times.alike(64, schedule.edges, transfer=0.125))
    begin = process_time()
    assert play(schedule, times).seconds >= 3 * 1024
    assert process_time() - begin < 4  # 0.8 on a core of 2026, and 1.5 for 4,096
