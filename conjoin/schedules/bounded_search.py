"""Branch and bound over schedules: every row that an owner could run next, in depth, while it may be for the better."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from conjoin.schedules.bounds import Bounds
from conjoin.schedules.play import play
from conjoin.schedules.schedule import Kind, Row, Schedule
from conjoin.schedules.times import Problem

KEPT = 32
"""How many partial schedules with the same rows done are kept to compare with: more find little and take longer."""

FORWARD, INPUT, WEIGHT = range(3)
SHOWN = {FORWARD: Kind.FORWARD, INPUT: Kind.INPUT_GRADIENT, WEIGHT: Kind.WEIGHT_GRADIENT}


@dataclass(frozen=True, slots=True)
class _Step:
    """A row that can run next: when it starts and ends."""

    end: float
    start: float
    code: int
    stage: int


class Branching:
    """A partial schedule that rows are added to and taken from, and the best whole one so far."""

    def __init__(self, problem: Problem) -> None:
        owners, times, edges, num_owners = problem.owners, problem.times, problem.edges, problem.num_owners
        self.owners, self.num, self.edges = owners, problem.num_micro_batches, edges
        self.memory, self.apart, self.times = problem.memory, problem.apart, times
        self.bounds = Bounds(problem)
        stages = range(len(owners))
        self.seconds = (times.forward, self.bounds.inputs, self.bounds.weights)
        self.mine = [[stage for stage in stages if owners[stage] == owner] for owner in range(num_owners)]
        self.into = [[e for e, (_, target) in enumerate(edges) if target == stage] for stage in stages]
        self.out = [[e for e, (source, _) in enumerate(edges) if source == stage] for stage in stages]
        self.carry = (times.activations, times.gradients)
        self.done = [[0] * len(owners) for _ in range(3)]
        self.free = [0.0] * num_owners
        self.used = [0.0] * num_owners
        self.ends: list[list[float]] = [[] for _ in stages]
        """When forwards ended, by stage."""
        self.come: tuple[list[list[float]], list[list[float]]] = ([[] for _ in edges], [[] for _ in edges])
        """When activations, and gradients, came along each edge."""
        self.channels = [[0.0] * num_owners for _ in range(num_owners)]
        self.left = len(owners) * self.num * (3 if self.apart else 2)
        self.rows: list[list[Row]] = [[] for _ in range(num_owners)]
        self.best: Schedule | None = None
        self.seen: dict[tuple[int, ...], list[list[float]]] = {}
        self.steps = 0

    def improve(self, seconds: float, max_steps: int) -> tuple[Schedule | None, bool]:
        """A schedule that takes less than `seconds`, if one is found, and whether the search came to its end."""
        self.limit, self.max_steps = seconds, max_steps
        pending = [iter(self._choices())]
        undo: list[tuple[object, ...]] = []
        while pending:
            step = next(pending[-1], None)
            if step is None:
                pending.pop()
                if undo:
                    self._take_back(*undo.pop())
                continue
            if self.steps >= self.max_steps:
                return self.best, False
            self.steps += 1
            undo.append(self._add(step))
            if self.left == 0:
                self._keep_if_better()
            if self.left == 0 or self._bound() >= self.limit * (1 - 1e-9) or self._dominated():
                self._take_back(*undo.pop())
                continue
            pending.append(iter(self._choices()))
        return self.best, True

    def _keep_if_better(self) -> None:
        seconds = max(self.free)
        if seconds >= self.limit * (1 - 1e-9):
            return
        schedule = Schedule(self.owners, self.num, tuple(map(tuple, self.rows)), self.edges, "found")
        if self.times.links is not None:  # it waits longer than was counted here
            seconds = play(schedule, self.times).seconds
        if seconds < self.limit * (1 - 1e-9):
            self.limit, self.best = seconds, schedule

    def _choices(self) -> list[_Step]:
        """Rows of one owner that can run next: of the owner whose row could end first, all that could start before."""
        steps = [step for stage in range(len(self.owners)) for step in self._able(stage)]
        if not steps:
            return []
        first = min(steps, key=lambda step: (step.end, step.start, step.stage))
        owner = self.owners[first.stage]
        rivals = [step for step in steps if self.owners[step.stage] == owner and step.start < first.end]
        if first not in rivals:  # rows that take no time
            rivals.append(first)
        return sorted(rivals, key=lambda step: (step.code == WEIGHT, step.start, step.code != INPUT, -step.stage))

    def _able(self, stage: int) -> list[_Step]:
        done, num, owner, able = self.done, self.num, self.owners[stage], []
        free, at = self.free[owner], done[FORWARD][stage]
        fits = self.used[owner] + self.memory.held[stage] <= self.memory.limits[owner]
        if at < num and fits and all(len(self.come[0][edge]) > at for edge in self.into[stage]):
            start = max([free, *(self.come[0][edge][at] for edge in self.into[stage])])
            able.append(_Step(start + self.seconds[FORWARD][stage], start, FORWARD, stage))
        at = done[INPUT][stage]
        if at < done[FORWARD][stage] and all(len(self.come[1][edge]) > at for edge in self.out[stage]):
            start = max([free, *(self.come[1][edge][at] for edge in self.out[stage])])
            able.append(_Step(start + self.seconds[INPUT][stage], start, INPUT, stage))
        if self.apart and done[WEIGHT][stage] < done[INPUT][stage]:
            able.append(_Step(free + self.seconds[WEIGHT][stage], free, WEIGHT, stage))
        return able

    def _add(self, step: _Step) -> tuple[object, ...]:
        """Run a row; gives what it takes to take it back."""
        stage, owner = step.stage, self.owners[step.stage]
        before = self.free[owner], self.used[owner]
        channels: list[tuple[int, int, float]] = []
        kind = SHOWN[step.code] if self.apart or step.code == FORWARD else Kind.BACKWARD
        self.rows[owner].append(Row(kind, stage, self.done[step.code][stage]))
        self.done[step.code][stage] += 1
        self.free[owner] = step.end
        self.left -= 1
        held, kept = self.memory.held[stage], self.memory.kept[stage]
        if step.code == FORWARD:
            self.used[owner] += held
        elif step.code == INPUT:
            self.used[owner] -= held - kept if self.apart else held
        else:
            self.used[owner] -= kept
        if step.code != WEIGHT:
            for edge in self.out[stage] if step.code == FORWARD else self.into[stage]:
                other = self.owners[self.edges[edge][1 if step.code == FORWARD else 0]]
                come = step.end
                if other != owner:
                    channels.append((owner, other, self.channels[owner][other]))
                    come = max(come, self.channels[owner][other]) + self.carry[step.code][edge]
                    self.channels[owner][other] = come
                self.come[step.code][edge].append(come)
        return step, before, channels

    def _take_back(self, step: object, before: object, channels: object) -> None:
        assert isinstance(step, _Step) and isinstance(before, tuple) and isinstance(channels, list)
        stage, owner = step.stage, self.owners[step.stage]
        self.rows[owner].pop()
        self.done[step.code][stage] -= 1
        self.free[owner], self.used[owner] = before
        self.left += 1
        if step.code != WEIGHT:
            for edge in self.out[stage] if step.code == FORWARD else self.into[stage]:
                self.come[step.code][edge].pop()
        for giver, taker, seconds in reversed(channels):
            self.channels[giver][taker] = seconds

    def _bound(self) -> float:
        """What no schedule that begins so is below."""
        least = 0.0
        for stages in self.mine:
            work, begin = 0.0, inf
            for stage in stages:
                forwards, inputs, weights = (self.num - self.done[code][stage] for code in range(3))
                if forwards or inputs or (weights and self.apart):
                    begin = min(begin, self._next(stage))
                each = (forwards * self.seconds[FORWARD][stage], inputs * self.seconds[INPUT][stage])
                work += sum(each) + weights * self.seconds[WEIGHT][stage]
                if inputs:
                    least = max(least, self._last_input(stage, *each) + self.bounds.tail[stage])
            if work:
                least = max(least, begin + work)
        return least

    def _last_input(self, stage: int, forward: float, gradient: float) -> float:
        """When the last input gradient of a stage can end: all rows before it, or the last forward there and back."""
        late = max(0, self.num - self.bounds.fit[stage] - self.done[WEIGHT][stage]) if forward else 0
        rows = self._next(stage) + forward + gradient + late * self.seconds[WEIGHT][stage]
        if not forward:
            return rows
        turn = self._next_forward(stage) + forward + self.bounds.turn[stage] + self.seconds[INPUT][stage]
        return max(rows, turn)

    def _next(self, stage: int) -> float:
        """When a stage can go on: at once where gradients may be due, else when something comes to it."""
        forwards, inputs, weights = (self.done[code][stage] for code in range(3))
        due = inputs < forwards or (self.apart and weights < inputs)
        return self.free[self.owners[stage]] if due else self._next_forward(stage)

    def _next_forward(self, stage: int) -> float:
        """When the next forward of a stage can start: what has not come yet comes no sooner than the first could."""
        at, free = self.done[FORWARD][stage], self.free[self.owners[stage]]
        ways = [self.come[0][edge][at] for edge in self.into[stage] if len(self.come[0][edge]) > at]
        return max([free, self.bounds.head[stage], *ways])

    def _dominated(self) -> bool:
        """Whether something as far as this was seen that was nowhere later; else this is kept to compare with."""
        key = tuple(count for counts in self.done for count in counts)
        now = list(self.free)
        for code, lists in enumerate(self.come):
            for edge, times in enumerate(lists):
                source, target = self.edges[edge]
                now += times[self.done[code][target if code == FORWARD else source] :]
        for owner, row in enumerate(self.channels):
            now += [max(seconds, self.free[owner]) for other, seconds in enumerate(row) if other != owner]
        others = self.seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(other, now, strict=True)) for other in others):
            return True
        if len(others) < KEPT:
            others.append(now)
        return False
