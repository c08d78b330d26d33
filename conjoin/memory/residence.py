"""The residence that costs least: ROC's memory manager (section 4.5), corrected, and what it leaves out.

ROC's Algorithm 3 finds COST(S, T), the least transfers to have done the operations S with the tensors T on the device:

    COST(S, T) = min over o in S, S' = S \\ o, and over T' with T \\ OUT(o) ⊆ T' ⊆ (T \\ OUT(o)) ∪ (IN(o) ∩ A(S'))
                 of COST(S', T') + size(IN(o) \\ T')         where size(T' ∪ IN(o) ∪ OUT(o)) ≤ capacity

and A(S) are the tensors that operations outside S read. As printed T' is T \\ OUT(o) alone: an input that is not kept
afterwards could not have been there before, so that every input is loaded and the result is that of streaming.

Here the same is searched forwards, cheapest states first (A*), and a state also knows which tensors the host has.
So what is made need not be written back unless it has to leave (`write_back="needed"`), and what has left may be made
again (`remake`), at the price of its seconds. A tensor leaves only when an operation needs its room: leaving later
costs no more. So of the sets that may leave only the smallest that make room are tried, and the search stays exact.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, product

from conjoin.errors import PlanError
from conjoin.memory.program import Operation, Program, Residence, Step, WriteBack, residence_of

MAX_STATES = 300_000
"""A limit, so that a search ends. A GCN's step of 23 operations is far below it, unless they may be made again."""

State = tuple[int, int, int]
"""Operations that are done, tensors on the device, tensors on the host: bits."""


def find_residence(
    program: Program,
    capacity: int,
    write_back: WriteBack = "always",
    remake: bool = False,
    bytes_per_second: float = 1.0,
) -> Residence:
    """Return the residence of a step with the least seconds of transfers and of making again.

    >>> chain = Program(
    ...     (Operation("f", ("x",), ("a",)), Operation("g", ("a",), ("b",)), Operation("h", ("x", "b"), ("c",))),
    ...     {"x": 4, "a": 2, "b": 1, "c": 1},
    ... )
    >>> [find_residence(chain, capacity).loaded_bytes for capacity in (6, 7)]
    [8, 4]
    """
    program.check_capacity(capacity)
    search = _Search.of(program, capacity, write_back, remake, bytes_per_second)
    start: State = (0, 0, search.bits(program.leaves))
    best: dict[State, float] = {start: 0.0}
    came: dict[State, tuple[State, Step]] = {}
    tie = count()
    waiting = [(search.at_least(start), next(tie), 0.0, start)]
    while waiting:
        _, _, seconds, state = heapq.heappop(waiting)
        if seconds > best[state]:
            continue
        if len(best) > MAX_STATES:
            raise PlanError(
                f"The best residence of {len(program.operations)} operations was asked for"
                f"{', made again where that is cheaper' if remake else ''}. After {MAX_STATES} states it is not found. "
                "Leave remake out, or place parts of the step one after another."
            )
        if state[0] == search.all_done:
            return residence_of(program, _way(came, state))
        for price, step, after in search.moves(state):
            if seconds + price < best.get(after, float("inf")):
                best[after] = seconds + price
                came[after] = (state, step)
                bound = seconds + price + search.at_least(after)
                heapq.heappush(waiting, (bound, -next(tie), seconds + price, after))
    raise AssertionError("every operation fits by itself, so that streaming is always a way")


