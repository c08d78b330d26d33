"""Schedules made by running them: whenever an owner is free it takes the row it likes best of those that can run.

With input gradients before forwards before weight gradients this is the heuristic of zero-bubble pipelines (Qi et al.
2023): gradients go back as soon as they can, and weight gradients fill what would be bubbles, or make room. An owner of
several stages leaves room for one micro-batch at each of its later stages, so that those it has begun with can end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

from conjoin.errors import ScheduleError
from conjoin.schedules.makers import check_counts, eager_one_f_one_b, one_f_one_b, there_and_back
from conjoin.schedules.schedule import Kind, Row, Schedule, one_each, v_shaped
from conjoin.schedules.times import Memory, Problem, Times

CAN_GO_ON = "an owner that leaves room for its later stages can always go on"


@dataclass(frozen=True, slots=True)
class Taste:
    """What an owner likes best of the rows that can run."""

    order: tuple[Kind, Kind, Kind] = (Kind.INPUT_GRADIENT, Kind.FORWARD, Kind.WEIGHT_GRADIENT)
    deep_first: bool = True
    """Of several stages' forwards, that of the latest; of their gradients likewise."""
    patience: float = 0.0
    """For how long to wait for something better that is on its way, as a part of the row that would run."""


def zero_bubble(
    num_stages: int, num_micro_batches: int, max_in_flight: int | None = None, times: Times | None = None
) -> Schedule:
    """Weight gradients fill the bubbles; in flight is at each stage as much as 1F1B has at its first, or as is given.

    >>> print(zero_bubble(3, 3))
    F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2
    F1.0 F1.1 F1.2 I1.0 W1.0 I1.1 W1.1 I1.2 W1.2
    F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 W2.1 W2.2
    """
    check_counts(num_stages, num_micro_batches, max_in_flight)
    limit = max_in_flight or num_stages
    orders = [
        one_f_one_b(num_stages, num_micro_batches, limit),
        eager_one_f_one_b(num_stages, num_micro_batches, None, limit),
    ]
    memory = Memory.in_flight(num_stages, [limit] * num_stages)
    return _without_bubbles(Problem.of(one_each(num_stages), num_micro_batches, times, memory), orders, "zero-bubble")


def zero_bubble_v(
    num_owners: int, num_micro_batches: int, max_in_flight: int | None = None, times: Times | None = None
) -> Schedule:
    """Zero-bubble with two stages to an owner, there and back; in flight are, of both together, twice the owners."""
    check_counts(2 * num_owners, num_micro_batches, max_in_flight)
    memory = Memory.in_flight(2 * num_owners, [max_in_flight or 2 * num_owners] * num_owners)
    problem = Problem.of(v_shaped(num_owners), num_micro_batches, times, memory)
    return _without_bubbles(problem, [there_and_back(num_owners, num_micro_batches)], "zero-bubble, V")


def _without_bubbles(problem: Problem, orders: Sequence[Schedule], name: str) -> Schedule:
    """The best of some orders with weight gradients filled in, and of what comes about."""
    run = _Run(problem, Taste())
    run.check_memory()
    rows = run.rows()
    assert rows is not None, CAN_GO_ON
    best = Schedule(problem.owners, problem.num_micro_batches, rows, problem.edges, name)
    found = [
        (best, max(run.free)),
        *(refilled(order, problem, patience) for order in orders for patience in (0.0, 0.99)),
    ]
    made = min((each for each in found if each is not None), key=lambda each: each[1])
    return replace(made[0], name=name)


def greedy(problem: Problem, taste: Taste | None = None) -> Schedule:
    """The schedule that comes about when every owner takes what it likes best, within memory."""
    check_counts(len(problem.owners), problem.num_micro_batches)
    run = _Run(problem, taste or Taste())
    run.check_memory()
    rows = run.rows()
    assert rows is not None, CAN_GO_ON
    return Schedule(problem.owners, problem.num_micro_batches, rows, problem.edges, "greedy")


def refilled(schedule: Schedule, problem: Problem, patience: float = 0.0) -> tuple[Schedule, float] | None:
    """The same order of forwards and input gradients, with weight gradients where owners would wait, or need room.

    With its seconds; None where the order takes more memory than there is.
    """
    run = _Run(problem, Taste(patience=patience))
    run.given = []
    for rows in schedule.rows:
        kept = [row for row in reversed(rows) if row.kind is not Kind.WEIGHT_GRADIENT]
        forward, gradient = Kind.FORWARD, Kind.INPUT_GRADIENT
        run.given.append([(forward if row.kind is forward else gradient, row.stage) for row in kept])
    ran = run.rows()
    return None if ran is None else (replace(schedule, rows=ran, name=f"{schedule.name}, refilled"), max(run.free))


