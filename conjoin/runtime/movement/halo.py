"""Rows of neighbours to the ranks whose edges read them, each once, and gradients back to the ranks that have the rows.

Where all ranks know all edges each sees for itself what the others read of its rows, and nobody asks; where each has a
piece of them they tell each other (`dealt_edges.py`). What goes where is found once for each graph.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import Halo
from conjoin.ir import Range
from conjoin.ops import (
    GRAPH_ATTENTION,
    ON_DEVICE,
    AlongEdges,
    aggregate_over,
    bind_args,
    check_ends,
    column_like,
    edges_of,
    first_order,
    of_graph,
    signature,
    window_of,
)
from conjoin.runtime.movement.dealt_edges import DealtEdges, OnTheWay, Part, Route, RowExchange, Sent
from conjoin.runtime.movement.layer_clock import clock_now, paused
from conjoin.runtime.program.functions import Function
from conjoin.runtime.ranks.communicator import Communicator, uncompiled


def part_of(source: Tensor, target: Tensor, halo: Halo, limits: tuple[int, int], device: torch.device) -> Part:
    """The part of a rank, from all edges and how many vertices they may come from and go to; rows are on a device."""
    check_ends(source, "source", limits[0])
    check_ends(target, "target", limits[1])
    (start, stop), own = halo.read[halo.own], halo.own
    kept = _inside(target, halo.made[own]).nonzero().flatten()
    read = source[kept]
    places = torch.zeros(limits[0], dtype=torch.int64, device=source.device)
    places[start:stop] = torch.arange(stop - start, device=source.device)
    received, count, sent, rows = [], stop - start, [], []
    for member, (theirs, made) in enumerate(zip(halo.read, halo.made, strict=True)):
        wanted = _distinct(read[_inside(read, theirs)]) if member != own else read[:0]
        places[wanted] = torch.arange(count, count + len(wanted), device=source.device)
        count += len(wanted)
        asking = _inside(target, made) & _inside(source, (start, stop))
        asked = _distinct(source[asking]) if member != own else read[:0]
        received.append(len(wanted))
        sent.append(len(asked))
        rows.append(asked - start)
    first, last = halo.made[own]
    sizes = stop - start, count, last - first
    route = Route(torch.cat(rows).to(device), sent, received)
    return Part((places[read], target[kept] - first), sizes, route, None, kept)


def _distinct(values: Tensor) -> Tensor:
    found: Tensor = torch.unique(values)
    return found


def _inside(values: Tensor, span: Range) -> Tensor:
    return (values >= span[0]) & (values < span[1])


class _Brought(torch.autograd.Function):
    """The rows that others have, behind those here; their gradients go back and are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, send: Function) -> Tensor:
        ctx.way, ctx.num_rows, ctx.clock = (route, send), x.shape[0], clock_now()
        ctx.layer = None if ctx.clock is None else ctx.clock.layer
        rows = x.index_select(0, route.rows)
        with paused(ctx.clock):
            arrived: Tensor = send(rows, route.sent, route.received)
        return torch.cat((x, arrived))

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        route, send = ctx.way
        own, others = gradients[0][: ctx.num_rows], gradients[0][ctx.num_rows :]
        with paused(ctx.clock):
            arrived = send(others, route.received, route.sent)
        if ctx.clock is not None:
            ctx.clock.leave(ctx.layer)
        return own.clone().index_add_(0, route.rows, arrived), None, None


class _Passage:
    """The rows of one call on their way to others, and then their gradients on the way back."""

    def __init__(self, route: Route, exchange: RowExchange) -> None:
        self.route, self.exchange, self.clock = route, exchange, clock_now()
        self.layer = None if self.clock is None else self.clock.layer
        self.sent: OnTheWay | None = None

    def wait(self) -> Tensor:
        assert self.sent is not None, "it is begun before"
        with paused(self.clock):
            arrived = self.sent.wait()
        self.sent = None
        return arrived


