"""Edges that are split with the vertices: those that lie elsewhere than their targets go there, once for each graph.

No rank knows all edges. When a graph is first seen, each sends the edges that come to the vertices of others there, and
asks for the rows that its own then read. Whether it is the first time, all ranks decide together: two numbers go around
before every call, for one rank's edges may be the same while another's are not.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import Halo
from conjoin.errors import UsageError
from conjoin.ir import Range
from conjoin.ops import (
    Edges,
    EdgeWindow,
    LastMade,
    are_equal,
    check_ends,
    first_order,
    identity,
    tells_of_writes,
    with_loops,
)
from conjoin.runtime.program.functions import Function
from conjoin.runtime.ranks.communicator import Communicator, Work

_KEPT = 4
"""Graphs that are remembered: those of training and of evaluation, and of two more."""


@dataclass(frozen=True, slots=True)
class Route:
    """Which rows go to the other ranks, one rank after the other, and how many come from each."""

    rows: Tensor
    sent: Sequence[int]
    received: Sequence[int]


@dataclass(frozen=True)
class Part:
    """What a rank has to do with a graph of which it has a part."""

    ends: tuple[Tensor, Tensor]
    """Of the edges that come to its vertices, from its own rows and then from those that it got."""
    sizes: tuple[int, int, int]
    """How many rows are its own, how many it then has, and how many vertices."""
    halo: Route
    """Of rows of vertices."""
    weights: Route | None
    """Of the edges' weights; None where every edge lies with its target."""
    kept: Tensor | None = None
    """Which of the edges that are here they are; None where that are all of them."""
    _last: LastMade = field(default_factory=LastMade)

    def kept_of(self, weight: Tensor) -> Tensor:
        """The weights of its edges; made once while they stay the same."""
        if self.kept is None:
            return weight
        make = partial(weight.index_select, 0, self.kept)
        return self._last.find(weight, make) if tells_of_writes(weight) and not weight.requires_grad else make()

    @cached_property
    @torch.inference_mode(False)
    def edges(self) -> Edges:
        """All of them."""
        return self._from(0, self.sizes[1])

    @cached_property
    @torch.inference_mode(False)
    def with_loops(self) -> Edges:
        """The same, with an edge from each vertex to itself instead of those that it has."""
        own, count, vertices = self.sizes
        assert own == vertices, "rows are read of the vertices for which they are made"
        window = EdgeWindow(0, count, 0, vertices, count, vertices)
        return Edges(*with_loops(*self.ends, window), window)

    @cached_property
    @torch.inference_mode(False)
    def from_own(self) -> Edges:
        """Those from its own rows."""
        return self._from(0, self.sizes[0])

    @cached_property
    @torch.inference_mode(False)
    def from_others(self) -> Edges:
        """Those from the rows that it got, which are counted from 0 here."""
        return self._from(self.sizes[0], self.sizes[1])

    @cached_property
    @torch.inference_mode(False)
    def num_incoming(self) -> Tensor:
        """How many edges come to each vertex, at least 1."""
        return torch.bincount(self.ends[1], minlength=self.sizes[2]).clamp_(min=1)

    def _from(self, first: int, last: int) -> Edges:
        _, count, vertices = self.sizes
        return Edges(*self.ends, EdgeWindow(first, last - first, 0, vertices, count, vertices))


@dataclass(frozen=True, slots=True)
class OnTheWay:
    """Rows that are being sent, which are held as long, and where others arrive."""

    work: Work
    rows: Tensor
    arrived: Tensor

    def wait(self) -> Tensor:
        """What arrived."""
        self.work.wait()
        return self.arrived