@dataclass(frozen=True, slots=True)
class _Search:
    """What the states of one search have in common."""

    program: Program
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    capacity: int
    write_back: WriteBack
    remake: bool
    bytes_per_second: float
    remade: int
    """Tensors that need not be loaded, since they can be made again."""
    known: dict[int, int] = field(default_factory=dict)
    """What is needed yet, of states that were asked about."""

    @classmethod
    def of(
        cls, program: Program, capacity: int, write_back: WriteBack, remake: bool, bytes_per_second: float
    ) -> _Search:
        names = tuple(sorted({name for o in program.operations for name in (*o.inputs, *o.outputs)}))
        place = {name: i for i, name in enumerate(names)}
        reads = tuple(sum(1 << place[name] for name in set(o.inputs)) for o in program.operations)
        makes = tuple(sum(1 << place[name] for name in set(o.outputs)) for o in program.operations)
        sizes = tuple(program.bytes[name] for name in names)
        remade = sum(makes) if remake else 0
        return cls(program, names, sizes, reads, makes, capacity, write_back, remake, bytes_per_second, remade)

    @property
    def all_done(self) -> int:
        return (1 << len(self.reads)) - 1

    def bits(self, names: frozenset[str]) -> int:
        return sum(1 << i for i, name in enumerate(self.names) if name in names)

    def named(self, mask: int) -> tuple[str, ...]:
        return tuple(name for i, name in enumerate(self.names) if mask >> i & 1)

    def size(self, mask: int) -> int:
        return sum(size for i, size in enumerate(self.sizes) if mask >> i & 1)

    def needed(self, done: int) -> int:
        """Tensors that may be read yet: by what is not done or, if things are made again, on the way to these."""
        if done in self.known:
            return self.known[done]
        found = 0
        for i, reads in enumerate(self.reads):
            if not done >> i & 1:
                found |= reads
        grown = found if self.remake else 0
        while grown:
            more = 0
            for reads, makes in zip(self.reads, self.makes, strict=True):
                if makes & grown:
                    more |= reads
            grown = more & ~found
            found |= more
        self.known[done] = found
        return found

    def at_least(self, state: State) -> float:
        """Seconds that are to come whatever is done: what is read yet, and only the host has, is loaded once."""
        done, device, host = state
        read, made = 0, 0
        for i, reads in enumerate(self.reads):
            if not done >> i & 1:
                read |= reads
                made |= self.makes[i]
        leaves = read & ~device & host & ~self.remade
        coming = self.size(leaves) + (self.size(made) if self.write_back == "always" else 0)
        return coming / self.bytes_per_second

    def moves(self, state: State) -> Iterator[tuple[float, Step, State]]:
        """All that may be run next, with each way to make room for it, and what that costs."""
        done, device, host = state
        for i, operation in enumerate(self.program.operations):
            again = bool(done >> i & 1)
            if again and (not self.remake or not self.makes[i] & self.needed(done) & ~device):
                continue
            if self.reads[i] & ~device & ~host:
                continue
            for left, written in self.rooms(state, i):
                yield self.moved(state, i, operation, again, left, written)

    def rooms(self, state: State, i: int) -> Iterator[tuple[int, int]]:
        """What may leave so that an operation has room, and what of it is written first."""
        done, device, host = state
        fixed = self.reads[i] | self.makes[i]
        others = device & ~fixed
        room = self.capacity - self.size(fixed)
        for left in _smallest(others, self.size(others) - room, self.sizes):
            dirty = left & ~host & self.needed(done | 1 << i)
            if not self.remake:
                yield left, dirty
                continue
            single = [1 << k for k in range(len(self.sizes)) if dirty >> k & 1]
            for choice in product((False, True), repeat=len(single)):
                yield left, sum(bit for bit, write in zip(single, choice, strict=True) if write)

    def moved(
        self, state: State, i: int, operation: Operation, again: bool, left: int, written: int
    ) -> tuple[float, Step, State]:
        done, device, host = state
        loads = self.reads[i] & ~device
        done |= 1 << i
        now = (device & ~left | self.reads[i] | self.makes[i]) & self.needed(done)
        if self.write_back == "always" and not again:
            written |= self.makes[i]
        copied = self.size(loads) + self.size(written)
        price = copied / self.bytes_per_second + (operation.seconds if again else 0.0)
        step = Step(operation.name, self.named(loads), self.named(written), self.named(left), again)
        return price, step, (done, now, host | written)


def _smallest(candidates: int, bytes_to_free: int, sizes: tuple[int, ...]) -> Iterator[int]:
    """The sets of candidates that free enough, none of which would free enough with one less."""
    places = [i for i in range(len(sizes)) if candidates >> i & 1 and sizes[i]]
    places.sort(key=lambda i: -sizes[i])

    def grow(k: int, chosen: int, freed: int, least: int) -> Iterator[int]:
        if freed >= bytes_to_free:
            if freed - least < bytes_to_free:
                yield chosen
            return
        for j in range(k, len(places)):
            size = sizes[places[j]]
            yield from grow(j + 1, chosen | 1 << places[j], freed + size, size)

    yield from [0] if bytes_to_free <= 0 else grow(0, 0, 0, 0)


def _way(came: dict[State, tuple[State, Step]], state: State) -> tuple[Step, ...]:
    """The steps that led to a state."""
    steps = []
    while state in came:
        state, step = came[state]
        steps.append(step)
    return tuple(reversed(steps))
