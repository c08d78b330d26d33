"""Playing a schedule event by event: for transfers that share links, and for rows that send and receive.

On a channel, one for each ordered pair of owners, one transfer follows another. Those of several channels that are
under way on one link at once share its rate, as packets of several connections do: a transfer that alone would take up
a link for all its seconds goes on at half its rate beside another such one. Links are left to no order of ours, so
nothing depends on which of two events at one time is looked at first.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from conjoin.schedules.fast import CODES
from conjoin.schedules.periods import Shortened
from conjoin.schedules.schedule import Row, Schedule
from conjoin.schedules.times import Taken, Times

Seconds = NDArray[np.float64]
_GOES_ON, _COMES = range(2)
"""What happens: an owner goes on, or a transfer has come."""
_MOVED = -1
"""In the place of a cell, for rows that send or receive."""
LONG = 50_000
"""Rows from which it is worth while to look whether they repeat."""


def play_events(
    schedule: Schedule, times: Times, blocking: bool = False
) -> tuple[tuple[Seconds, ...], tuple[Seconds, ...], float, list[Row]]:
    """Starts and ends by owner, the seconds that owners wait for transfers, and rows at which they wait for ever."""
    if not schedule.has_transfers and sum(map(len, schedule.rows)) > LONG:
        short = Shortened(schedule)
        if short.schedule is not None:
            player = _Player(short.schedule, times, blocking=False)
            player.run()
            starts, ends, waited = map(player.arrays, (player.starts, player.ends, player.waited))
            period = None if player.stuck else short.period(starts)
            if period is not None:
                exposed = float(sum(each.sum() for each in short.put_back(waited, 0.0)))
                return short.put_back(starts, period), short.put_back(ends, period), exposed, []
    player = _Player(schedule, times, blocking and schedule.has_transfers)
    player.run()
    exposed = float(sum(each.sum() for each in player.arrays(player.waited)))
    return player.arrays(player.starts), player.arrays(player.ends), exposed, player.stuck


class _Way:
    """From a stage to another: the cell there (less the micro-batch), seconds, links with the part it wants of each."""

    __slots__ = ("channel", "ends", "seconds", "taker", "wants")

    def __init__(self, ends: tuple[int, int], taker: int, seconds: float, taken: Taken, channel: _Channel) -> None:
        self.ends, self.taker, self.channel = ends, taker, channel
        self.seconds = max(seconds, *(each for _, each in taken), 0.0)
        self.wants = tuple((link, each / self.seconds) for link, each in taken if each > 0)


class _Channel:
    """What goes from an owner to another; the transfer that is under way has so much of its seconds left."""

    __slots__ = ("left", "number", "rate", "since", "turn", "waiting", "wants")

    def __init__(self, number: int) -> None:
        self.number, self.turn = number, 0
        self.waiting: deque[tuple[_Way, int]] = deque()
        """Transfers in order, that under way first."""
        self.wants: Taken = ()
        """Of that under way."""
        self.left = self.rate = self.since = 0.0


def _shared_links(ways: list[_Way]) -> set[int]:
    """The links on which transfers of several channels can meet; of those that all take up alike, one."""
    users: dict[int, list[tuple[int, float]]] = {}
    for number, way in enumerate(ways):
        for link, part in way.wants:
            users.setdefault(link, []).append((number, part))
    alike = {tuple(used): link for link, used in users.items()}
    return {link for used, link in alike.items() if len({ways[number].channel.number for number, _ in used}) > 1}


class _Player:
    """Cells are what rows make for a micro-batch: (code × stages + stage) × micro-batches + micro-batch."""

    def __init__(self, schedule: Schedule, times: Times, blocking: bool) -> None:
        self.owners, self.blocking, self.implied = schedule.owners, blocking, not schedule.has_transfers
        self.num, self.num_stages = schedule.num_micro_batches, schedule.num_stages
        self.lacking = [0] * (self.num_stages * self.num) + [1] * (2 * self.num_stages * self.num)
        """What each cell waits for: forwards for stages before, gradients for their forward and stages after."""
        self.ready, self.made = [0.0] * len(self.lacking), [0.0] * len(self.lacking)
        self.waits = [-1] * schedule.num_owners
        """The cell of the row that an owner waits to run."""
        self.at, self.free = [0] * schedule.num_owners, [0.0] * schedule.num_owners
        self.starts: list[list[float]] = [[] for _ in schedule.rows]
        self.ends: list[list[float]] = [[] for _ in schedule.rows]
        self.waited: list[list[float]] = [[] for _ in schedule.rows]
        """For transfers, by owner and row."""
        self.events: list[tuple[float, int, int, int]] = []
        """When; what; which owner and the cell it made, or which channel and its turn."""
        self.posted: dict[tuple[_Way, int], float] = {}
        """When an end of a transfer came to it last."""
        self.keeps: list[list[int]] = [[] for _ in range(3 * self.num_stages)]
        """By (code, stage), what it gives to rows of its own owner: cells less the micro-batch."""
        self.sends: list[list[_Way]] = [[] for _ in range(3 * self.num_stages)]
        self.channels: list[_Channel] = []
        self.on_link: dict[int, list[_Channel]] = {}
        self.load: dict[int, float] = {}
        """What all on a link want of it, where there are several."""
        self.ways = self._connect(schedule, times)
        self.rows = schedule.rows
        self.cells, self.seconds = self._tables(schedule, times)

    def _connect(self, schedule: Schedule, times: Times) -> dict[tuple[int, int], _Way]:
        stages, num, links = self.num_stages, self.num, times.links
        for stage in range(stages):
            self.keeps[stage].append((stages + stage) * num)
            self.keeps[stages + stage].append((2 * stages + stage) * num)
        ways: dict[tuple[int, int], _Way] = {}
        by_owners: dict[tuple[int, int], _Channel] = {}
        for e, (source, target) in enumerate(schedule.edges):
            there = (source, target, 0, times.activations[e], links.there[e] if links else ())
            back = (target, source, 1, times.gradients[e], links.back[e] if links else ())
            for giver, taker, code, seconds, taken in (there, back):
                cell = (code * stages + taker) * num
                self.lacking[cell : cell + num] = [count + 1 for count in self.lacking[cell : cell + num]]
                ends = self.owners[giver], self.owners[taker]
                if ends[0] == ends[1]:
                    self.keeps[code * stages + giver].append(cell)
                    continue
                channel = by_owners.setdefault(ends, _Channel(len(by_owners)))
                way = ways[giver, taker] = _Way(ends, cell, seconds, taken, channel)
                self.sends[code * stages + giver].append(way)
        self.channels = list(by_owners.values())
        shared = _shared_links(list(ways.values()))
        self.on_link = {link: [] for link in shared}
        for way in ways.values():
            way.wants = tuple(want for want in way.wants if want[0] in shared)
        return ways

    def _tables(self, schedule: Schedule, times: Times) -> tuple[list[list[int]], list[list[float]]]:
        """By owner and position: the cell of a row, and what it takes."""
        known: dict[tuple[str, int], tuple[int, float]] = {}
        for kind, code in CODES.items():
            for stage in range(self.num_stages):
                known[kind.value, stage] = (code * self.num_stages + stage) * self.num, times.of(kind, stage)
        cells, seconds = [], []
        for rows in schedule.rows:
            mine = [(known.get((row.kind.value, row.stage)), row.micro_batch) for row in rows]
            cells.append([_MOVED if row is None else row[0] + m for row, m in mine])
            seconds.append([0.0 if row is None else row[1] for row, _ in mine])
        return cells, seconds

    @property
    def stuck(self) -> list[Row]:
        return [rows[at] for rows, at in zip(self.rows, self.at, strict=True) if at < len(rows)]

    @staticmethod
    def arrays(seconds: list[list[float]]) -> tuple[Seconds, ...]:
        return tuple(map(np.array, seconds))

    def run(self) -> None:
        """Until nothing happens any more."""
        events, num, made_at = self.events, self.num, self.made
        for owner in range(len(self.cells)):
            self._go_on(owner, 0.0)
        while events:
            now, event, which, made = heappop(events)
            if event == _COMES:
                channel = self.channels[which]
                if made == channel.turn:
                    self._come(channel, now)
                continue
            if made != _MOVED:
                sort, micro_batch = divmod(made, num)
                for taker in self.keeps[sort]:
                    self._give(taker + micro_batch, now, now)
                for way in self.sends[sort]:
                    cell = way.taker + micro_batch
                    if made_at[cell] < now:
                        made_at[cell] = now
                    if self.implied:
                        self._send(way, micro_batch, now)
            self.at[which] += 1
            self._go_on(which, now)

    def _go_on(self, owner: int, now: float) -> None:
        """Look at the next row of an owner that is free."""
        cells, at = self.cells[owner], self.at[owner]
        self.free[owner] = now
        while at < len(cells) and cells[at] == _MOVED:
            row = self.rows[owner][at]
            end = self.ways[row.source, row.target], row.micro_batch
            met = end in self.posted
            self.posted[end] = now
            if met:
                self._send(*end, now)
            if self.blocking:
                return
            self.starts[owner].append(now)
            self.ends[owner].append(now)
            self.waited[owner].append(0.0)
            at += 1
        self.at[owner] = at
        if at < len(cells):
            cell = cells[at]
            if self.lacking[cell]:
                self.waits[owner] = cell
            else:
                self._start(owner, cell)

    def _start(self, owner: int, cell: int) -> None:
        """Run the row that an owner stands at."""
        free, ready, made = self.free[owner], self.ready[cell], self.made[cell]
        start = ready if ready > free else free
        self.waited[owner].append(start - (made if made > free else free))
        end = start + self.seconds[owner][self.at[owner]]
        self.starts[owner].append(start)
        self.ends[owner].append(end)
        heappush(self.events, (end, _GOES_ON, owner, cell))

    def _give(self, cell: int, come: float, made: float) -> None:
        """Something that a row waits for was made, and has come."""
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

    def _send(self, way: _Way, micro_batch: int, now: float) -> None:
        channel = way.channel
        channel.waiting.append((way, micro_batch))
        if len(channel.waiting) == 1:
            self._begin(channel, now)

    def _begin(self, channel: _Channel, now: float) -> None:
        """Let the first transfer of a channel be under way: those that it finds on its links become slower."""
        way, _ = channel.waiting[0]
        channel.wants, channel.left, channel.rate = way.wants, way.seconds, 0.0
        for link, _ in channel.wants:
            self.on_link[link].append(channel)
            self._weigh(link)
        self._set_rate(channel, now)
        self._share_others(channel, now)

    def _share_others(self, channel: _Channel, now: float) -> None:
        """A transfer has come to its links, or leaves them: the rates of others there change."""
        for link, _ in channel.wants:
            for other in self.on_link[link]:
                if other is not channel:
                    self._set_rate(other, now)

    def _weigh(self, link: int) -> None:
        """Add up what those want of a link that are on it now."""
        several = self.on_link[link] if len(self.on_link[link]) > 1 else ()
        self.load[link] = sum(part for channel in several for at, part in channel.wants if at == link)

    def _set_rate(self, channel: _Channel, now: float) -> None:
        most = 1.0
        for link, _ in channel.wants:
            load = self.load[link]
            if load > most:
                most = load
        rate = 1 / most
        if rate != channel.rate:
            if channel.rate:
                channel.left -= (now - channel.since) * channel.rate
            channel.rate, channel.since = rate, now
            channel.turn += 1
            heappush(self.events, (now + max(channel.left, 0.0) * most, _COMES, channel.number, channel.turn))

    def _come(self, channel: _Channel, now: float) -> None:
        """The transfer under way is there; the next one of its channel begins."""
        way, micro_batch = channel.waiting.popleft()
        for link, _ in channel.wants:
            self.on_link[link].remove(channel)
            self._weigh(link)
        if channel.waiting:
            following, _ = channel.waiting[0]
            if following is not way:
                self._share_others(channel, now)
            self._begin(channel, now)
        else:
            self._share_others(channel, now)
        self._give(way.taker + micro_batch, now, 0.0)
        if self.blocking:
            met = self.posted[way, micro_batch]
            for owner in way.ends:
                self.waited[owner].append((now - met) / 2)
                self.starts[owner].append(met)
                self.ends[owner].append(now)
                heappush(self.events, (now, _GOES_ON, owner, _MOVED))
