"""How long messages take phase by phase, where too many differ for each to be followed.

A phase is all that lies between two moments for which somebody waits: in a transfer in frames what a frame brings to
hosts, and then what it spreads inside them. A rank begins to send in a phase when it is through with those before, and
is ready for what comes a phase earlier. What goes over a link in a phase shares it, after what went over it before; a
message that shares several links has on each what it would have if it shared that one alone. Phases that send the same,
which most do, are made up once, and where they come again and again and take as long each time, the rest are not gone
through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.comm import digests
from conjoin.sim.pair_classes import Floats, Numbers, Pairs, rounded

_PERIODS = (1, 2)
"""Phases after which the same ones come again: with and without spreading inside hosts."""
_SETTLED = 1e-6
"""Of the seconds of a period: so much less or more than those before it took."""


def seconds_in_phases(pairs: Pairs) -> float:
    """When the last message has come."""
    phases = _Phases.of(pairs)
    made: dict[int, _Phase] = {}
    ends, kinds = _Ends.begun(pairs), phases.kinds
    took: list[float] = []
    at = 0
    while at < len(kinds):
        kind = kinds[at]
        if kind not in made:
            made[kind] = phases.phase(at)
        before = ends.last
        made[kind].go_through(ends)
        took.append(ends.last - before)
        at += 1
        for period in _PERIODS:
            left = _times_again(kinds, at, period)
            if left and _is_settled(took, period):
                ends.shift(left * sum(took[-period:]))
                at += left * period
                took = []
                break
    return ends.last


def _times_again(kinds: Sequence[int], at: int, period: int) -> int:
    """How often the last phases come again from here on, and came twice already."""
    last = kinds[max(at - period, 0) : at]
    if any(kinds[max(at - k * period, 0) : at - (k - 1) * period] != last for k in (2, 3)):
        return 0
    found = 0
    while kinds[at + found * period : at + (found + 1) * period] == last:
        found += 1
    return found


def _is_settled(took: Sequence[float], period: int) -> bool:
    if len(took) < 3 * period:
        return False
    last, *others = (sum(took[len(took) - k * period : len(took) - (k - 1) * period]) for k in (1, 2, 3))
    return all(abs(each - last) <= _SETTLED * last for each in others)


@dataclass
class _Ends:
    """When ranks, links and pairs are through with what they have had to do with so far."""

    ranks: Floats
    links: Floats
    own: Floats
    """By pair, the link that it shares with no other."""
    ready: Floats
    """When ranks are ready for what comes: a phase before."""
    last: float = 0.0

    @classmethod
    def begun(cls, pairs: Pairs) -> _Ends:
        size = int(max(pairs.senders.max(), pairs.receivers.max())) + 1
        return cls(np.zeros(size), np.zeros(len(pairs.links.rates)), np.zeros(len(pairs.senders)), np.zeros(size))

    def shift(self, seconds: float) -> None:
        """All goes on as before for a while."""
        self.last += seconds
        for each in (self.ranks, self.links, self.own, self.ready):
            each += seconds


@dataclass(frozen=True)
class _Phase:
    """What is sent between pairs; by link, those that it is shared by."""

    pairs: Numbers
    senders: Numbers
    receivers: Numbers
    waits: NDArray[np.bool_]
    """Whether a pair waits for the phases before."""
    own: Floats
    """Seconds on the link of a pair that nobody shares."""
    latency: Floats
    users: Numbers
    """Link by link."""
    taken: Floats
    """Seconds of each of them, if it were alone."""
    shared: Floats
    """The same beside the others, as evenly as each needs it."""
    links: Numbers
    starts: Numbers
    """Where each link begins among the users."""
    counts: Numbers

    def go_through(self, ends: _Ends) -> None:
        begin = np.where(self.waits, np.maximum(ends.ranks[self.senders], ends.ready[self.receivers]), 0.0)
        end = np.maximum(ends.own[self.pairs], begin) + self.own
        ends.own[self.pairs] = end
        if len(self.links):
            begun = begin[self.users]
            free = np.maximum(ends.links[self.links], np.minimum.reduceat(begun, self.starts))
            together = free + np.add.reduceat(self.taken, self.starts)
            ends.links[self.links] = np.maximum(together, np.maximum.reduceat(begun + self.taken, self.starts))
            np.maximum.at(end, self.users, np.maximum(np.repeat(free, self.counts), begun) + self.shared)
        ends.ready = ends.ranks.copy()
        np.maximum.at(ends.ranks, self.receivers, end + self.latency)
        np.maximum.at(ends.ranks, self.senders, begin)
        ends.last = max(ends.last, float((end + self.latency).max()))


@dataclass(frozen=True)
class _Phases:
    """All messages, phase by phase."""

    found: Pairs
    pattern: Numbers
    waits: NDArray[np.bool_]
    num_bytes: Floats
    starts: Numbers
    kinds: list[int]
    """By phase; of the same kind are those that send the same."""

    @classmethod
    def of(cls, found: Pairs) -> _Phases:
        streams = found.streams
        pattern, chunk = np.nonzero(streams.num_bytes)
        after, num_bytes = streams.after[pattern, chunk], rounded(streams.num_bytes)[pattern, chunk]
        phase = np.searchsorted(np.unique(after[after >= 0]), streams.rounds[pattern, chunk])
        order = np.argsort(phase, kind="stable")
        starts = np.flatnonzero(np.append(True, np.diff(phase[order])))
        sent = np.add.reduceat(digests(pattern, num_bytes, after >= 0)[order], starts)
        kinds = np.unique(sent, return_inverse=True)[1].tolist()
        return cls(found, pattern[order], after[order] >= 0, num_bytes[order], np.append(starts, len(order)), kinds)

    def phase(self, number: int) -> _Phase:
        """One of them."""
        here, found = slice(self.starts[number], self.starts[number + 1]), self.found
        by_pair, waiting = self._by_pair(here, False), self._by_pair(here, True)
        pairs = np.flatnonzero(by_pair)
        links, num_bytes = found.links, by_pair[pairs]
        wires = links.wires[pairs]
        user, hop = np.nonzero(wires >= 0)
        wire = wires[user, hop]
        order = np.lexsort((num_bytes[user], wire))
        user, wire = user[order], wire[order]
        starts = np.flatnonzero(np.append(True, np.diff(wire))) if len(wire) else wire
        counts = np.diff(np.append(starts, len(wire)))
        taken = num_bytes[user] / links.rates[wire]
        smaller = np.cumsum(taken) - taken
        shared = smaller - np.repeat(smaller[starts], counts)
        shared += taken * (np.repeat(starts + counts, counts) - np.arange(len(wire)))
        senders, receivers, waits = found.senders[pairs], found.receivers[pairs], waiting[pairs] > 0
        own, latency = num_bytes / links.own_rate[pairs], links.latency[pairs]
        return _Phase(pairs, senders, receivers, waits, own, latency, user, taken, shared, wire[starts], starts, counts)

    def _by_pair(self, here: slice, only_waiting: bool) -> Floats:
        streams = self.found.streams
        weights = self.num_bytes[here] * self.waits[here] if only_waiting else self.num_bytes[here]
        by_pattern = np.bincount(self.pattern[here], weights=weights, minlength=len(streams.num_bytes))
        return np.bincount(self.found.of_row, by_pattern[streams.pattern], len(self.found.senders)).astype(np.float64)
