"""Playing a schedule event by event: for transfers that share links, and for rows that send and receive.

A transfer goes through queues, one after the other: that of its channel (one for each ordered pair of owners), then
those of the links it takes. It comes to the next queue when it begins in the last one: what is sent is passed on while
it comes. Each queue takes first what comes first; of what comes at once, what the lower owner made. Rows are run in the
order of their ends, so that whoever looks at a queue knows all that came to it before.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from conjoin.schedules.schedule import TRANSFERS, Kind, Row, Schedule
from conjoin.schedules.times import Times

Seconds = NDArray[np.float64]
Way = tuple[int, int]

_CODES = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.INPUT_GRADIENT: 1, Kind.WEIGHT_GRADIENT: 2}
_GOES_ON, _COMES = range(2)
"""What happens: first owners go on, then transfers come to queues."""
_NOWHERE = (-1, -1)


def play_events(
    schedule: Schedule, times: Times, blocking: bool = False
) -> tuple[tuple[Seconds, ...], tuple[Seconds, ...], float, list[Row]]:
    """Starts and ends by owner, the seconds that owners wait for transfers, and where owners stand that wait for ever.
    """
    player = _Player(schedule, times, blocking)
    player.run()
    stuck = [rows[at] for rows, at in zip(schedule.rows, player.at, strict=True) if at < len(rows)]
    return tuple(map(np.array, player.starts)), tuple(map(np.array, player.ends)), player.exposed, stuck


class _Player:
    """Cells are what rows make for a micro-batch: (code × stages + stage) × micro-batches + micro-batch."""

    def __init__(self, schedule: Schedule, times: Times, blocking: bool) -> None:
        self.schedule, self.rows, self.blocking = schedule, schedule.rows, blocking and schedule.has_transfers
        self.num, self.num_stages, self.owners = schedule.num_micro_batches, schedule.num_stages, schedule.owners
        num_cells = 3 * self.num_stages * self.num
        self.lacking = [0] * (self.num_stages * self.num) + [1] * (2 * self.num_stages * self.num)
        self.ready, self.made = [0.0] * num_cells, [0.0] * num_cells
        self.waits = [-1] * schedule.num_owners
        """The cell of the row that an owner waits to run."""
        self.at, self.free = [0] * schedule.num_owners, [0.0] * schedule.num_owners
        self.starts: list[list[float]] = [[] for _ in schedule.rows]
        self.ends: list[list[float]] = [[] for _ in schedule.rows]
        self.exposed = 0.0
        self.events: list[tuple[float, int, int, Way, int, int]] = []
        """When; what happens to which owner; a transfer and its micro-batch; what ended, or the queue it comes to."""
        self.posted: dict[tuple[Way, int], float] = {}
        """When an end of a transfer came to it last."""
        self.seconds = {kind: [times.of(kind, stage) for stage in range(self.num_stages)] for kind in _CODES}
        self.keeps: list[list[int]] = [[] for _ in range(3 * self.num_stages)]
        """By (code, stage), what it gives to rows of its own owner."""
        self.sends: list[list[Way]] = [[] for _ in range(3 * self.num_stages)]
        self.takers: dict[Way, int] = {}
        self.carry: dict[Way, float] = {}
        self.queues: dict[Way, list[tuple[int, float]]] = {}
        """By way, the queues it goes through, and for how long it takes each up."""
        self._connect(times)

    def _connect(self, times: Times) -> None:
        stages, num, links = self.num_stages, self.num, times.links
        for stage in range(stages):
            self.keeps[stage].append(stages + stage)
            self.keeps[stages + stage].append(2 * stages + stage)
        channels: dict[Way, int] = {}
        for e, (source, target) in enumerate(self.schedule.edges):
            there = (source, target, 0, times.activations[e], links.there[e] if links else ())
            back = (target, source, 1, times.gradients[e], links.back[e] if links else ())
            for giver, taker, code, seconds, taken in (there, back):
                for cell in range((code * stages + taker) * num, (code * stages + taker + 1) * num):
                    self.lacking[cell] += 1
                ends = self.owners[giver], self.owners[taker]
                if ends[0] == ends[1]:
                    self.keeps[code * stages + giver].append(code * stages + taker)
                    continue
                way = giver, taker
                self.sends[code * stages + giver].append(way)
                self.takers[way], self.carry[way] = code * stages + taker, seconds
                channel = channels.setdefault(ends, len(channels))
                self.queues[way] = [(-1 - channel, seconds), *taken]
        numbers = {queue: i for i, queue in enumerate(dict.fromkeys(q for qs in self.queues.values() for q, _ in qs))}
        self.queues = {way: [(numbers[queue], s) for queue, s in queues] for way, queues in self.queues.items()}
        self.until = [0.0] * len(numbers)
        """By queue, when what is in it has gone."""

    def run(self) -> None:
        """Until nothing happens any more."""
        events, num = self.events, self.num
        implied = not self.schedule.has_transfers
        for owner in range(self.schedule.num_owners):
            self._go_on(owner, 0.0)
        while events:
            now, event, owner, way, micro_batch, what = heappop(events)
            if event == _COMES:
                self._pass(now, way, micro_batch, what)
                continue
            if way is _NOWHERE:  # a row that computes has ended
                for taker in self.keeps[what]:
                    self._give(taker * num + micro_batch, now, now)
                for to in self.sends[what]:
                    cell = self.takers[to] * num + micro_batch
                    self.made[cell] = max(self.made[cell], now)
                    if implied:
                        self._pass(now, to, micro_batch, 0)
            self.at[owner] += 1
            self._go_on(owner, now)

    def _go_on(self, owner: int, now: float) -> None:
        """Look at the next row of an owner that is free."""
        rows, at = self.rows[owner], self.at[owner]
        self.free[owner] = now
        while at < len(rows) and rows[at].kind in TRANSFERS:
            way, micro_batch = (rows[at].source, rows[at].target), rows[at].micro_batch
            met = (way, micro_batch) in self.posted
            self.posted[way, micro_batch] = now
            if met:
                self._pass(now, way, micro_batch, 0)
            if self.blocking:
                return
            self.starts[owner].append(now)
            self.ends[owner].append(now)
            at += 1
        self.at[owner] = at
        if at < len(rows):
            row = rows[at]
            cell = (_CODES[row.kind] * self.num_stages + row.stage) * self.num + row.micro_batch
            if self.lacking[cell]:
                self.waits[owner] = cell
            else:
                self._start(owner, cell)

    def _start(self, owner: int, cell: int) -> None:
        """Run the row that an owner stands at."""
        row = self.rows[owner][self.at[owner]]
        free, ready, made = self.free[owner], self.ready[cell], self.made[cell]
        start = ready if ready > free else free
        self.exposed += start - (made if made > free else free)
        end = start + self.seconds[row.kind][row.stage]
        self.starts[owner].append(start)
        self.ends[owner].append(end)
        heappush(self.events, (end, _GOES_ON, owner, _NOWHERE, row.micro_batch, cell // self.num))

    def _give(self, cell: int, come: float, made: float) -> None:
        """Something that a row waits for was made, and will have come."""
        if come > self.ready[cell]:
            self.ready[cell] = come
        if made > self.made[cell]:
            self.made[cell] = made
        self.lacking[cell] -= 1
        if not self.lacking[cell]:
            owner = self.owners[cell // self.num % self.num_stages]
            if self.waits[owner] == cell:
                self.waits[owner] = -1
                self._start(owner, cell)

    def _pass(self, now: float, way: Way, micro_batch: int, which: int) -> None:
        """A transfer has come to one of its queues: through as many as it begins in at once."""
        queues, until, begin = self.queues[way], self.until, now
        while which < len(queues):
            if begin > now:
                heappush(self.events, (begin, _COMES, self.owners[way[0]], way, micro_batch, which))
                return
            number, seconds = queues[which]
            begin = until[number] if until[number] > now else now
            until[number] = begin + seconds
            which += 1
        come = begin + self.carry[way]
        self._give(self.takers[way] * self.num + micro_batch, come, 0.0)
        if self.blocking:
            met = self.posted[way, micro_batch]
            self.exposed += come - met
            for stage in way:
                owner = self.owners[stage]
                self.starts[owner].append(met)
                self.ends[owner].append(come)
                heappush(self.events, (come, _GOES_ON, owner, way, micro_batch, 0))
