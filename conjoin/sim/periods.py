"""How long a program takes in which the same fragments come again and again: a few periods are timed, then all.

Layers of a model follow each other, and so do their fragments. When a stream is free after a period some ticks later
than after the one before, its *rate*, and every task of a period begins after the same stream or event whose lead never
shrinks, then the next period is the same one again, each stream later by its rate; and the one after that. So a period
is timed with values and rates: where a maximum is taken, the winner's rate has to be the highest. What comes out is as
late, to the last tick, as `engine.run` finds it; where nothing gets steady, all is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjoin.sim.engine import (
    BETWEEN,
    COMPUTE,
    HOST,
    INSIDE,
    MAX_TICKS,
    NUM_STREAMS,
    Fragment,
    Instruction,
    State,
    Ticks,
    advance,
    larger,
    part_of,
    start_state,
)
from conjoin.sim.stretches import Stretch, find_stretches

_MIN_PERIODS = 5
"""Fewer are timed one by one."""
_ALIKE = 3
"""Periods in a row of which is seen whether they are alike."""


@dataclass(frozen=True, slots=True)
class Seam:
    """Fragments that a program does not have: whole periods of a length, before the one at a place."""

    place: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class _Program:
    """All instructions in a row; which earlier ones, by their places, each waits for; and where fragments begin."""

    tasks: tuple[Instruction, ...]
    targets: tuple[tuple[int, ...], ...]
    firsts: list[int]
    codes: NDArray[np.int64]
    """A number for what a fragment is: events are told by how many tasks ago they were."""

    def tasks_of(self, first: int, last: int) -> slice:
        """Those of some fragments."""
        return slice(self.firsts[first], self.firsts[last])


def last_tick(
    fragments: Sequence[Fragment],
    num_events: int = 0,
    shape: tuple[int, ...] = (),
    slowed: int = 0,
    seams: Sequence[Seam] = (),
) -> int | None:
    """When the last stream is done, with what is left out at seams; None where no periods are found, or something
    reaches over them.

    >>> work = Instruction("work", COMPUTE, 5)
    >>> last_tick([(work,)] * 1000), last_tick([(work,)] * 4), last_tick([(work,)] * 8, seams=[Seam(4, 992, 1)])
    (5000, None, 5000)
    """
    program = _read(fragments)
    stretches = _stretches(program.codes, seams) if program is not None else []
    periods = 1 + sum(more for _, more in stretches)
    if program is None or not stretches or periods * _longest(program.tasks) * (100 + slowed) // 100 > MAX_TICKS:
        return None
    clock = _Clock(program, start_state(num_events, shape), shape, slowed)
    at = 0
    for stretch, more in stretches:
        if stretch.start < at:
            return None
        clock.run(at, stretch.start)
        if not clock.run_periods(stretch, more):
            return None
        at = stretch.end
    clock.run(at, len(fragments))
    return max(int(np.max(row)) for row in clock.state[:NUM_STREAMS])


def _read(fragments: Sequence[Fragment]) -> _Program | None:
    """The program in a row; None where an event is one of some classes of devices only."""
    found = _ProgramSoFar()
    for fragment in fragments:
        if not found.take(fragment):
            return None
    return _Program(tuple(found.tasks), tuple(found.targets), found.firsts, np.array(found.codes, np.int64))


class _ProgramSoFar:
    """A program as far as it was read. What a fragment without events is was found when it was first seen."""

    def __init__(self) -> None:
        self.tasks: list[Instruction] = []
        self.targets: list[tuple[int, ...]] = []
        self.firsts, self.codes = [0], list[int]()
        self._set_at: dict[int, int] = {}
        self._known: dict[object, int] = {}
        self._plain: dict[int, int] = {}
        """Numbers of fragments without events, by their identity."""
        self._facts: dict[int, object] = {}

    def take(self, fragment: Fragment) -> bool:
        """Read on; False where an event is one of some classes only."""
        code = self._plain.get(id(fragment))
        if code is None:
            if any(task.event >= 0 and task.where is not None for task in fragment):
                return False
            has_events = any(task.event >= 0 or any(map(NUM_STREAMS.__le__, task.waits)) for task in fragment)
            key = tuple(map(self._with_events if has_events else self._facts_of, fragment))
            code = self._known.setdefault(key, len(self._known))
            if has_events:
                self.codes.append(code)
                self.firsts.append(len(self.tasks))
                return True
            self._plain[id(fragment)] = code
        self.tasks += fragment
        self.targets += ((),) * len(fragment)
        self.codes.append(code)
        self.firsts.append(len(self.tasks))
        return True

    def _with_events(self, task: Instruction) -> object:
        """What a task is, and how many tasks ago was what it waits for."""
        place = len(self.tasks)
        targets = tuple(self._set_at[row] for row in task.waits if row in self._set_at)
        self.tasks.append(task)
        self.targets.append(targets)
        if task.event >= 0:
            self._set_at[task.event] = place
        return self._facts_of(task), tuple(place - target for target in targets), task.event >= 0

    def _facts_of(self, task: Instruction) -> object:
        """What the engine asks of an instruction but for events; arrays are told by which they are."""
        found = self._facts.get(id(task))
        if found is None:
            ticks, host = (one if isinstance(one, int) else (id(one),) for one in (task.ticks, task.host))
            streams = tuple(row for row in task.waits if row < NUM_STREAMS)
            key = task.stream, ticks, host, task.group, streams, None if task.where is None else id(task.where)
            found = self._facts[id(task)] = self._known.setdefault(key, len(self._known))
        return found


def _longest(tasks: Iterable[Instruction]) -> int:
    """What all take one after the other."""
    known: dict[int, int] = {}
    total = 0
    for task in tasks:
        for ticks in (task.ticks, task.host):
            if isinstance(ticks, int):
                total += ticks
            else:
                total += known.setdefault(id(ticks), int(np.max(ticks)) if id(ticks) not in known else 0)
    return total


def _stretches(codes: NDArray[np.int64], seams: Sequence[Seam]) -> list[tuple[Stretch, int]]:
    """The stretches to time, each with the periods of it that are left out; none where there are none at a seam."""
    if not seams:
        return [(stretch, 0) for stretch in find_stretches(codes, _MIN_PERIODS)]
    found = [_stretch_at(codes, seam) for seam in seams]
    return [one for one in found if one is not None] if all(found) else []


def _stretch_at(codes: NDArray[np.int64], seam: Seam) -> tuple[Stretch, int] | None:
    """The stretch around a seam, and how many periods of it are left out there."""
    length = seam.length
    unlike = np.flatnonzero(codes[:-length] != codes[length:])
    after = int(np.searchsorted(unlike, seam.place - length))
    start = int(unlike[after - 1]) + 1 if after else 0
    end = int(unlike[after]) if after < len(unlike) else len(codes) - length
    if seam.place > end or (end - start) // length < _ALIKE:
        return None
    return Stretch(start, length, (end - start) // length + 1), seam.count // length


class _Clock:
    """When streams are free and events were, and when the tasks of the last periods ended."""

    def __init__(self, program: _Program, state: State, shape: tuple[int, ...], slowed: int) -> None:
        self.program, self.state, self.shape, self.slowed = program, state, shape, slowed

    def run(self, first: int, last: int) -> list[Ticks]:
        """Time some fragments; when their tasks end."""
        tasks = self.program.tasks[self.program.tasks_of(first, last)]
        self.state, spans = advance(self.state, tasks, self.slowed, self.shape)
        return [end for _, end in spans]

    def run_periods(self, stretch: Stretch, more: int = 0) -> bool:
        """Time periods until they are steady, and leave out the others, and as many more; False where something waits
        for these, or more were to come and they did not get steady."""
        states, ends = [self.state[:NUM_STREAMS]], list[list[Ticks]]()
        for period in range(stretch.count):
            at, left = stretch.start + period * stretch.length, stretch.count - period - 1 + more
            ends = [*ends[-2:], self.run(at, at + stretch.length)]
            states = [*states[-3:], self.state[:NUM_STREAMS]]
            if left and len(ends) == _ALIKE and self._is_steady(self.program.firsts[at], states, ends):
                self._skip(stretch, left, states, ends)
                return not self._is_awaited(stretch.start if more else at + stretch.length, stretch)
        return not more

    def _is_steady(self, first: int, states: list[State], ends: list[list[Ticks]]) -> bool:
        """Whether the period that was timed last, from a task on, will be the same again, however often."""
        rates = _later(states[-2], states[-1])
        if not _are_alike(rates, _later(states[-3], states[-2])):
            return False
        length, steady = len(ends[-1]), _later(ends[-2], ends[-1])
        trend = _Trend(self.shape, self.slowed, list(states[-2]), list(rates))
        earlier = [*ends[-3], *ends[-2], *ends[-1]]
        for i, (task, rate) in enumerate(zip(self.program.tasks[first : first + length], steady, strict=True)):
            others = [(trend.rows[row], trend.rates[row]) for row in task.waits if row < NUM_STREAMS]
            for target in self.program.targets[first + i]:
                place = target - first + 2 * length
                if place < 0:
                    return False
                others.append((earlier[place], steady[place % length]))
            if task.event >= 0 and np.any(ends[-2][i] - ends[-3][i] != rate):
                return False
            if not trend.goes_on(task, others, rate):
                return False
        return _are_alike(rates, trend.rates)

    def _skip(self, stretch: Stretch, left: int, states: list[State], ends: list[list[Ticks]]) -> None:
        """Go on behind the last period: streams are later by their rates, and so are events of the last two periods."""
        rows: list[Any] = list(self.state)
        for row, rate in enumerate(_later(states[-2], states[-1])):
            rows[row] = rows[row] + left * rate
        last, length = self.program.firsts[stretch.end], len(ends[-1])
        for back, some in ((2, ends[-2]), (1, ends[-1])):
            first = last - back * length
            for task, end, rate in zip(
                self.program.tasks[first : first + length], some, _later(ends[-2], ends[-1]), strict=True
            ):
                if task.event >= 0:
                    rows[task.event] = end + left * rate
        self.state = tuple(rows)

    def _is_awaited(self, first: int, stretch: Stretch) -> bool:
        """Whether what comes after periods waits for something in those from a fragment on but for the last two."""
        tasks = self.program.tasks_of(first, stretch.end - 2 * stretch.length)
        left_out, after = range(tasks.start, tasks.stop), self.program.targets[self.program.firsts[stretch.end] :]
        return any(target in left_out for targets in after for target in targets)


def _later(before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
    return [b - a for a, b in zip(before, after, strict=True)]


def _are_alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return not any(np.any(one != other) for one, other in zip(some, others, strict=True))


@dataclass
class _Trend:
    """Streams of which is known when they are free in a period, and how much later in every one after it."""

    shape: tuple[int, ...]
    slowed: int
    rows: list[Any]
    rates: list[Any]

    def goes_on(self, task: Instruction, others: list[tuple[Any, Any]], rate: Any) -> bool:
        """Take the next task; whether it is later by its rate in every period from here on."""
        self.rows[HOST] = self.rows[HOST] + task.host
        mine = [(self.rows[row], self.rates[row]) for row in (HOST, task.stream)]
        start, its_rate, steady = self._latest([*mine, *others])
        if task.group:
            most = start.max(axis=task.group, keepdims=True)
            ahead = np.where(start == most, its_rate, np.iinfo(np.int64).min).max(axis=task.group, keepdims=True)
            steady = steady and not np.any(its_rate > ahead)
            start, its_rate = np.broadcast_to(most, self.shape), np.broadcast_to(ahead, self.shape)
        end = start + task.ticks
        if self.slowed and task.stream == COMPUTE:
            beside, faster, known = self._latest([(self.rows[row], self.rates[row]) for row in (INSIDE, BETWEEN)])
            beside, faster = beside - start, faster - its_rate
            whole = part_of(task.ticks, self.slowed, 100)
            some = part_of(larger(beside, 0), self.slowed, 100 + self.slowed)
            never, always = (beside <= 0) & (faster <= 0), (some >= whole) & (faster >= 0)
            steady = steady and known and bool(np.all(never | always | (faster == 0)))
            end = end + (np.minimum(whole, some) if self.shape else min(whole, some))
        if task.event >= 0 and np.any(its_rate != rate):
            return False
        here = task.where
        self.rows[task.stream] = end if here is None else np.where(here, end, self.rows[task.stream])
        self.rates[task.stream] = its_rate if here is None else np.where(here, its_rate, self.rates[task.stream])
        return steady

    def _latest(self, some: list[tuple[Any, Any]]) -> tuple[Any, Any, bool]:
        """The latest of some, its rate, and whether it stays the latest."""
        if not self.shape:
            last = max(value for value, _ in some)
            its_rate = max(rate for value, rate in some if value == last)
            return last, its_rate, all(rate <= its_rate for _, rate in some)
        values = np.stack([np.broadcast_to(value, self.shape) for value, _ in some])
        rates = np.stack([np.broadcast_to(rate, self.shape) for _, rate in some])
        latest = values.max(axis=0)
        rate = np.where(values == latest, rates, np.iinfo(np.int64).min).max(axis=0)
        return latest, rate, not np.any(rates > rate)
