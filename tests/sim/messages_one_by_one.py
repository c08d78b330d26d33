"""Messages followed one by one, each by itself: slow, and the judge of `conjoin.sim.message_times`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from conjoin.cost.patterns import SOFTWARE_SECONDS, rate_between
from conjoin.machine import Machine

AHEAD = 8
_Pair = tuple[int, int]


class Posted(NamedTuple):
    """A message of a round: who sends it to whom, its bytes, and up to which round both wait; -1 for at once."""

    sender: int
    receiver: int
    num_bytes: int
    round: int
    after: int


@dataclass(frozen=True)
class Links:
    """Those on the way of a message with their bytes a second, named for both ends where nobody shares them."""

    links: tuple[tuple[object, float], ...]
    latency: float


def links_between(machine: Machine, sender: int, receiver: int) -> Links:
    rate, route = rate_between(machine.device), machine.topology.path(sender, receiver)
    links = tuple((link.wire if link.shared else (link.wire, sender, receiver), rate(link)) for link in route)
    return Links(links, SOFTWARE_SECONDS[machine.device] + sum(link.latency for link in route))


def busiest_link_seconds(messages: Sequence[Posted], machine: Machine) -> float:
    """How long messages take that start together."""
    loads: dict[object, float] = {}
    ways = [links_between(machine, message.sender, message.receiver) for message in messages]
    for message, way in zip(messages, ways, strict=True):
        for link, rate in way.links:
            loads[link] = loads.get(link, 0.0) + message.num_bytes / rate
    return max((way.latency for way in ways), default=0.0) + max(loads.values(), default=0.0)


def arrival_seconds(messages: Sequence[Posted], machine: Machine) -> float:
    """When the last of some messages has come, which are given in the order of their rounds."""
    ranks = {rank: _Rank() for message in messages for rank in (message.sender, message.receiver)}
    for number, message in enumerate(messages):
        ranks[message.receiver].expect(message.round)
        if message.after >= 0:
            ranks[message.sender].expect(message.round)
        for rank, sends in ((message.sender, True), (message.receiver, False)):
            if message.after >= 0:
                ranks[rank].add(number, message, sends)
    return _Arrivals(messages, ranks, _Network(machine)).last()


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

    def add(self, number: int, message: Posted, sends: bool) -> None:
        if not self.turns or self.turns[-1].round != message.round:
            self.turns.append(_Turn(message.round))
        turn = self.turns[-1]
        turn.after = max(turn.after, message.after)
        (turn.sent if sends else turn.taken).append(number)

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
    """How fast ways between ranks are that are busy at the same time."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._known: dict[_Pair, Links] = {}
        self._rates: dict[frozenset[_Pair], dict[_Pair, float]] = {}

    def between(self, pair: _Pair) -> Links:
        if pair not in self._known:
            self._known[pair] = links_between(self._machine, *pair)
        return self._known[pair]

    def rates(self, busy: Iterable[_Pair]) -> dict[_Pair, float]:
        """Bytes a second of each way: the links that leave least to their ways are shared out first."""
        key = frozenset(busy)
        if key not in self._rates:
            self._rates[key] = self._shared(sorted(key))
        return self._rates[key]

    def _shared(self, pairs: Sequence[_Pair]) -> dict[_Pair, float]:
        users: dict[object, set[_Pair]] = {}
        left: dict[object, float] = {}
        for pair in pairs:
            for link, rate in self.between(pair).links:
                users.setdefault(link, set()).add(pair)
                left[link] = rate
        found = dict.fromkeys(pairs, float("inf"))
        while users:
            tightest = min(users, key=lambda link: left[link] / len(users[link]))
            rate, done = left[tightest] / len(users[tightest]), users[tightest]
            found.update(dict.fromkeys(done, rate))
            for link in [*users]:
                gone = users[link] & done
                left[link] -= rate * len(gone)
                users[link] = users[link] - gone
                if not users[link]:
                    del users[link]
        return found


class _Arrivals:
    """Messages under way, from the beginning to the last that comes."""

    def __init__(self, messages: Sequence[Posted], ranks: dict[int, _Rank], network: _Network) -> None:
        self._messages, self._ranks, self._network = messages, ranks, network
        self._flowing: dict[_Pair, deque[int]] = {}
        """By way, what goes over it, one message after the other."""
        self._left: dict[_Pair, float] = {}
        """Bytes of the first of them."""
        self._landing: list[tuple[float, int]] = []
        """What is sent, and when it is there."""
        self._ends = [2 * (message.after >= 0) for message in messages]
        """How many ends of each have to begin with it."""

    def last(self) -> float:
        """When all have come."""
        now = 0.0
        for number, message in enumerate(self._messages):
            if message.after < 0:
                self._start(number)
        for rank in self._ranks.values():
            self._go_on(rank)
        while self._flowing or self._landing:
            now = self._advance(now)
        assert not any(self._ends), "nobody waits for ever"
        return now

    def _go_on(self, rank: _Rank) -> None:
        for number in rank.begin():
            self._ends[number] -= 1
            if not self._ends[number]:
                self._start(number)
                self._over(self._messages[number].sender, self._messages[number].round)

    def _start(self, number: int) -> None:
        message = self._messages[number]
        pair = message.sender, message.receiver
        if pair in self._flowing:
            self._flowing[pair].append(number)
        else:
            self._flowing[pair] = deque([number])
            self._left[pair] = message.num_bytes

    def _advance(self, now: float) -> float:
        """To the next moment at which something is sent or has come."""
        rates = self._network.rates(self._flowing)
        spans = {pair: left / rates[pair] for pair, left in self._left.items()}
        sent = min(spans.values(), default=float("inf"))
        lands = self._landing[0][0] - now if self._landing else float("inf")
        step = min(sent, lands)
        for pair, span in spans.items():
            if span <= step:
                self._sent(pair, now + step)
            else:
                self._left[pair] -= step * rates[pair]
        now += step
        while self._landing and self._landing[0][0] <= now:
            message = self._messages[heappop(self._landing)[1]]
            self._over(message.receiver, message.round)
        return now

    def _over(self, rank: int, round: int) -> None:
        """A rank is done with a message."""
        if self._ranks[rank].take(round):
            self._go_on(self._ranks[rank])

    def _sent(self, pair: _Pair, now: float) -> None:
        """The first message of a way has left; the next one follows."""
        waiting = self._flowing[pair]
        heappush(self._landing, (now + self._network.between(pair).latency, waiting.popleft()))
        if waiting:
            self._left[pair] = self._messages[waiting[0]].num_bytes
        else:
            del self._flowing[pair], self._left[pair]
