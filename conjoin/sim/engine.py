"""The timeline of a program: instructions on streams, each served in the order they were launched.

Every device has a host, a compute stream and communication streams (FlexFlow 3.4, assumption A3: first in, first out,
as streams of a GPU are). All devices run the same program, so an instruction stands for one task on each of them: its
times are an array with one entry for every class of devices that behave alike. A collective starts when all members of
its group are ready, which is a maximum along axes of that array. Time is counted in whole picoseconds, so that sums do
not depend on their order, and a timeline that starts some ticks later is the same timeline, shifted, to the last bit.

A program is a sequence of fragments. When a few of them change, only what changes is timed again: the timeline is taken
up at the first changed fragment, and left as soon as all streams are off by one and the same shift from where they were
before; up to the next changed fragment everything is then as it was, but for the shift. Hosts launch ahead of what is
computed and wait for nobody: they may be off by another shift, as long as the devices stay behind them either way.
Where classes run different branches, an instruction concerns some classes only, and their hosts alone launch it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conjoin.cost import Source
from conjoin.errors import UsageError

TICKS_PER_SECOND = 10**12
MAX_TICKS = 2**63 - 1
"""What an array of times can hold: 107 days."""
HOST, COMPUTE, INSIDE, BETWEEN, TO_HOST, FROM_HOST = range(6)
"""The streams of a device: who launches, who computes, the links inside a node and between nodes, and the copies to the
memory of its host and back."""
NUM_STREAMS = 6


class Phase(Enum):
    """The parts of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """Of the forward pass what the backward pass runs again."""
    UPDATE = "update"


Ticks = int | NDArray[np.int64]
"""One number for all devices, or an array over the classes of devices."""
State = tuple[Ticks, ...]
"""When each stream is free, then when each event happened."""


def to_ticks(seconds: float) -> int:
    """Seconds in whole ticks."""
    ticks = seconds * TICKS_PER_SECOND
    if not ticks < MAX_TICKS:
        raise _too_long(seconds)
    return round(ticks)


def _too_long(seconds: float) -> UsageError:
    return UsageError(
        f"The time of a training step was asked for. Its tasks take {seconds:.2g} seconds or more, and times are "
        f"counted up to {to_seconds(MAX_TICKS):.2g} seconds. "
        f"Check the rates and latencies of the machine, or name a faster one."
    )


def to_seconds(ticks: int) -> float:
    return ticks / TICKS_PER_SECOND