class _Begun(torch.autograd.Function):
    """Rows begin to be sent; in the backward pass their gradients have arrived when all else is done."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, passage: _Passage) -> Tensor:
        route, ctx.passage, ctx.shape = passage.route, passage, x.shape
        passage.sent = passage.exchange.start(x.index_select(0, route.rows), route.sent, route.received)
        return passage.sent.arrived

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        passage: _Passage = ctx.passage
        arrived = passage.wait()
        if passage.clock is not None and passage.layer is not None:
            passage.clock.leave(passage.layer)
        return arrived.new_zeros(ctx.shape).index_add_(0, passage.route.rows, arrived), None


class _Arrived(torch.autograd.Function):
    """Rows have come; in the backward pass their gradients begin to be sent."""

    @staticmethod
    def forward(ctx: Any, arriving: Tensor, passage: _Passage) -> Tensor:
        ctx.passage = passage
        return passage.wait().view_as(arriving)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        passage: _Passage = ctx.passage
        passage.sent = passage.exchange.start(gradients[0], passage.route.received, passage.route.sent)
        return gradients[0], None


def _added_meanwhile(
    part: Part, x: Tensor, weight: Tensor | None, exchange: RowExchange, along: AlongEdges
) -> Tensor:
    """Weighted sums over edges, first those from rows that are here, while the others come.

    The backward pass goes the other way round: gradients of the others' rows are sent first, for autograd goes back
    through what was computed last.
    """
    passage = _Passage(part.halo, exchange)
    arriving: Tensor = _Begun.apply(x, passage)  # type: ignore[no-untyped-call]
    own = aggregate_over(part.from_own, x, weight, "sum", along)
    others: Tensor = _Arrived.apply(arriving, passage)  # type: ignore[no-untyped-call]
    return own + aggregate_over(part.from_others, others, weight, "sum", along)


def _note_layer(x: Tensor) -> None:
    """Another layer begins, if a step is being timed."""
    clock = clock_now()
    if clock is not None:
        clock.enter(prod(x.shape[1:]))


def _bring(x: Tensor, part: Part, exchange: RowExchange) -> Tensor:
    """Rows that are here, and those that others have behind them."""
    rows: Tensor = _Brought.apply(x, part.halo, exchange.send)  # type: ignore[no-untyped-call]
    return rows


def _weights_here(weight: Tensor | None, part: Part, exchange: RowExchange) -> Tensor | None:
    """Those of the edges that come to this rank's vertices."""
    if weight is None:
        return None
    if part.weights is None:
        return part.kept_of(weight)
    arrived: Tensor = Sent.apply(weight, part.weights, exchange.send)  # type: ignore[no-untyped-call]
    return arrived


class _Given:
    """What a call of an operator over edges was given, by the names of its parameters."""

    def __init__(self, op: str, args: tuple[Any, ...]) -> None:
        names = (parameter.name for parameter in signature(op).parameters)
        self._given = dict(zip(names, bind_args(op, args, {}), strict=True))

    def __getitem__(self, name: str) -> Any:
        return self._given[name]

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        return self["source"], self["target"]

    @property
    def loops(self) -> bool:
        """Whether each vertex has an edge to itself instead of those that it has."""
        return bool(self._given.get("loops", False))


def along_edges(op: str, along: AlongEdges) -> Function:
    """An operator over edges of which all are here that it reads, as a function."""

    @uncompiled
    def run(*args: Any) -> Tensor:
        given = _Given(op, args)
        x = given["x"]
        edges = edges_of(*given.ends, window_of(x, given["vertices"], given["window"]), loops=given.loops)
        if op == GRAPH_ATTENTION:
            return along.attended(edges, x, given["by_source"], given["by_target"], given["slope"])
        return aggregate_over(edges, x, given["weight"], given["reduce"], along)

    return run


class HaloCarrier:
    """Operators over edges as functions of a rank's rows, and of all edges or of a piece of them."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._dealt: dict[Halo, DealtEdges] = {}
        """Layers share what was made of a graph."""

    def carry(self, op: str, halo: Halo, along: AlongEdges = ON_DEVICE) -> Function:
        """An operator whose vertices are split; its edges are where the rows are, or on the host."""
        exchange = RowExchange(self._communicator, halo.axes)
        dealt = self._dealt.setdefault(halo, DealtEdges(halo, exchange)) if halo.is_dealt else None

        def find_part(given: _Given) -> Part:
            if dealt is not None:
                return dealt.find(*given.ends, given["vertices"])
            limits, device = (max(stop for _, stop in halo.read), given["vertices"]), given["x"].device
            return of_graph(*given.ends, (halo, device), partial(part_of, halo=halo, limits=limits, device=device))

        @uncompiled
        def aggregated(*args: Any) -> Tensor:
            given = _Given(op, args)
            x, reduce = given["x"], given["reduce"]
            _note_layer(x)
            part = find_part(given)
            if reduce == "max":
                return aggregate_over(part.edges, _bring(x, part, exchange), None, reduce, along)
            made = _added_meanwhile(part, x, _weights_here(given["weight"], part, exchange), exchange, along)
            return made if reduce == "sum" else made / column_like(part.num_incoming, made)

        @uncompiled
        def attended(*args: Any) -> Tensor:
            given = _Given(op, args)
            _note_layer(given["x"])
            part = find_part(given)
            x, ours = (_bring(given[name], part, exchange) for name in ("x", "by_source"))
            edges = part.with_loops if given.loops else part.edges
            return along.attended(edges, x, ours, given["by_target"], given["slope"])

        return attended if op == GRAPH_ATTENTION else aggregated
