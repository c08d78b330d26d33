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
from conjoin.ops import GRAPH_ATTENTION, Edges, EdgeWindow, aggregate_over, attend_over, check_ends, of_graph
from conjoin.runtime.movement.dealt_edges import DealtEdges, Exchange, Part, Route, Sent
from conjoin.runtime.movement.layer_clock import clock_now, paused
from conjoin.runtime.program.functions import Function
from conjoin.runtime.ranks.communicator import Communicator, uncompiled


def part_of(source: Tensor, target: Tensor, halo: Halo, limits: tuple[int, int]) -> Part:
    """The part of a rank, from all edges and how many vertices they may come from and go to."""
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
    window = EdgeWindow(0, count, 0, last - first, count, last - first)
    edges = Edges(places[read], target[kept] - first, window)
    return Part(edges, Route(torch.cat(rows), sent, received), None, kept)


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
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        route, send = ctx.way
        own, others = gradients[0][: ctx.num_rows], gradients[0][ctx.num_rows :]
        with paused(ctx.clock):
            arrived = send(others, route.received, route.sent)
        if ctx.clock is not None:
            ctx.clock.leave(ctx.layer)
        return own.clone().index_add_(0, route.rows, arrived), None, None


class HaloCarrier:
    """Operators over edges as functions of a rank's rows, and of all edges or of a piece of them."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._dealt: dict[Halo, DealtEdges] = {}
        """Layers share what was made of a graph."""

    def carry(self, op: str, halo: Halo) -> Function:
        """An operator whose vertices are split."""
        exchange = Exchange(self._communicator, halo.axes)
        dealt = self._dealt.setdefault(halo, DealtEdges(halo, exchange)) if halo.is_dealt else None

        def find_part(source: Tensor, target: Tensor, vertices: int) -> Part:
            if dealt is not None:
                return dealt.find(source, target, vertices)
            limits = max(stop for _, stop in halo.read), vertices
            return of_graph(source, target, halo, partial(part_of, halo=halo, limits=limits))

        def begun(x: Tensor) -> None:
            clock = clock_now()
            if clock is not None:
                clock.enter(prod(x.shape[1:]))

        def brought(x: Tensor, part: Part) -> Tensor:
            rows: Tensor = _Brought.apply(x, part.halo, exchange.send)  # type: ignore[no-untyped-call]
            return rows

        def weights(weight: Tensor | None, part: Part) -> Tensor | None:
            if weight is None or part.weights is None:
                return weight if weight is None or part.kept is None else weight.index_select(0, part.kept)
            arrived: Tensor = Sent.apply(weight, part.weights, exchange.send)  # type: ignore[no-untyped-call]
            return arrived

        @uncompiled
        def aggregated(x: Tensor, source: Tensor, target: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
            begun(x)
            part = find_part(source, target, rest[0])
            return aggregate_over(part.edges, brought(x, part), weights(weight, part), rest[1])

        @uncompiled
        def attended(x: Tensor, ours: Tensor, theirs: Tensor, source: Tensor, target: Tensor, *rest: Any) -> Tensor:
            begun(x)
            part = find_part(source, target, rest[0])
            return attend_over(part.edges, brought(x, part), brought(ours, part), theirs, rest[1])

        return attended if op == GRAPH_ATTENTION else aggregated
