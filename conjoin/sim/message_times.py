"""When messages have come that ranks send in turns, on links that they share: how long a transfer in rounds takes.

A rank goes through its rounds as the runtime does (`runtime/pipelines/stage_transfers.py`). What starts at once is
under way from the beginning. With a later round it begins when it is done with all that this one waits for: what comes
has come, what goes has been taken over by a receiver that is ready; and it gets ready for what comes some rounds
before. A message flows when its sender has begun and its receiver is ready, after those before it on the same way. Ways
that have something to send share links evenly, as connections do: rates are max-min fair, and found anew when a way
begins or falls silent.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from conjoin.sim.message_phases import seconds_in_phases
from conjoin.sim.pair_classes import PairClasses, Pairs

AHEAD = 8
"""For how many rounds a rank gets ready before its own: `AHEAD` of the runtime, which a test compares."""


MOST_FOLLOWED = 6_000
"""Messages, about half a second of a processor core (2026-11-19). Hundreds of devices with uneven pieces have a hundred
thousand that are not alike: they are priced phase by phase."""


def arrival_seconds(pairs: Pairs) -> float:
    """When the last of the messages between some pairs of ranks has come."""
    if pairs.streams.is_at_once:
        return pairs.links.seconds(pairs.num_bytes)
    classes = PairClasses.of(pairs)
    if len(classes.messages) > MOST_FOLLOWED and pairs.streams.in_frames:
        return seconds_in_phases(pairs)
    return followed_seconds(classes)


def followed_seconds(classes: PairClasses) -> float:
    """The same, of one pair of each class."""
    return _Arrivals(classes).last()


@dataclass(slots=True)
class _Turn:
    """What a rank has to do with in a round in which something is passed on."""

    round: int
    after: int = -1
    sent: list[int] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Rank:
    """What a rank has still to begin with, and how many messages of each round have not come, in order."""

    turns: list[_Turn] = field(default_factory=list)
    coming: dict[int, int] = field(default_factory=dict)
    num_begun: int = 0
    num_ready: int = 0

    def expect(self, round: int) -> None:
        self.coming[round] = self.coming.get(round, 0) + 1

    def turn(self, round: int, after: int) -> _Turn:
        """What is to be done in a round that is the last so far."""
        if not self.turns or self.turns[-1].round != round:
            self.turns.append(_Turn(round))
        self.turns[-1].after = max(self.turns[-1].after, after)
        return self.turns[-1]

    def take(self, round: int) -> bool:
        """A message has come; whether it was the last of its round."""
        self.coming[round] -= 1
        return not self.coming[round] and self.coming.pop(round) == 0

    def begin(self) -> list[int]:
        """The messages that this rank now has begun with or is ready for."""
        found, first = list[int](), next(iter(self.coming), None)
        while self.num_begun < len(self.turns) and (first is None or self.turns[self.num_begun].after < first):
            found += self.turns[self.num_begun].sent
            self.num_begun += 1
            for turn in self.turns[self.num_ready : self.num_begun + AHEAD]:
                found += turn.taken
            self.num_ready = self.num_begun + AHEAD
        return found


class _Network:
    """Bytes under way between ranks. Ways that are busy share links: the links that leave least to each are shared out
    first. Where a way begins or falls silent, rates are found anew for those that have to do with it by way of links.
    """

    def __init__(self, classes: PairClasses) -> None:
        self._links, self._rates = classes.links, classes.rates
        self._busy: dict[int, _Flow] = {}
        self._over: dict[int, set[int]] = {}
        """By link, the busy ways over it."""
        self._changed: set[int] = set()
        """Ways that began or fell silent since rates were found."""
        self._ends: list[tuple[float, int, int]] = []
        """When the first message of each way is sent, by the number under which its flow was told last."""
        self._told = count(1)
        self._known: dict[frozenset[int], dict[int, float]] = {}

    def send(self, way: int, num_bytes: float, now: float) -> None:
        """A message takes to a way, which may just have sent the one before."""
        flow = self._busy.get(way)
        if flow is None:
            self._busy[way] = _Flow(num_bytes, now)
            self._changed.add(way)
            for link, _ in self._links[way]:
                self._over.setdefault(link, set()).add(way)
        else:
            flow.left, flow.since = num_bytes, now
            self._tell(way, flow)

    def stop(self, way: int) -> None:
        """A way has nothing more to send."""
        del self._busy[way]
        self._changed.add(way)
        for link, _ in self._links[way]:
            self._over[link].discard(way)

    def next_end(self, now: float) -> float:
        """When the next message is sent, as things are."""
        if self._changed:
            self._share(now)
        while self._ends and self._is_past(self._ends[0]):
            heappop(self._ends)
        return self._ends[0][0] if self._ends else float("inf")

    def ended(self, now: float) -> list[int]:
        """The ways whose message is sent by now."""
        found = []
        while self._ends and self._ends[0][0] <= now:
            end = heappop(self._ends)
            if not self._is_past(end):
                found.append(end[2])
        return found

    def _is_past(self, end: tuple[float, int, int]) -> bool:
        flow = self._busy.get(end[2])
        return flow is None or flow.told != end[1]

    def _tell(self, way: int, flow: _Flow) -> None:
        flow.told = next(self._told)
        heappush(self._ends, (flow.since + flow.left / flow.rate, flow.told, way))

    def _share(self, now: float) -> None:
        todo, self._changed = self._changed, set()
        while todo:
            ways = self._beside(todo.pop())
            todo -= ways
            key = frozenset(ways & self._busy.keys())
            if key not in self._known:
                self._known[key] = self._shared(sorted(key))
            for way, rate in self._known[key].items():
                flow = self._busy[way]
                if flow.rate != rate:
                    flow.left -= (now - flow.since) * flow.rate
                    flow.since, flow.rate = now, rate
                    self._tell(way, flow)

    def _beside(self, way: int) -> set[int]:
        """The ways that have links in common, by way of others too; also one that just fell silent."""
        found, links, todo = {way}, set[int](), [way]
        for each in todo:
            for link, _ in self._links[each]:
                if link not in links:
                    links.add(link)
                    todo += self._over.get(link, set()) - found
                    found |= self._over.get(link, set())
        return found

    def _shared(self, ways: list[int]) -> dict[int, float]:
        users: dict[int, int] = {}
        for way in ways:
            for link, number in self._links[way]:
                users[link] = users.get(link, 0) + number
        left = {link: self._rates[link] for link in users}
        found: dict[int, float] = {}
        while users:
            tightest = min(users, key=lambda link: left[link] / users[link])
            rate = left[tightest] / users[tightest]
            for way in self._over[tightest]:
                if way not in found:
                    found[way] = rate
                    for link, number in self._links[way]:
                        left[link] -= rate * number
                        users[link] -= number
            users = {link: number for link, number in users.items() if number}
        return {way: found.get(way, float("inf")) for way in ways}


@dataclass(slots=True)
class _Flow:
    """The first message of a busy way: bytes of it that were left at some moment, and their rate since."""

    left: float
    since: float
    rate: float = 0.0
    told: int = 0


class _Arrivals:
    """Messages under way, from the beginning to the last that comes."""

    def __init__(self, classes: PairClasses) -> None:
        self._classes, self._messages, self._network = classes, classes.messages, _Network(classes)
        self._ranks = {rank: _Rank() for rank in (*classes.senders, *classes.receivers)}
        for number, (way, round, after, _) in enumerate(self._messages):
            sender, receiver = self._ranks[classes.senders[way]], self._ranks[classes.receivers[way]]
            receiver.expect(round)
            if after >= 0:
                sender.expect(round)
                sender.turn(round, after).sent.append(number)
                receiver.turn(round, after).taken.append(number)
        self._waiting: dict[int, deque[int]] = {}
        """By busy way, what goes over it, one message after the other."""
        self._landing: list[tuple[float, int]] = []
        """What is sent, and when it is there."""
        self._ends = [2 * (after >= 0) for _, _, after, _ in self._messages]
        """How many ends of each have to begin with it."""

    def last(self) -> float:
        """When all have come."""
        now = 0.0
        for number, (_, _, after, _) in enumerate(self._messages):
            if after < 0:
                self._start(number, now)
        for rank in self._ranks.values():
            self._go_on(rank, now)
        while self._waiting or self._landing:
            now = self._advance(now)
        assert not any(self._ends), "nobody waits for ever"
        return now

    def _go_on(self, rank: _Rank, now: float) -> None:
        for number in rank.begin():
            self._ends[number] -= 1
            if not self._ends[number]:
                self._start(number, now)
                self._over(self._classes.senders, number, now)

    def _start(self, number: int, now: float) -> None:
        way, _, _, num_bytes = self._messages[number]
        if way in self._waiting:
            self._waiting[way].append(number)
        else:
            self._waiting[way] = deque([number])
            self._network.send(way, num_bytes, now)

    def _advance(self, now: float) -> float:
        """To the next moment at which something is sent or has come."""
        lands = self._landing[0][0] if self._landing else float("inf")
        now = min(self._network.next_end(now), lands)
        for way in self._network.ended(now):
            self._sent(way, now)
        while self._landing and self._landing[0][0] <= now:
            self._over(self._classes.receivers, heappop(self._landing)[1], now)
        return now

    def _over(self, ends: list[int], number: int, now: float) -> None:
        """The rank at one end of a message is done with it."""
        way, round, _, _ = self._messages[number]
        rank = self._ranks[ends[way]]
        if rank.take(round):
            self._go_on(rank, now)

    def _sent(self, way: int, now: float) -> None:
        """The first message of a way has left; the next one follows."""
        waiting = self._waiting[way]
        heappush(self._landing, (now + self._classes.latency[way], waiting.popleft()))
        if waiting:
            self._network.send(way, self._messages[waiting[0]][3], now)
        else:
            del self._waiting[way]
            self._network.stop(way)
