"""The links on the way between many pairs of ranks at once, as arrays: what messages load them with, and for how long.

A way is made of legs, each looked up once for each kind of node: out of a node, between nodes and into one, or inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from conjoin.cost.patterns import SOFTWARE_SECONDS, rate_between
from conjoin.machine import NETWORK, Machine, Route

Numbers = NDArray[np.int64]
Floats = NDArray[np.float64]

_FEW = 1024
"""Pairs whose links are kept: a search asks for those between the same ranks again and again."""


@dataclass(frozen=True)
class PairLinks:
    """For every pair of ranks the links on the way; those that hold nobody else up only tell how fast it is."""

    wires: Numbers
    """By pair, then in the order of the way: shared links by number, -1 where there is none."""
    rates: Floats
    """Bytes a second by shared link."""
    names: Callable[[int], str]
    own_rate: Floats
    """By pair, bytes a second of the slowest link that is not shared."""
    latency: Floats
    """By pair, of a message without bytes."""

    @classmethod
    def between(cls, machine: Machine, senders: Numbers, receivers: Numbers) -> PairLinks:
        """The links from each sender to each receiver.

        >>> machine = Machine.preset("piz-daint", nodes=3)
        >>> links = PairLinks.between(machine, np.array([0, 0]), np.array([1, 2]))
        >>> [links.names(number) for number in links.wires[0]]
        ['node 0: 0>', 'node 0: 1>', 'node 1: 1<', 'node 1: 0<']
        """
        if len(senders) <= _FEW:
            return _kept_links(machine, senders.tobytes(), receivers.tobytes())
        return _Ways(machine).between(senders, receivers)

    def seconds(self, num_bytes: Floats) -> float:
        """How long messages take that start together, one between each pair: as the busiest link."""
        if not len(num_bytes):
            return 0.0
        pair, hop = np.nonzero(self.wires >= 0)
        loads = np.bincount(self.wires[pair, hop], weights=num_bytes[pair], minlength=len(self.rates)) / self.rates
        return float(max(loads.max(initial=0.0), (num_bytes / self.own_rate).max()) + self.latency.max())

    def wire_seconds(self, num_bytes: Floats) -> dict[str, float]:
        """For how long messages take up each shared link, in the order in which they come to it."""
        pair, hop = np.nonzero(self.wires >= 0)
        place = (np.cumsum(self.wires >= 0, axis=1) - 1)[pair, hop]
        keys, found = np.unique(place * len(self.rates) + self.wires[pair, hop], return_inverse=True)
        numbers = keys % max(len(self.rates), 1)
        taken = np.bincount(found, weights=num_bytes[pair], minlength=len(keys)) / self.rates[numbers]
        places = (keys // max(len(self.rates), 1)).tolist()
        totals: dict[str, float] = {}
        for _, name, seconds in sorted(zip(places, map(self.names, numbers.tolist()), taken.tolist(), strict=True)):
            totals[name] = totals.get(name, 0.0) + seconds
        return totals


@lru_cache(maxsize=1024)
def _kept_links(machine: Machine, senders: bytes, receivers: bytes) -> PairLinks:
    return _Ways(machine).between(*(np.frombuffer(ends, dtype=np.int64) for ends in (senders, receivers)))


class _Leg(NamedTuple):
    """A part of all ways: which have it, at which node it is, of which kind, and from where to where; -1 for none."""

    route: Callable[[int, int, int], Route]
    has: NDArray[np.bool_]
    node: Numbers
    kind: Numbers
    start: Numbers
    end: Numbers


class _Links(NamedTuple):
    """Of a leg of all ways, or of several with the same ends: shared links by number at their node, and the others."""

    wires: Numbers
    own_rate: Floats
    latency: Floats


class _Ways:
    """Ways on one machine; links are numbered by where they are in a node, the same in all nodes of a kind."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._topology = machine, machine.topology
        self._rate = rate_between(machine.device)
        self._numbers: dict[tuple[int, str], int] = {}
        """Of a link by the kind of its node, -1 between nodes."""
        self._rates: list[float] = []

    def between(self, senders: Numbers, receivers: Numbers) -> PairLinks:
        """The links from each sender to each receiver."""
        legs = list(self._legs(senders, receivers))
        found = [self._links(leg) for leg in legs]
        count = max(len(self._rates), 1)
        placed = [
            np.where(links.wires >= 0, (leg.node[:, None] + 1) * count + links.wires, -1)
            for leg, links in zip(legs, found, strict=True)
        ]
        wires = np.concatenate(placed, axis=1)
        used = np.zeros(int(wires.max(initial=-1)) + 2, dtype=bool)
        used[wires.reshape(-1)] = True
        numbers = np.cumsum(used) - 1
        numbers[-1] = -1  # of none
        nodes, local = np.divmod(np.flatnonzero(used[:-1]), count)
        texts = {number: wire for (_, wire), number in self._numbers.items()}

        def name(number: int) -> str:
            node = int(nodes[number]) - 1
            return f"{NETWORK if node < 0 else f'node {node}'}: {texts[int(local[number])]}"

        own = np.minimum.reduce([links.own_rate for links in found])
        latency = SOFTWARE_SECONDS[self._machine.device] + np.sum([links.latency for links in found], axis=0)
        return PairLinks(numbers[wires], np.array(self._rates, dtype=np.float64)[local], name, own, latency)

    def _legs(self, senders: Numbers, receivers: Numbers) -> Sequence[_Leg]:
        ranks, place = np.unique(np.concatenate([senders, receivers]), return_inverse=True)
        locations = np.array([self._machine.location(rank) for rank in ranks.tolist()], dtype=np.int64).reshape(-1, 2)
        kinds = np.array([self._topology.kind_of(node) for node in locations[:, 0].tolist()], dtype=np.int64)
        one, other = place[: len(senders)], place[len(senders) :]
        (node, device), (to_node, to_device) = locations[one].T, locations[other].T
        inside, none, known = node == to_node, np.full_like(node, -1), self._topology
        legs = [
            _Leg(lambda kind, start, _: known.leaving(kind, start), ~inside, node, kinds[one], device, none),
            _Leg(lambda kind, _, end: known.entering(kind, end), ~inside, to_node, kinds[other], none, to_device),
            _Leg(known.inside, inside, node, kinds[one], device, to_device),
        ]
        if not known.is_flat:
            legs.insert(1, _Leg(lambda _, start, end: known.between(start, end), ~inside, none, none, node, to_node))
        return legs

    def _links(self, leg: _Leg) -> _Links:
        """Each different way once, then those of all pairs."""
        size = 2 + int(max(leg.start.max(initial=0), leg.end.max(initial=0)))
        keys = np.where(leg.has, ((leg.kind + 1) * size + leg.start + 1) * size + leg.end + 1, -1)
        different, place = np.unique(keys, return_inverse=True)
        routes = []
        for key in different.tolist():
            kind, ends = divmod(key, size * size)
            start, end = divmod(ends, size)
            routes.append((kind - 1, leg.route(kind - 1, start - 1, end - 1) if key >= 0 else ()))
        rows = [[self._number(kind, link.wire, self._rate(link)) for link in route if link.shared]
                for kind, route in routes]  # fmt: skip
        longest = max(map(len, rows), default=0)
        wires = np.array([row + [-1] * (longest - len(row)) for row in rows], dtype=np.int64)
        own = [min((self._rate(link) for link in route if not link.shared), default=np.inf) for _, route in routes]
        latency = [sum(link.latency for link in route) for _, route in routes]
        own_rate, seconds = (np.array(column, dtype=np.float64)[place] for column in (own, latency))
        return _Links(wires.reshape(len(rows), longest)[place], own_rate, seconds)

    def _number(self, kind: int, wire: str, rate: float) -> int:
        number = self._numbers.setdefault((kind, wire), len(self._rates))
        if number == len(self._rates):
            self._rates.append(rate)
        return number
