"""Owners, channels and links at work in small steps: a player that shares nothing with ours but the table.

From one event to the next everything goes on at a fixed rate; whatever has come to its end then is taken away, and all
rates are looked at again. Nothing is kept in order of time, and no row is known before it runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from conjoin.schedules import Kind, Row, Schedule, Times

EPSILON = 1e-9


@dataclass
class Moving:
    """A transfer: what it carries, to whom, what is left of its seconds, and how much of each link it wants."""

    what: tuple[bool, int, int, int]
    owners: tuple[int, int]
    left: float
    wants: dict[int, float]


class FluidPlayer:
    def __init__(self, schedule: Schedule, times: Times) -> None:
        self.schedule, self.times, self.now = schedule, times, 0.0
        self.next = [0] * schedule.num_owners
        self.left: list[float | None] = [None] * schedule.num_owners
        self.done: set[tuple[bool, int, int]] = set()
        self.there: set[tuple[bool, int, int, int]] = set()
        """Outputs (True) or gradients of a stage for a micro-batch, that are at another stage."""
        self.queue: list[Moving] = []

    def runs(self, row: Row) -> bool:
        stage, m, forward = row.stage, row.micro_batch, row.kind is Kind.FORWARD
        if row.kind is Kind.WEIGHT_GRADIENT:
            return (False, stage, m) in self.done
        if not forward and (True, stage, m) not in self.done:
            return False
        others = [(a if forward else b) for a, b in self.schedule.edges if (b if forward else a) == stage]
        return all((forward, other, stage, m) in self.there for other in others)

    def start(self) -> bool:
        begun = False
        for owner, rows in enumerate(self.schedule.rows):
            if self.left[owner] is None and self.next[owner] < len(rows) and self.runs(rows[self.next[owner]]):
                row = rows[self.next[owner]]
                self.left[owner], begun = self.times.of(row.kind, row.stage), True
        return begun

    def finish(self, row: Row) -> None:
        if row.kind is Kind.WEIGHT_GRADIENT:
            return
        forward, owners, times = row.kind is Kind.FORWARD, self.schedule.owners, self.times
        self.done.add((forward, row.stage, row.micro_batch))
        for edge, (a, b) in enumerate(self.schedule.edges):
            source, target = (a, b) if forward else (b, a)
            if source != row.stage:
                continue
            what = (forward, source, target, row.micro_batch)
            if owners[source] == owners[target]:
                self.there.add(what)
                continue
            seconds = (times.activations if forward else times.gradients)[edge]
            taken = ((times.links.there if forward else times.links.back)[edge]) if times.links else ()
            wants = {link: each / seconds for link, each in taken if each}
            self.queue.append(Moving(what, (owners[source], owners[target]), seconds, wants))

    def under_way(self) -> list[tuple[Moving, float]]:
        """The first of every pair of owners, and its rate."""
        firsts: dict[tuple[int, int], Moving] = {}
        for moving in self.queue:
            firsts.setdefault(moving.owners, moving)
        wanted: dict[int, float] = {}
        for moving in firsts.values():
            for link, part in moving.wants.items():
                wanted[link] = wanted.get(link, 0.0) + part
        return [(moving, 1 / max([1.0, *(wanted[link] for link in moving.wants)])) for moving in firsts.values()]

    def step(self) -> bool:
        """To the next event; whether there was one."""
        while self.start():
            pass
        moving = self.under_way()
        spans = [left for left in self.left if left is not None] + [each.left / rate for each, rate in moving]
        if not spans:
            return False
        span = min(spans)
        self.now += span
        for each, rate in moving:
            each.left -= span * rate
        for owner, left in enumerate(self.left):
            self.left[owner] = None if left is None else left - span
        self.there |= {each.what for each, _ in moving if each.left < EPSILON}
        over = [each for each, _ in moving if each.left < EPSILON]
        self.queue = [each for each in self.queue if not any(each is other for other in over)]
        for owner, left in enumerate(self.left):
            if left is not None and left < EPSILON:
                row = self.schedule.rows[owner][self.next[owner]]
                self.left[owner] = None
                self.next[owner] += 1
                self.finish(row)
        return True


def fluid_seconds(schedule: Schedule, times: Times) -> float:
    """When nothing happens any more."""
    player = FluidPlayer(schedule, times)
    while player.step():
        pass
    assert player.next == [len(rows) for rows in schedule.rows]
    return player.now