@dataclass(frozen=True, slots=True, eq=False)
class Instruction:
    """One task on every device."""

    name: str
    stream: int
    ticks: Ticks
    """How long it takes."""
    host: Ticks = 0
    """How long the host takes to launch it."""
    group: tuple[int, ...] = ()
    """Axes of the array of classes along which devices start together; empty where each starts on its own."""
    waits: tuple[int, ...] = ()
    """Streams and events that must be done before."""
    event: int = -1
    """Which event its end is; -1 where nobody asks."""
    phase: Phase = Phase.FORWARD
    axes: tuple[str, ...] = ()
    """Of a collective: the axes of the mesh it goes over."""
    sent: int = 0
    """Of a collective: the bytes that the busiest rank sends."""
    source: Source = Source.MEASURED
    """Where `ticks` come from."""
    where: NDArray[np.bool_] | None = None
    """The classes of devices that run it; None is all."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Instruction):
            return NotImplemented
        mine, theirs = (self.ticks, self.host, self.where), (other.ticks, other.host, other.where)
        arrays = all(a is b or np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))  # type: ignore[arg-type]
        return self._facts == other._facts and arrays

    @property
    def _facts(self) -> tuple[object, ...]:
        """All but what may be an array."""
        where = self.stream, self.group, self.waits, self.event
        return self.name, *where, self.phase, self.axes, self.sent, self.source

    __hash__ = None  # type: ignore[assignment]


Fragment = tuple[Instruction, ...]
Span = tuple[Ticks, Ticks]
"""When an instruction starts and ends."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """When every instruction of a program runs on every class of devices."""

    fragments: Sequence[Fragment]
    spans: Sequence[tuple[Span, ...]]
    """By fragment, not yet shifted."""
    states: Sequence[State]
    """Before each fragment, and after the last; not yet shifted."""
    shifts: NDArray[np.int64]
    """How much later each fragment, and the end, are than `spans` and `states` say; hosts are not shifted."""
    hosts: NDArray[np.int64]
    """When the hosts have launched all before each fragment, and all; not shifted. Of every class where there are."""
    computed: NDArray[np.int64]
    """When the devices have computed all before each fragment, and all; not yet shifted."""
    num_timed: int
    """How many instructions were timed to make this timeline; the others were taken from the one before."""
    slowed: int = 0
    """By how many per cent what is computed beside communication takes longer."""

    @property
    def end(self) -> Ticks:
        """When the last stream of each class of devices is done."""
        end: Ticks = larger(_latest(self.states[-1][COMPUTE:]) + int(self.shifts[-1]), _number(self.hosts[-1]))
        return end

    @property
    def ticks(self) -> int:
        """How long the whole program takes."""
        return int(np.max(self.end))

    @property
    def seconds(self) -> float:
        return to_seconds(self.ticks)

    def times(self) -> list[tuple[Instruction, Ticks, Ticks]]:
        """Every instruction with its start and end."""
        return [
            (instruction, start + shift, end + shift)
            for fragment, spans, shift in zip(self.fragments, self.spans, self.shifts[:-1].tolist(), strict=True)
            for instruction, (start, end) in zip(fragment, spans, strict=True)
        ]


def run(
    fragments: Sequence[Fragment], num_events: int = 0, shape: tuple[int, ...] = (), slowed: int = 0
) -> Timeline:
    """Time a program from its beginning, on devices of as many classes as an array of this shape has entries.

    What is computed beside communication takes longer by as many per cent as `slowed` says.

    >>> work = Instruction("work", COMPUTE, 5)
    >>> send = Instruction("send", BETWEEN, 3, waits=(COMPUTE,))
    >>> run([(work, send, work), (work,)]).ticks
    15
    >>> run([(work, send, work), (work,)], slowed=50).ticks
    16
    """
    state = start_state(num_events, shape)
    states, spans, count = [state], [], 0
    if shape:  # sums of arrays would begin anew at the other end, those of numbers do not
        total = sum(_longest(task.ticks) + _longest(task.host) for fragment in fragments for task in fragment)
        _check_total(total * (100 + slowed) // 100)
    for fragment in fragments:
        state, found = advance(state, fragment, slowed, shape)
        spans.append(found)
        states.append(state)
        count += len(fragment)
    if not shape:
        _check_total(max(int(ticks) for ticks in state))
    hosts, computed = (_rows([state[stream] for state in states], shape) for stream in (HOST, COMPUTE))
    return Timeline(fragments, spans, states, np.zeros(len(states), np.int64), hosts, computed, count, slowed)


def start_state(num_events: int, shape: tuple[int, ...]) -> State:
    """All streams free, and no event yet."""
    free: Ticks = np.zeros(shape, np.int64) if shape else 0
    return (0, *(free,) * (NUM_STREAMS + num_events - 1))


def advance(
    state: State, fragment: Fragment, slowed: int, shape: tuple[int, ...]
) -> tuple[State, tuple[Span, ...]]:
    """The streams after a fragment, and when its instructions ran, on classes of devices in an array of this shape."""
    return _advance_many(state, fragment, slowed) if shape else _advance_one(state, fragment, slowed)


def rerun(before: Timeline, fragments: Sequence[Fragment], changed: Sequence[int]) -> Timeline:
    """Time a program that differs from an earlier one of the same length in the fragments named, in ascending order.

    >>> slow, fast = Instruction("slow", COMPUTE, 9), Instruction("fast", COMPUTE, 2)
    >>> before = run([(slow,), (slow,), (slow,)])
    >>> after = rerun(before, [(slow,), (fast,), (slow,)], [1])
    >>> after.ticks, after.num_timed
    (20, 1)
    """
    try:
        again = _Again(before, fragments, changed)
        for first in changed:
            position: int | None = first if first >= again.at else None
            while position is not None:
                position = again.time_from(position)
        return again.timeline()
    except OverflowError:
        raise _too_long(to_seconds(MAX_TICKS)) from None


def _check_total(ticks: int) -> None:
    """Refuse a step that is longer than times can tell."""
    if ticks > MAX_TICKS:
        raise _too_long(to_seconds(ticks))


def _longest(ticks: Ticks) -> int:
    return ticks if isinstance(ticks, int) else int(np.max(ticks))


class _Again:
    """A timeline under way: what comes before `at` is settled, the rest is as before but for a shift."""

    def __init__(self, before: Timeline, fragments: Sequence[Fragment], changed: Sequence[int]) -> None:
        self.before, self.fragments, self.changed = before, fragments, changed
        self.spans, self.states, self.shifts = list(before.spans), list(before.states), before.shifts.copy()
        self.computed = before.computed.copy()
        self.at = self.shift = self.num_timed = 0
        self._advance = _advance_many if isinstance(before.states[0][COMPUTE], np.ndarray) else _advance_one
        self._unchanged = frozenset(range(len(fragments) + 1)).difference(changed)
        later = np.zeros_like(before.hosts)
        for position in changed:
            later[position + 1] = _launching(fragments[position]) - _launching(before.fragments[position])
        self.host_shifts = np.cumsum(later, axis=0)

    def time_from(self, first: int) -> int | None:
        """Time fragments from one on, until the timeline is again as it was before but for a shift.

        Returns where it has to be taken up again before the next changed fragment: hosts would hold up devices there.
        """
        self.shifts[self.at : first] += self.shift
        launched = _number(self.before.hosts[first] + self.host_shifts[first])
        state = (launched, *self._old_state(first, self.shift)[COMPUTE:])
        at, last = first, len(self.fragments)
        while True:
            self.states[at], self.shifts[at], self.computed[at] = state, 0, state[COMPUTE]
            if at == last:
                self.at, self.shift = last, 0
                return None
            state, self.spans[at] = self._advance(state, self.fragments[at], self.before.slowed)
            self.num_timed += len(self.fragments[at])
            at += 1
            if at in self._unchanged:
                shift = _shift_between(self._old_state(at), state)
                if shift is not None:
                    self.at, self.shift = at, shift
                    return self._held_up(at, shift)

    def _held_up(self, at: int, shift: int) -> int | None:
        """The first fragment up to the next changed one that hosts, off by another shift, hold up or did.

        What a fragment launches waits for what is computed before it; the hosts are ahead if they are done with the
        fragment by then.
        """
        behind = self.host_shifts[at] - shift
        if not behind.any():
            return None
        position = bisect(self.changed, at)
        end = self.changed[position] if position < len(self.changed) else len(self.fragments)
        old, some = self.before, slice(at, end)
        shifts = old.shifts[some].reshape(-1, *(1,) * behind.ndim)
        ahead = old.computed[some] + shifts - old.hosts[at + 1 : end + 1]
        late = ahead < np.maximum(0, behind)
        found = np.flatnonzero(late.any(axis=tuple(range(1, late.ndim))))
        return at + int(found[0]) if len(found) else None

    def _old_state(self, at: int, shift: int = 0) -> State:
        by = int(self.before.shifts[at]) + shift
        state = self.before.states[at]
        return tuple(row + by for row in state) if by else state

    def timeline(self) -> Timeline:
        self.shifts[self.at :] += self.shift
        hosts = self.before.hosts + self.host_shifts
        return Timeline(
            self.fragments, self.spans, self.states, self.shifts, hosts, self.computed, self.num_timed,
            self.before.slowed,
        )  # fmt: skip


def _advance_one(state: State, fragment: Fragment, slowed: int) -> tuple[State, tuple[Span, ...]]:
    """The streams after a fragment, and when its instructions ran: all devices alike."""
    rows: list[Any] = list(state)
    spans = []
    for instruction in fragment:
        rows[HOST] += instruction.host
        start = max(rows[HOST], rows[instruction.stream])
        for other in instruction.waits:
            start = max(start, rows[other])
        end = start + instruction.ticks
        if slowed and instruction.stream == COMPUTE and (beside := max(rows[INSIDE], rows[BETWEEN]) - start) > 0:
            end += min(part_of(instruction.ticks, slowed, 100), part_of(beside, slowed, 100 + slowed))
        rows[instruction.stream] = end
        if instruction.event >= 0:
            rows[instruction.event] = end
        spans.append((start, end))
    return tuple(rows), tuple(spans)


def part_of(ticks: Any, part: int, whole: int) -> Any:
    """So many parts of a whole, rounded down; nothing on the way is larger than what it is a part of."""
    return ticks // whole * part + ticks % whole * part // whole


def _advance_many(state: State, fragment: Fragment, slowed: int) -> tuple[State, tuple[Span, ...]]:
    """The same where classes of devices differ: rows are arrays, or numbers that hold for all."""
    rows: list[Any] = list(state)
    spans = []
    for instruction in fragment:
        rows[HOST] = rows[HOST] + instruction.host
        start = np.maximum(rows[HOST], rows[instruction.stream])
        for other in instruction.waits:
            start = np.maximum(start, rows[other])
        if instruction.group:
            start = start.max(axis=instruction.group, keepdims=True)
        end = start + instruction.ticks
        if slowed and instruction.stream == COMPUTE:
            beside = np.maximum(np.maximum(rows[INSIDE], rows[BETWEEN]) - start, 0)
            end = end + np.minimum(part_of(instruction.ticks, slowed, 100), part_of(beside, slowed, 100 + slowed))
        here = instruction.where
        if here is not None:  # elsewhere nothing happens, and takes no time when the devices there are free
            spans.append((np.where(here, start, rows[COMPUTE]), np.where(here, end, rows[COMPUTE])))
        for row in (instruction.stream, instruction.event) if instruction.event >= 0 else (instruction.stream,):
            rows[row] = end if here is None else np.where(here, end, rows[row])
        if here is None:
            spans.append((start, end))
    return tuple(rows), tuple(spans)


def _shift_between(old: State, new: State) -> int | None:
    """By how much all that can still matter is later on the devices; None where it is not the same everywhere.

    A stream or event that was done before the compute stream is free holds up nobody: whatever is launched from here on
    waits for the compute stream.
    """
    old_floor, new_floor = old[COMPUTE], new[COMPUTE]
    shift = _uniform(new_floor - old_floor)
    if shift is None:
        return None
    for was, now in zip(old[INSIDE:], new[INSIDE:], strict=True):
        if was is now and shift == 0:
            continue
        if _differ(larger(now, new_floor) - larger(was, old_floor), shift):
            return None
    return shift


def _launching(fragment: Fragment) -> Ticks:
    """How long the hosts take to launch a fragment."""
    return sum((instruction.host for instruction in fragment), start=0)


def _rows(ticks: Sequence[Ticks], shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Numbers one after the other, of every class of devices where there are classes."""
    if not shape:
        return np.array(ticks, np.int64)
    return np.stack([np.broadcast_to(row, shape) for row in ticks])


def _number(ticks: Any) -> Ticks:
    """A number of a row of them, or the numbers of all classes."""
    number: Ticks = ticks if ticks.ndim else int(ticks)
    return number


def larger(one: Any, other: Any) -> Any:
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.maximum(one, other)
    return max(one, other)


def _uniform(ticks: Any) -> int | None:
    """The number that stands everywhere; None where there are several."""
    if isinstance(ticks, np.ndarray):
        first = int(ticks.flat[0])
        return first if (ticks == first).all() else None
    return int(ticks)


def _differ(ticks: Any, number: int) -> bool:
    return bool(np.any(ticks != number))


def _latest(state: State) -> Any:
    latest: Any = state[0]
    for row in state[1:]:
        latest = larger(latest, row)
    return latest
