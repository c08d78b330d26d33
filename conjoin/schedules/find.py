"""The best schedule for given times and memory: those people know, those that come about, then branch and bound.

Micro-batches are alike, so at every stage they may as well run in order, and a schedule is, for each owner, an order
of kinds. Branch and bound takes the row that can end first, and tries in its place every row of the same owner that
could start before that end (Giffler and Thompson 1960: some best schedule is among these where each owner has one
stage and stages form a chain). What a partial schedule cannot be better than is as in `bounds.py`; of two with the
same rows done, the one that is nowhere earlier is dropped. The search is deterministic, counts its steps, and says
whether it proved its result: because it came to its end, or because the result meets the bound. Where transfers share
links, rows are chosen as if they did not; what comes of it is played with them, and only the bound proves a result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from conjoin.schedules.bounded_search import Branching
from conjoin.schedules.bounds import Bounds
from conjoin.schedules.check import peaks
from conjoin.schedules.greedy import Taste, greedy, refilled
from conjoin.schedules.makers import (
    breadth_first,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    one_f_one_b,
    there_and_back,
    with_late_weights,
)
from conjoin.schedules.play import play
from conjoin.schedules.schedule import Kind, Schedule, chain, looped, one_each, v_shaped
from conjoin.schedules.times import Problem, Times

PATIENCE = (0.0, 0.99)
"""Whether to wait for a better row: never, or for nearly as long as what would run instead takes."""
TASTES = tuple(
    Taste(order, deep, patience)
    for order in (
        (Kind.INPUT_GRADIENT, Kind.FORWARD, Kind.WEIGHT_GRADIENT),
        (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT),
    )
    for deep in (True, False)
    for patience in PATIENCE
)
CLOSE = 1e-9
"""Sums of seconds are the same when they differ by less, as a part of them: they are added up in different orders."""


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """The best schedule that was found, and whether there can be a better one."""

    schedule: Schedule
    seconds: float
    bound: float
    """No schedule within memory is below this."""
    proven: bool
    """Whether none is faster."""
    steps: int
    """Of branch and bound."""


def find_schedule(problem: Problem, max_steps: int = 10_000) -> FoundSchedule:
    """The best schedule of a pipeline that is found in so many steps of branch and bound.

    >>> from conjoin.schedules import Memory
    >>> find_schedule(Problem.of((0, 1), 4, memory=Memory.in_flight(2, (2, 2)))).seconds
    13.0
    """
    bound = Bounds(problem).least()
    best, seconds = None, inf
    for schedule, found in _candidates(problem):
        if found < seconds * (1 - CLOSE):
            best, seconds = schedule, found
        if seconds <= bound * (1 + CLOSE):
            break
    assert best is not None
    if seconds <= bound * (1 + CLOSE):
        return FoundSchedule(best, seconds, bound, True, 0)
    search = Branching(problem)
    better, ended = search.improve(seconds, max_steps)
    if better is not None:
        best, seconds = better, play(better, problem.times).seconds
    is_complete = ended and problem.times.links is None
    if is_complete and problem.owners == one_each(len(problem.owners)) and problem.edges == chain(len(problem.owners)):
        bound = seconds
    return FoundSchedule(best, seconds, bound, seconds <= bound * (1 + CLOSE), search.steps)


def least_weight_delay(num_stages: int, num_micro_batches: int, times: Times) -> int | None:
    """How many micro-batches late eager 1F1B has to run weight gradients to hide what can be hidden; None: not apart.

    AlpaComm 4 delays them no more than it takes, since what waits for them is kept in memory.
    """
    delays: list[int | None] = [None, *range(min(num_stages, num_micro_batches) + 1)]
    found = [play(eager_one_f_one_b(num_stages, num_micro_batches, delay), times).seconds for delay in delays]
    return next(delay for delay, seconds in zip(delays, found, strict=True) if seconds <= min(found) * (1 + CLOSE))


def _candidates(problem: Problem) -> Iterator[tuple[Schedule, float]]:
    """Schedules within memory to begin with, and their seconds; the first is always there.

    Some are made as if transfers took no time: owners that keep in step may do better than those that take what they
    see.
    """
    times, memory, num_edges = problem.times, problem.memory, len(problem.edges)
    nothing = (0.0,) * num_edges
    at_once = replace(problem, times=replace(times, activations=nothing, gradients=nothing, links=None))
    for taste in TASTES:
        schedule = greedy(problem, taste)
        yield schedule, play(schedule, times).seconds
        yield from _refilled(greedy(at_once, taste), problem)
    if problem.apart:
        for taste in TASTES:
            schedule = greedy(replace(problem, apart=False), taste)
            yield schedule, play(schedule, times).seconds
    for known in _known(problem):
        schedule = replace(known, edges=problem.edges)
        held = peaks(schedule, memory).held
        if all(mine <= limit for mine, limit in zip(held, memory.limits, strict=True)):
            yield schedule, play(schedule, times).seconds
        yield from _refilled(schedule, problem)


def _refilled(schedule: Schedule, problem: Problem) -> Iterator[tuple[Schedule, float]]:
    for patience in PATIENCE if problem.apart else ():
        better = refilled(schedule, problem, patience)
        if better is not None:
            made, seconds = better
            yield made, seconds if problem.times.links is None else play(made, problem.times).seconds


def _known(problem: Problem) -> Sequence[Schedule]:
    num_owners, num = problem.num_owners, problem.num_micro_batches
    stages_each = len(problem.owners) // num_owners
    if problem.owners == v_shaped(num_owners):
        return (there_and_back(num_owners, num),)
    if problem.owners != looped(num_owners, stages_each):
        return ()
    if stages_each > 1:
        ways = [(slope, more) for slope in (2, 1) for more in range(num_owners + 1)]
        loops = [interleaved(num_owners, stages_each, num, slope, more) for slope, more in ways]
        late = [with_late_weights(loop, range(num_owners)) for loop in loops if problem.apart]
        return *loops, *late, breadth_first(num_owners, stages_each, num)
    eager = [eager_one_f_one_b(num_owners, num, delay) for delay in ([None, 0, 1, 2] if problem.apart else [None])]
    return one_f_one_b(num_owners, num), *eager, gpipe(num_owners, num)
