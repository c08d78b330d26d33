"""Rows of neighbours to the ranks whose edges read them, each once, and gradients back to the ranks that have the rows.

All ranks know all edges, so that each sees for itself what the others read of its rows, and nobody asks. What goes
where is found once for each graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import Halo
from conjoin.ir import Range
from conjoin.ops import GRAPH_ATTENTION, Edges, EdgeWindow, aggregate_over, attend_over, check_ends, of_graph
from conjoin.runtime.program.functions import Function
from conjoin.runtime.ranks.communicator import Communicator, uncompiled


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank has to do with a graph of which it has a part."""

    edges: Edges
    """Those that come to its vertices, from its own rows and then from those that it got."""
    kept: Tensor
    """Which of all edges they are."""
    rows: Tensor
    """Which of its rows it sends, to one member after the other."""
    sent: Sequence[int]
    received: Sequence[int]


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
    return Part(Edges(places[read], target[kept] - first, window), kept, torch.cat(rows), sent, received)


def _distinct(values: Tensor) -> Tensor:
    found: Tensor = torch.unique(values)
    return found


def _inside(values: Tensor, span: Range) -> Tensor:
    return (values >= span[0]) & (values < span[1])


class _Brought(torch.autograd.Function):
    """The rows that others have, behind those here; their gradients go back and are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part, send: Function) -> Tensor:
        ctx.way, ctx.num_rows = (part, send), x.shape[0]
        arrived: Tensor = send(x.index_select(0, part.rows), part.sent, part.received)
        return torch.cat((x, arrived))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        part, send = ctx.way
        own, others = gradients[0][: ctx.num_rows], gradients[0][ctx.num_rows :]
        arrived = send(others, part.received, part.sent)
        return own.clone().index_add_(0, part.rows, arrived), None, None


def carry_halo(op: str, halo: Halo, communicator: Communicator) -> Function:
    """An operator over edges as a function of this rank's rows and of all edges."""
    communicator.prepare(halo.axes)

    def send(rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """So many rows to each member, so many from each."""
        width = rows[:1].numel() if len(rows) else rows.new_empty(1, *rows.shape[1:]).numel()
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        sizes = [width * count for count in received], [width * count for count in sent]
        communicator.all_to_all(arrived.view(-1), rows.contiguous().view(-1), sizes, halo.axes).wait()
        return arrived

    def find_part(source: Tensor, target: Tensor, vertices: int) -> Part:
        limits = max(stop for _, stop in halo.read), vertices
        return of_graph(source, target, halo, partial(part_of, halo=halo, limits=limits))

    def brought(x: Tensor, part: Part) -> Tensor:
        rows: Tensor = _Brought.apply(x, part, send)  # type: ignore[no-untyped-call]
        return rows

    @uncompiled
    def aggregated(x: Tensor, source: Tensor, target: Tensor, weight: Tensor | None, *rest: Any) -> Tensor:
        part = find_part(source, target, rest[0])
        here = None if weight is None else weight.index_select(0, part.kept)
        return aggregate_over(part.edges, brought(x, part), here, rest[1])

    @uncompiled
    def attended(x: Tensor, by_source: Tensor, by_target: Tensor, source: Tensor, target: Tensor, *rest: Any) -> Tensor:
        part = find_part(source, target, rest[0])
        return attend_over(part.edges, brought(x, part), brought(by_source, part), by_target, rest[1])

    return attended if op == GRAPH_ATTENTION else aggregated
