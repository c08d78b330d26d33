"""Walking through a schedule without times: an order in which all rows can run, or where it gets stuck.

A row needs what other rows give: an output or a gradient of a stage, something sent, something received. Owners go on
until they wait; who waits for something is woken by what gives it. Every row is looked at once, or once more when
woken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from conjoin.schedules.schedule import TRANSFERS, Kind, Row, Schedule


class Sends(Enum):
    """What sends and receives wait for."""

    STARTED = "started"
    """Nothing: both are started only, and the row that uses what comes waits for it."""
    BUFFERED = "buffered"
    """A send for nothing, a receive for its send."""
    RENDEZVOUS = "rendezvous"
    """A send for its receive and a receive for its send: both ends meet."""


@dataclass(frozen=True, slots=True)
class Walk:
    """The rows as (owner, position) in an order in which they can run, and where owners stand that cannot go on."""

    order: tuple[tuple[int, int], ...]
    stuck: tuple[tuple[int, int], ...]


class Needs:
    """What rows need and give, as numbers: `fact` × micro-batches + micro-batch.

    Facts: for each stage its output, its input gradient, its weight gradient; for each edge and way back something
    sent, something received, a sender that stands there and a receiver that does.
    """

    def __init__(self, schedule: Schedule, sends: Sends) -> None:
        self.num = schedule.num_micro_batches
        self.sends = sends
        ways = [*schedule.edges, *((target, source) for source, target in schedule.edges)]
        self.way = {way: 3 * schedule.num_stages + 4 * i for i, way in enumerate(ways)}
        self.explicit = schedule.has_transfers
        self.before: list[list[int]] = [[] for _ in schedule.owners]
        self.after: list[list[int]] = [[] for _ in schedule.owners]
        for source, target in schedule.edges:
            crossing = self.explicit and schedule.owners[source] != schedule.owners[target]
            if crossing:
                self.before[target] += self._arrived(source, target)
                self.after[source] += self._arrived(target, source)
            else:
                self.before[target].append(3 * source)
                self.after[source].append(3 * target + 1)

    def _arrived(self, source: int, target: int) -> list[int]:
        """The facts by which what one stage made has come to another."""
        way = self.way[source, target]
        return [way, way + 1] if self.sends is Sends.STARTED else [way + 1]

    def of(self, row: Row) -> list[int]:
        """What has to be there before a row runs."""
        m, num, stage = row.micro_batch, self.num, row.stage
        match row.kind:
            case Kind.FORWARD:
                return [fact * num + m for fact in self.before[stage]]
            case Kind.BACKWARD | Kind.INPUT_GRADIENT:
                return [fact * num + m for fact in (3 * stage, *self.after[stage])]
            case Kind.WEIGHT_GRADIENT:
                return [(3 * stage + 1) * num + m]
            case Kind.SEND:
                made = 3 * stage + (row.target < row.source)
                way = self.way[row.source, row.target]
                return [fact * num + m for fact in ((made, way + 3) if self.sends is Sends.RENDEZVOUS else (made,))]
            case Kind.RECEIVE:
                way = self.way[row.source, row.target]
                met = {Sends.STARTED: (), Sends.BUFFERED: (way,), Sends.RENDEZVOUS: (way + 2,)}[self.sends]
                return [fact * num + m for fact in met]

    def given(self, row: Row) -> list[int]:
        """What is there once a row has run."""
        m, num, stage = row.micro_batch, self.num, row.stage
        match row.kind:
            case Kind.FORWARD:
                return [3 * stage * num + m]
            case Kind.BACKWARD:
                return [(3 * stage + 1) * num + m, (3 * stage + 2) * num + m]
            case Kind.INPUT_GRADIENT:
                return [(3 * stage + 1) * num + m]
            case Kind.WEIGHT_GRADIENT:
                return [(3 * stage + 2) * num + m]
            case Kind.SEND:
                return [self.way[row.source, row.target] * num + m]
            case Kind.RECEIVE:
                return [(self.way[row.source, row.target] + 1) * num + m]

    def on_reaching(self, row: Row) -> list[int]:
        """What is there once an owner stands at a row: a sender, or a receiver."""
        if row.kind not in TRANSFERS:
            return []
        return [(self.way[row.source, row.target] + (2 if row.kind is Kind.SEND else 3)) * self.num + row.micro_batch]


def walk(schedule: Schedule, sends: Sends = Sends.STARTED) -> Walk:
    """Go through a schedule as far as it can be gone through."""
    needs = Needs(schedule, sends)
    there: set[int] = set()
    waiting: dict[int, list[int]] = {}
    positions = [0] * schedule.num_owners
    order: list[tuple[int, int]] = []
    ready = list(reversed(range(schedule.num_owners)))

    def give(facts: list[int]) -> None:
        for fact in facts:
            there.add(fact)
            ready.extend(waiting.pop(fact, ()))

    while ready:
        owner = ready.pop()
        rows = schedule.rows[owner]
        while positions[owner] < len(rows):
            row = rows[positions[owner]]
            give(needs.on_reaching(row))
            lacking = next((fact for fact in needs.of(row) if fact not in there), None)
            if lacking is not None:
                waiting.setdefault(lacking, []).append(owner)
                break
            order.append((owner, positions[owner]))
            positions[owner] += 1
            give(needs.given(row))
    stuck = ((o, at) for o, at in enumerate(positions) if at < len(schedule.rows[o]))
    return Walk(tuple(order), tuple(stuck))


def lacking(schedule: Schedule, walked: Walk, sends: Sends) -> Iterator[tuple[Row, list[Row]]]:
    """Each row at which an owner is stuck, with the rows that it waits for; none where nothing gives what it needs."""
    needs = Needs(schedule, sends)
    givers: dict[int, Row] = {}
    done = set(walked.order)
    for owner, rows in enumerate(schedule.rows):
        for position, row in enumerate(rows):
            if (owner, position) not in done:
                givers |= dict.fromkeys([*needs.given(row), *needs.on_reaching(row)], row)
    for owner, position in walked.stuck:
        row = schedule.rows[owner][position]
        reached = {fact for o, at in walked.stuck for fact in needs.on_reaching(schedule.rows[o][at])}
        missing = [fact for fact in needs.of(row) if fact not in reached]
        yield row, [givers[fact] for fact in missing if fact in givers]
