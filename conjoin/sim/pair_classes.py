"""Ranks that send and receive alike, and what is sent once for all of them.

Ranks, pairs of ranks and links are told apart until no more differ: two pairs are alike when they send the same
messages in the same rounds over links that are alike between ranks that are alike, two ranks when as many pairs of
every class begin and end there, two links when as many pairs of every class go over them. Then what happens to one
happens to all of its class at the same moment, since it follows from what was counted. Sizes that differ by less than
`ROUNDING` are taken for the same: of uneven pieces one has an element more.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.comm import Digests, Streams, digests
from conjoin.cost import PairLinks
from conjoin.machine import Machine

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1 / 1024
"""Of the bytes of a message."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of ranks between which there are messages, and the links on their ways."""

    streams: Streams
    of_row: Numbers
    """Of the streams."""
    senders: Numbers
    receivers: Numbers
    links: PairLinks

    @classmethod
    def of(cls, streams: Streams, machine: Machine) -> Pairs:
        """Those of some messages on a machine."""
        size = int(max(streams.sender.max(initial=0), streams.receiver.max(initial=0))) + 1
        keys, of_row = np.unique(streams.sender * size + streams.receiver, return_inverse=True)
        senders, receivers = np.divmod(keys, size)
        return cls(streams, of_row, senders, receivers, PairLinks.between(machine, senders, receivers))

    @property
    def num_bytes(self) -> Floats:
        """By pair."""
        sums = self.streams.num_bytes.sum(axis=1)[self.streams.pattern]
        return np.bincount(self.of_row, weights=sums, minlength=len(self.senders)).astype(np.float64)


@dataclass(frozen=True)
class PairClasses:
    """One pair of each class, with its messages; ranks and links are numbers of classes."""

    senders: list[int]
    receivers: list[int]
    latency: list[float]
    links: list[list[tuple[int, int]]]
    """By class of pairs the links on the way, each with how many pairs of this class go over one such link."""
    rates: list[float]
    """Bytes a second by class of links."""
    messages: list[tuple[int, int, int, float]]
    """Class of pairs, round, up to which round it waits, and bytes: in the order of rounds."""

    @classmethod
    def of(cls, found: Pairs) -> PairClasses:
        """The classes of some pairs."""
        streams, links = found.streams, found.links
        num_bytes = rounded(streams.num_bytes)
        sent = (digests(streams.rounds, streams.after, num_bytes) * (num_bytes > 0)).sum(axis=1, dtype=np.uint64)
        posted = _summed(found.of_row, sent[streams.pattern], len(found.senders))
        ranks, pairs, wires = _told_apart(digests(posted, links.latency, links.own_rate), found)
        shown, pair_class = np.unique(pairs, return_index=True, return_inverse=True)[1:]
        wire_shown = np.unique(wires, return_index=True)[1]
        rank_class = np.unique(ranks, return_inverse=True)[1]
        rates, ways = _ways(links, pair_class, shown, wire_shown)
        senders, receivers = (rank_class[ends[shown]].tolist() for ends in (found.senders, found.receivers))
        is_shown = np.zeros(len(pairs), dtype=bool)
        is_shown[shown] = True
        rows = np.flatnonzero(is_shown[found.of_row])
        messages = _messages(streams, num_bytes, rows, pair_class[found.of_row[rows]])
        return cls(senders, receivers, links.latency[shown].tolist(), ways, rates, messages)


def rounded(num_bytes: Numbers) -> Floats:
    """Sizes of chunks, those of a pattern made equal, and patterns those before them, where they almost are."""
    exact = num_bytes.astype(np.float64)
    count = np.count_nonzero(num_bytes, axis=1)
    mean = exact.sum(axis=1) / np.maximum(count, 1)
    least = np.where(num_bytes > 0, exact, np.inf).min(axis=1, initial=np.inf)
    even = (exact.max(axis=1, initial=0.0) - least) <= mean * ROUNDING
    sizes, place = np.unique(mean[even], return_inverse=True)
    steps, at = sizes.copy(), 0
    while at < len(sizes):
        end = int(np.searchsorted(sizes, sizes[at] * (1 + ROUNDING), side="right"))
        steps[at:end] = sizes[at:end].mean()
        at = end
    exact[even] = np.where(num_bytes[even] > 0, steps[place][:, None], 0.0)
    return exact


def _summed(index: Numbers, values: Digests, count: int) -> Digests:
    found = np.zeros(count, dtype=np.uint64)
    np.add.at(found, index, values)
    return found


def _told_apart(pairs: Digests, found: Pairs) -> tuple[Digests, Digests, Digests]:
    """Numbers for ranks, pairs and links that are the same for those that are alike."""
    senders, receivers, links = found.senders, found.receivers, found.links
    size = int(max(senders.max(), receivers.max())) + 1
    ranks, wires = np.zeros(size, dtype=np.uint64), digests(links.rates)
    pair, hop = np.nonzero(links.wires >= 0)
    wire, num_classes = links.wires[pair, hop], 0
    while True:
        ranks = digests(ranks, _summed(senders, pairs, size), _summed(receivers, pairs, size))
        wires = digests(wires, _summed(wire, digests(pairs[pair], hop), len(wires)))
        over = np.append(wires, np.uint64(0))[links.wires]
        pairs = digests(pairs, ranks[senders], ranks[receivers], *over.T)
        count = len(np.unique(pairs))
        if count == num_classes:
            return ranks, pairs, wires
        num_classes = count


def _ways(
    links: PairLinks, pair_class: Numbers, shown: Numbers, wire_shown: Numbers
) -> tuple[list[float], list[list[tuple[int, int]]]]:
    """The rates of links by class, and for each class of pairs those on the way with their users of this class."""
    rates, count = links.rates[wire_shown].tolist(), len(shown)
    class_of = np.full(len(links.rates) + 1, -1)
    class_of[wire_shown] = np.arange(len(wire_shown))
    pair, hop = np.nonzero(class_of[links.wires] >= 0)
    keys, users = np.unique(class_of[links.wires[pair, hop]] * count + pair_class[pair], return_counts=True)
    ways: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for key, number in zip(keys.tolist(), users.tolist(), strict=True):
        ways[key % count].append((key // count, number))
    for way, rate in enumerate(links.own_rate[shown].tolist()):
        if rate < np.inf:  # a link of its own for each pair
            ways[way].append((len(rates), 1))
            rates.append(rate)
    return rates, ways


def _messages(streams: Streams, num_bytes: Floats, rows: Numbers, ways: Numbers) -> list[tuple[int, int, int, float]]:
    """Those of some rows; what goes the same way in the same round is one."""
    pattern = streams.pattern[rows]
    row, chunk = np.nonzero(num_bytes[pattern] > 0)
    table = np.stack([ways[row], streams.rounds[pattern[row], chunk], streams.after[pattern[row], chunk]])
    order = np.lexsort((table[0], table[2] >= 0, table[1]))
    (way, turn, after), sizes = table[:, order], num_bytes[pattern[row], chunk][order]
    is_new = np.ones(len(way), dtype=bool)
    is_new[1:] = (way[1:] != way[:-1]) | (turn[1:] != turn[:-1]) | ((after[1:] >= 0) != (after[:-1] >= 0))
    first = np.flatnonzero(is_new)
    columns = way[first], turn[first], np.maximum.reduceat(after, first), np.add.reduceat(sizes, first)
    return list(zip(*(column.tolist() for column in columns), strict=True))