class RowExchange:
    """Rows between the ranks of a group."""

    def __init__(self, communicator: Communicator, axes: tuple[str, ...]) -> None:
        communicator.prepare(axes)
        self._communicator, self._axes = communicator, axes

    def send(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """So many rows to each member, so many from each."""
        return self.start(rows, sent, received).wait().to(rows.device)

    def start(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> OnTheWay:
        """The same, to be waited for later; what lies on the host goes by the device."""
        width, rows = prod(rows.shape[1:]), self.on_device(rows).contiguous()
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        sizes = [width * count for count in received], [width * count for count in sent]
        work = self._communicator.all_to_all(arrived.view(-1), rows.view(-1), sizes, self._axes)
        return OnTheWay(work, rows, arrived)

    def route(self, rows: Tensor, sent: Sequence[int]) -> Route:
        """The same, with what the others say that they send."""
        counts = self.send(torch.tensor(sent, device=rows.device), [1] * len(sent), [1] * len(sent))
        return Route(rows, sent, counts.tolist())

    def greatest(self, *numbers: int) -> list[int]:
        """Of what every member has of each."""
        told = torch.tensor(numbers, device=self._communicator.device)
        self._communicator.all_reduce(told, self._axes, largest=True).wait()
        return told.tolist()

    def on_device(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._communicator.device)

    @property
    def bytes_sent(self) -> int:
        return self._communicator.bytes_sent

    @bytes_sent.setter
    def bytes_sent(self, count: int) -> None:
        self._communicator.bytes_sent = count


@dataclass(slots=True)
class _Seen:
    ends: tuple[Tensor, Tensor]
    marks: tuple[object, object]
    part: Part

    def says(self, ends: tuple[Tensor, Tensor]) -> bool:
        if tuple(map(identity, self.ends)) != self.marks:  # written to since
            return False
        same = all(map(tells_of_writes, ends)) and tuple(map(identity, ends)) == self.marks
        return same or all(map(are_equal, self.ends, ends))


class DealtEdges:
    """The parts of the graphs that a rank saw last, of which it was given a piece of the edges."""

    def __init__(self, halo: Halo, exchange: RowExchange) -> None:
        self._halo, self._exchange = halo, exchange
        self._seen: OrderedDict[int, _Seen] = OrderedDict()
        self._last = 0

    def find(self, source: Tensor, target: Tensor, vertices: int) -> Part:
        """The part that was made of these edges, on all ranks, or is made now."""
        ends = source, target
        number = next((number for number in reversed(self._seen) if self._seen[number].says(ends)), 0)
        before = self._exchange.bytes_sent
        greatest, least = self._exchange.greatest(number, -number)
        if number and greatest == -least:
            part = self._seen[number].part
        else:
            with torch.inference_mode(False), torch.no_grad():
                part = self._add(source, target, vertices)
        self._exchange.bytes_sent = before  # what is counted is what the plan says of every step
        return part

    def _add(self, source: Tensor, target: Tensor, vertices: int) -> Part:
        limits = max(stop for _, stop in self._halo.read), vertices
        part = part_of_piece(source, target, self._halo, self._exchange, limits)
        held = (source, target) if all(map(tells_of_writes, (source, target))) else (source.clone(), target.clone())
        self._last += 1
        self._seen[self._last] = _Seen(held, (identity(held[0]), identity(held[1])), part)
        while len(self._seen) > _KEPT:
            self._seen.popitem(last=False)
        return part


def part_of_piece(source: Tensor, target: Tensor, halo: Halo, exchange: RowExchange, limits: tuple[int, int]) -> Part:
    """The part of a rank, from its piece of the edges: all ranks of the group call it together."""
    wrong = _is_outside(source, limits[0]) or _is_outside(target, limits[1])
    if exchange.greatest(int(wrong))[0]:  # told by every rank: those whose edges are right would wait for ever
        check_ends(source, "source", limits[0])
        check_ends(target, "target", limits[1])
        raise UsageError(
            f"A graph was given of which every rank has a piece of the edges. Another rank has some that come from or "
            f"go to other vertices than 0 to {limits[0] - 1}, and tells which. Correct the edges."
        )
    order, sent = _by_owner(target, halo.made)
    moved = exchange.route(order, sent)
    is_moved = exchange.greatest(int(sum(sent) != sent[halo.own]))[0]
    if is_moved:
        source, target = (exchange.send(ends[order], moved.sent, moved.received) for ends in (source, target))
    (start, stop), (first, last) = halo.read[halo.own], halo.made[halo.own]
    wanted = torch.unique(source[(source < start) | (source >= stop)])
    asked = _counts(wanted, halo.read)
    answer = exchange.route(wanted, asked)
    rows = exchange.send(wanted, asked, answer.received) - start
    places = torch.zeros(limits[0], dtype=torch.int64, device=source.device)
    places[start:stop] = torch.arange(stop - start, device=source.device)
    count = stop - start + len(wanted)
    places[wanted] = torch.arange(stop - start, count, device=source.device)
    sizes = stop - start, count, last - first
    route = Route(exchange.on_device(rows), answer.received, asked)
    return Part((places[source], target - first), sizes, route, moved if is_moved else None)


def _is_outside(ends: Tensor, limit: int) -> bool:
    return bool(ends.numel()) and bool((ends.amin() < 0) | (ends.amax() >= limit))


def _by_owner(vertices: Tensor, owned: Sequence[Range]) -> tuple[Tensor, list[int]]:
    """The order in which those of each owner stand together, and how many those are."""
    stops = torch.tensor([stop for _, stop in owned], device=vertices.device)
    owners = torch.searchsorted(stops, vertices.contiguous(), right=True)
    return owners.sort(stable=True).indices, torch.bincount(owners, minlength=len(owned)).tolist()


def _counts(vertices: Tensor, owned: Sequence[Range]) -> list[int]:
    stops = torch.tensor([stop for _, stop in owned], device=vertices.device)
    found: list[int] = torch.bincount(torch.searchsorted(stops, vertices, right=True), minlength=len(owned)).tolist()
    return found


class Sent(torch.autograd.Function):
    """Rows along a route; their gradients come back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, send: Function) -> Tensor:
        ctx.way, ctx.num_rows = (route, send), x.shape[0]
        arrived: Tensor = send(x.index_select(0, route.rows), route.sent, route.received)
        return arrived

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        route, send = ctx.way
        arrived = send(gradients[0], route.received, route.sent)
        found = arrived.new_zeros(ctx.num_rows, *arrived.shape[1:])
        return found.index_add_(0, route.rows, arrived), None, None
