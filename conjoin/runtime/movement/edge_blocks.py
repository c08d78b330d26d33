"""Operators over edges that lie on the host: some vertices at a time with their edges, in the order of the graph.

Outputs are made by blocks of targets, gradients by blocks of sources. What is said of vertices is on the device, whole.
Attention keeps of its softmax one number for every vertex and head, the logarithm of the sum; the share of an edge is
then made of that and of its score again. With d = g·x the product of what comes back to an edge's target and what its
source has, the gradient of its score is share * (d - g·out): the sum of share * d over a target's edges is g·out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.comm import EDGE_BYTES, FIRST_BYTES, cut_blocks, score_bytes
from conjoin.ir import Range
from conjoin.ops import (
    Edges,
    Order,
    dots_along,
    first_order,
    greatest_along,
    rows_of,
    shares_along,
    sum_along,
)
from conjoin.runtime.movement.host_blocks import Pinned, each_block
from conjoin.runtime.movement.host_copies import Engines

OfBlock = Callable[[slice, Order, Tensor | None], None]
"""What is done with some rows and their edges, which are here, and the edges' weights."""


class EdgeBlocks:
    """Goes along edges of graphs on the host, block by block."""

    def __init__(self, engines: Engines) -> None:
        self._engines, self._pinned = engines, Pinned(engines)

    def each(self, order: Order, run: OfBlock, weight: Tensor | None = None, made_bytes: int = 0) -> None:
        """Do something with the edges of each row; on the way so many bytes are made for every edge."""
        ordered = None if weight is None else self._pinned.of(order.of_edges(weight, stay=True))
        others, before_row = self._pinned.of(order.others), self._pinned.of(order.first)
        first = order.first.numpy()
        edge_bytes = EDGE_BYTES + made_bytes + (0 if ordered is None else ordered[:1].nbytes)
        before = first * edge_bytes + torch.arange(len(first)).numpy() * FIRST_BYTES

        def cut(span: Range) -> list[Tensor]:
            start, stop = span
            some = slice(int(first[start]), int(first[stop]))
            return [before_row[start : stop + 1], others[some], *([] if ordered is None else [ordered[some]])]

        def run_block(span: Range, here: list[Tensor]) -> None:
            rows, ends, *weights = here
            run(slice(*span), Order(rows - rows[:1], ends, None), weights[0] if weights else None)

        each_block(self._engines, cut_blocks(before), cut, run_block)

    def summed(self, edges: Edges, x: Tensor, weight: Tensor | None) -> Tensor:
        made: Tensor = _Sums.apply(x, self, edges, weight)  # type: ignore[no-untyped-call]
        return made

    def greatest(self, edges: Edges, x: Tensor) -> Tensor:
        made: Tensor = _Greatest.apply(x, self, edges)  # type: ignore[no-untyped-call]
        return made

    def attended(self, edges: Edges, x: Tensor, by_source: Tensor, by_target: Tensor, slope: float) -> Tensor:
        made: Tensor = _Attention.apply(x, by_source, by_target, self, edges, slope)  # type: ignore[no-untyped-call]
        return made


class _Sums(torch.autograd.Function):
    """Weighted sums along edges; the gradient adds up the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: EdgeBlocks, edges: Edges, weight: Tensor | None) -> Tensor:
        ctx.blocks, ctx.edges = blocks, edges
        ctx.save_for_backward(weight)
        return _summed(blocks, x, edges.by_target, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return _summed(ctx.blocks, gradient.contiguous(), ctx.edges.by_source, weight), None, None, None


def _summed(blocks: EdgeBlocks, x: Tensor, order: Order, weight: Tensor | None) -> Tensor:
    made = x.new_empty(order.first.shape[0] - 1, *x.shape[1:])

    def run(rows: slice, block: Order, weights: Tensor | None) -> None:
        made[rows] = sum_along(x, block, weights)

    blocks.each(order, run, weight)
    return made


class _Greatest(torch.autograd.Function):
    """The greatest along edges; equals share a gradient alike, also with the 0 that it is written over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: EdgeBlocks, edges: Edges) -> Tensor:
        x, order = x.contiguous(), edges.by_target
        greatest, ties = (x.new_empty(order.first.shape[0] - 1, *x.shape[1:]) for _ in range(2))

        def run(rows: slice, block: Order, _: Tensor | None) -> None:
            greatest[rows], ties[rows] = greatest_along(x, block)

        blocks.each(order, run)
        ctx.save_for_backward(x, greatest, ties + (greatest == 0))
        ctx.blocks, ctx.edges = blocks, edges
        return greatest

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, greatest, ties = ctx.saved_tensors
        shared, made = (gradient / ties.clamp(min=1)).contiguous(), torch.empty_like(x)

        def run(rows: slice, block: Order, _: Tensor | None) -> None:
            made[rows] = shares_along(x[rows], block, greatest, shared)

        ctx.blocks.each(ctx.edges.by_source, run)
        return made, None, None


class _Attention(torch.autograd.Function):
    """Rows added up by the softmax of leaky scores of both ends."""

    @staticmethod
    def forward(  # noqa: PLR0913 – as the operator has them
        ctx: Any, x: Tensor, ours: Tensor, theirs: Tensor, blocks: EdgeBlocks, edges: Edges, slope: float
    ) -> Tensor:
        x, order = x.contiguous(), edges.by_target
        made = x.new_empty(order.first.shape[0] - 1, *x.shape[1:])
        logs = theirs.new_zeros(theirs.shape)

        def run(rows: slice, block: Order, _: Tensor | None) -> None:
            at, here = rows_of(block), theirs[rows]
            scores = functional.leaky_relu(ours.index_select(0, block.others) + here.index_select(0, at), slope)
            spread, none = at.view(-1, 1).expand_as(scores), torch.zeros_like(here)
            peaks = none.scatter_reduce(0, spread, scores, "amax", include_self=False)
            totals = none.index_add(0, at, (scores - peaks.index_select(0, at)).exp())
            logs[rows] = peaks + totals.log()  # of no edges: read by none
            made[rows] = sum_along(x, block, (scores - logs[rows].index_select(0, at)).exp())

        blocks.each(order, run, made_bytes=score_bytes(ours.shape[1], ours.itemsize))
        ctx.save_for_backward(x, ours, theirs, made, logs)
        ctx.blocks, ctx.edges, ctx.slope = blocks, edges, slope
        return made

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, ours, theirs, made, logs = ctx.saved_tensors
        gradient, heads, slope = gradient.contiguous(), ours.shape[1], ctx.slope
        whole = (gradient * made).reshape(made.shape[0], heads, -1).sum(-1)
        of_x, of_ours, of_theirs = torch.empty_like(x), torch.empty_like(ours), torch.zeros_like(theirs)

        def run(rows: slice, block: Order, _: Tensor | None) -> None:
            at, others = rows_of(block), block.others
            raw = ours[rows].index_select(0, at) + theirs.index_select(0, others)
            shares = (functional.leaky_relu(raw, slope) - logs.index_select(0, others)).exp()
            of_x[rows] = sum_along(gradient, block, shares)
            dots = dots_along(gradient, block, x[rows], heads) - whole.index_select(0, others)
            of_scores = torch.where(raw > 0, shares * dots, shares * dots * slope)
            of_ours[rows] = torch.zeros_like(ours[rows]).index_add(0, at, of_scores)
            of_theirs.index_add_(0, others, of_scores)

        ctx.blocks.each(ctx.edges.by_source, run, made_bytes=score_bytes(ours.shape[1], ours.itemsize))
        return of_x, of_ours, of_theirs, None, None, None
