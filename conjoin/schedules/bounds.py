"""Seconds that no schedule of some stages is below, whatever its order.

An owner begins when the first micro-batch can have come (head), runs all its rows, and what it runs last still has to
go back to the first stage (tail). Weight gradients may run after the last input gradient, but only as many as memory
holds. And where L micro-batches fit at a stage, the forward of one waits until the one L before it has come back. Links
that transfers share have to carry all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from math import inf

from conjoin.schedules.schedule import Kind
from conjoin.schedules.times import Problem


class Bounds:
    """Ways through the stages, and the bound that follows from them."""

    def __init__(self, problem: Problem) -> None:
        owners, times, edges = problem.owners, problem.times, problem.edges
        self.owners, self.num, self.times = owners, problem.num_micro_batches, times
        self.memory, self.apart = problem.memory, problem.apart
        stages = range(len(owners))
        gradient = Kind.INPUT_GRADIENT if self.apart else Kind.BACKWARD
        self.inputs = tuple(times.of(gradient, stage) for stage in stages)
        self.weights = times.weight_gradient if self.apart else (0.0,) * len(owners)
        crosses = [owners[source] != owners[target] for source, target in edges]
        self.head = [0.0] * len(owners)
        for stage in stages:
            ways = [
                self.head[source] + times.forward[source] + times.activations[e] * crosses[e]
                for e, (source, target) in enumerate(edges)
                if target == stage
            ]
            self.head[stage] = max(ways, default=0.0)
        self.tail = list(self.weights)
        for stage in stages:
            ways = [
                times.gradients[e] * crosses[e] + self.inputs[source] + self.tail[source]
                for e, (source, target) in enumerate(edges)
                if target == stage
            ]
            self.tail[stage] = max(self.weights[stage], *ways) if ways else self.weights[stage]
        self.turn = [0.0] * len(owners)
        for stage in reversed(stages):
            ways = [
                (times.activations[e] + times.gradients[e]) * crosses[e]
                + times.forward[target] + self.turn[target] + self.inputs[target]
                for e, (source, target) in enumerate(edges)
                if source == stage
            ]  # fmt: skip
            self.turn[stage] = max(ways, default=0.0)
        """From the end of a stage's forward to the start of its gradient."""
        self.fit = [self._fit(stage) for stage in stages]
        self.edges = edges

    def _fit(self, stage: int) -> int:
        """How many micro-batches a stage may have in flight at once."""
        held, kept = self.memory.held[stage], self.memory.kept[stage] if self.apart else self.memory.held[stage]
        limit = self.memory.limits[self.owners[stage]]
        if limit == inf or kept <= 0:
            return self.num
        return max(1, min(self.num, int((limit - held) / kept + 1e-9) + 1))

    def least(self) -> float:
        """No schedule ends before this."""
        of_owners = (self._of_owner(owner) for owner in set(self.owners))
        return max(*of_owners, *map(self._of_stage, self._stages()), *self._of_links())

    def _stages(self) -> range:
        return range(len(self.owners))

    def _of_owner(self, owner: int) -> float:
        """All its work after its first head, and before its shortest tail."""
        stages = [stage for stage in self._stages() if self.owners[stage] == owner]
        each = (self.times.forward[s] + self.inputs[s] + self.weights[s] for s in stages)
        tails = (0.0 if self.apart else self.tail[stage] for stage in stages)
        return min(self.head[stage] for stage in stages) + self.num * sum(each) + min(tails)

    def _of_stage(self, stage: int) -> float:
        """Its own rows up to the last input gradient, or the turns that memory makes it wait for; then the tail."""
        forward, inputs, weight = self.times.forward[stage], self.inputs[stage], self.weights[stage]
        late = max(0, self.num - self.fit[stage])
        rows = self.num * (forward + inputs) + late * weight
        turn = forward + self.turn[stage] + inputs
        rounds, rest = divmod(self.num - 1, self.fit[stage])
        turns = rounds * (turn + weight) + rest * forward + turn
        return self.head[stage] + max(rows, turns) + self.tail[stage]

    def _of_links(self) -> Iterator[float]:
        """All that goes over a link, after the first of it can be sent, and before what follows the last of it."""
        links = self.times.links
        loads: dict[int, float] = defaultdict(float)
        before, after = (defaultdict[int, float](lambda: inf) for _ in range(2))
        for e, (source, target) in enumerate(self.edges if links else ()):
            assert links is not None
            if self.owners[source] == self.owners[target]:
                continue
            returned = self.times.forward[target] + self.turn[target] + self.inputs[target]
            there = (self.head[source] + self.times.forward[source], returned + self.tail[target], links.there[e])
            back = (self.head[target] + returned, self.inputs[source] + self.tail[source], links.back[e])
            for begin, end, taken in (there, back):
                for link, seconds in taken:
                    loads[link] += self.num * seconds
                    before[link], after[link] = min(before[link], begin), min(after[link], end)
        yield from (before[link] + load + after[link] for link, load in loads.items())