class _Run:
    """Owners at work. Micro-batches are alike, so at every stage they come in order, and counts say what is done."""

    def __init__(self, problem: Problem, taste: Taste) -> None:
        self.given: list[list[tuple[Kind, int]]] | None = None
        """Forwards and input gradients in the order in which each owner has to run them, the next one last."""
        owners, times, edges = problem.owners, problem.times, problem.edges
        num_stages, num_owners, num = len(owners), problem.num_owners, problem.num_micro_batches
        self.owners, self.num, self.memory, self.times, self.taste = owners, num, problem.memory, times, taste
        self.apart = problem.apart
        self.mine = [[s for s in range(num_stages) if owners[s] == owner] for owner in range(num_owners)]
        self.done = {kind: [0] * num_stages for kind in taste.order}
        self.free = [0.0] * num_owners
        self.used = [0.0] * num_owners
        self.channels: dict[tuple[int, int], float] = {}
        self.output_there = [[0.0] * num for _ in owners]
        self.gradient_there = [[0.0] * num for _ in owners]
        self.lacking_before = [[0] * num for _ in owners]
        self.lacking_after = [[1] * num for _ in owners]
        self.sends: dict[tuple[bool, int], list[tuple[int, float]]] = {}
        for edge, (source, target) in enumerate(edges):
            self.sends.setdefault((True, source), []).append((target, times.activations[edge]))
            self.sends.setdefault((False, target), []).append((source, times.gradients[edge]))
            for counts, stage in ((self.lacking_before, target), (self.lacking_after, source)):
                counts[stage] = [count + 1 for count in counts[stage]]
        self.rank = {kind: i for i, kind in enumerate(taste.order)}

    def check_memory(self) -> None:
        """Refuse less memory than one micro-batch takes."""
        for owner, stages in enumerate(self.mine):
            least = sum(self.memory.held[stage] for stage in stages)
            if least > self.memory.limits[owner]:
                raise ScheduleError(
                    f"Owner {owner} may hold {self.memory.limits[owner]:g}. One micro-batch at each of its "
                    f"{len(stages)} stages holds {least:g}. Allow it as much, or give it fewer stages."
                )

    def rows(self) -> tuple[tuple[Row, ...], ...] | None:
        """What each owner ran; None where they came to no end."""
        rows: list[list[Row]] = [[] for _ in self.free]
        offers = [self._best(owner) for owner in range(len(self.free))]
        soonest = [(offer[0], owner) for owner, offer in enumerate(offers)]
        heapify(soonest)
        for _ in range(len(self.owners) * self.num * (3 if self.apart else 2)):
            while soonest[0][0] != offers[soonest[0][1]][0]:  # the owner has a newer offer
                heappop(soonest)
            owner = soonest[0][1]
            start, kind, stage = offers[owner]
            if start == inf:
                return None
            micro_batch = self.done[kind][stage]
            shown = kind if self.apart or kind is Kind.FORWARD else Kind.BACKWARD
            rows[owner].append(Row(shown, stage, micro_batch))
            for other in {owner, *self._run(owner, start, kind, stage, micro_batch)}:
                offers[other] = self._best(other)
                heappush(soonest, (offers[other][0], other))
        return tuple(map(tuple, rows))

    def _best(self, owner: int) -> tuple[float, Kind, int]:
        """What an owner runs next, and when: of what can start first, or soon enough, what it likes best."""
        able = [offer for stage in self.mine[owner] for offer in self._able(owner, stage)]
        if self.given is not None:
            following = self.given[owner][-1:]
            able = [offer for offer in able if offer[1] is Kind.WEIGHT_GRADIENT or [offer[1:]] == following]
        if not able:
            return inf, Kind.FORWARD, 0
        soonest = min(able, key=lambda offer: (offer[0], self._liking(offer)))
        start = soonest[0]
        start += self.taste.patience * self._seconds(soonest[1], soonest[2])
        return min((offer for offer in able if offer[0] <= start), key=self._liking)

    def _liking(self, offer: tuple[float, Kind, int]) -> tuple[int, int]:
        return self.rank[offer[1]], -offer[2] if self.taste.deep_first else offer[2]

    def _able(self, owner: int, stage: int) -> list[tuple[float, Kind, int]]:
        free, able = self.free[owner], []
        forwards, inputs, weights = (
            self.done[kind][stage] for kind in (Kind.FORWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)
        )
        if forwards < self.num and not self.lacking_before[stage][forwards] and self._fits(owner, stage):
            able.append((max(free, self.output_there[stage][forwards]), Kind.FORWARD, stage))
        if inputs < forwards and not self.lacking_after[stage][inputs]:
            able.append((max(free, self.gradient_there[stage][inputs]), Kind.INPUT_GRADIENT, stage))
        if weights < inputs and self.apart:
            able.append((free, Kind.WEIGHT_GRADIENT, stage))
        return able

    def _fits(self, owner: int, stage: int) -> bool:
        later = sum(self.memory.held[other] for other in self.mine[owner] if other > stage and self.given is None)
        return self.used[owner] + self.memory.held[stage] + later <= self.memory.limits[owner]

    def _seconds(self, kind: Kind, stage: int) -> float:
        if kind is Kind.INPUT_GRADIENT and not self.apart:
            return self.times.of(Kind.BACKWARD, stage)
        return self.times.of(kind, stage)

    def _run(self, owner: int, start: float, kind: Kind, stage: int, micro_batch: int) -> list[int]:
        """Run a row; gives the owners that have something new to choose from."""
        end = self.free[owner] = start + self._seconds(kind, stage)
        self.done[kind][stage] += 1
        if self.given is not None and kind is not Kind.WEIGHT_GRADIENT:
            self.given[owner].pop()
        held, kept = self.memory.held[stage], self.memory.kept[stage]
        match kind:
            case Kind.FORWARD:
                self.used[owner] += held
                self.lacking_after[stage][micro_batch] -= 1
            case Kind.INPUT_GRADIENT:
                self.used[owner] -= held - kept if self.apart else held
            case _:
                self.used[owner] -= kept
                return []
        forward = kind is Kind.FORWARD
        there, lacking = (
            (self.output_there, self.lacking_before) if forward else (self.gradient_there, self.lacking_after)
        )
        reached = []
        for target, seconds in self.sends.get((forward, stage), ()):
            to, come = self.owners[target], end
            if to != owner:
                come = self.channels[owner, to] = max(end, self.channels.get((owner, to), 0.0)) + seconds
            there[target][micro_batch] = max(there[target][micro_batch], come)
            lacking[target][micro_batch] -= 1
            reached.append(to)
        return reached
