"""What vertices of a graph make of their neighbours: sums, means, greatest values, attention.

    aggregate(x, source, target, weight)[v] = sum over edges e with target[e] = v of weight[e] * x[source[e]]
    edge_softmax(scores, target)[e] = exp(scores[e]) / sum over edges f with target[f] = target[e] of exp(scores[f])

Edges are brought into the order of their targets once for each graph, and into that of their sources for the gradients
(`edges.py`), so that no step sorts or transposes. A `window` says that x and the output are parts of all vertices: the
first source, how many there are in all, the first target, and how many: edges of others are left out. `halos` tells how
many rows parts of the graph send each other (`conjoin/comm/halo.py`), and changes nothing here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.errors import UsageError
from conjoin.ops.compiled_kernels import is_compiled_for, new_in_large_pages, run_kernel
from conjoin.ops.edges import Edges, EdgeWindow, Order, are_equal, edges_of, identity, of_graph, tells_of_writes
from conjoin.ops.first_order import first_order

REDUCTIONS = ("sum", "mean", "max")
_FEW = 1 << 16
"""Numbers that are aggregated by torch just as quickly."""
_CHUNK = 1 << 24
"""Numbers that torch gathers at once."""
_MOST_IN_32_BITS = 1 << 31


def aggregate(  # noqa: PLR0913 - a graph is two tensors, and a part of it four numbers
    x: Tensor,
    source: Tensor,
    target: Tensor,
    weight: Tensor | None,
    vertices: int,
    reduce: str,
    window: tuple[int, ...] = (),
    halos: tuple[int, ...] = (),
) -> Tensor:
    """What each vertex makes of the rows of those that have an edge to it; of none it makes 0.

    >>> x, source, target = torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1, 1]), torch.tensor([1, 1, 2])
    >>> [aggregate(x, source, target, None, 3, reduce).flatten().tolist() for reduce in REDUCTIONS]
    [[0.0, 3.0, 2.0], [0.0, 1.5, 2.0], [0.0, 2.0, 2.0]]
    """
    edges = edges_of(source, target, window_of(x, vertices, window))
    return aggregate_over(edges, x, weight, reduce)


def aggregate_once(  # noqa: PLR0913 - as above
    x: Tensor,
    source: Tensor,
    target: Tensor,
    weight: Tensor | None,
    vertices: int,
    reduce: str,
    window: tuple[int, ...] = (),
) -> Tensor:
    """The same of features that stay as they are: made at the first call, and anew only for others.

    They are others where they lie elsewhere, or were written to, or, where writes are not counted, say something else.
    What is to have a gradient is made anew every time.
    """
    if x.is_meta or any(t is not None and t.requires_grad for t in (x, weight)):
        return aggregate(x, source, target, weight, vertices, reduce, window)
    use = "once", window_of(x, vertices, window), reduce
    kept = of_graph(source, target, use, lambda *_: _Kept())
    return kept.find(x, weight, lambda: aggregate(x, source, target, weight, vertices, reduce, window))


class _Kept:
    """What was made last, and of what: while that is held, nothing else lies where it does."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._of: tuple[tuple[Tensor, tuple[object, ...]], ...] = ()
        self._made: tuple[Tensor, int] | None = None
        """With how often it was written to: whoever gets it might."""

    def find(self, x: Tensor, weight: Tensor | None, make: Callable[[], Tensor]) -> Tensor:
        given = (x,) if weight is None else (x, weight)
        with self._lock:
            same = len(given) == len(self._of) and all(map(_is_still, given, self._of))
            if self._made is not None and same and self._made[0]._version == self._made[1]:
                return self._made[0]
            with torch.inference_mode(False), torch.no_grad():  # what is made in a test serves training too
                made = make()
                held = [tensor if tells_of_writes(tensor) else tensor.clone() for tensor in given]
            self._of, self._made = tuple((tensor, identity(tensor)) for tensor in held), (made, made._version)
            return made


def _is_still(tensor: Tensor, held: tuple[Tensor, tuple[object, ...]]) -> bool:
    """Whether a tensor says what one said when it was held."""
    if tells_of_writes(tensor):
        return identity(tensor) == held[1]
    return identity(held[0]) == held[1] and are_equal(tensor, held[0])


def edge_softmax(scores: Tensor, target: Tensor, vertices: int) -> Tensor:
    """Softmax of the scores of edges among those that have the same target.

    >>> edge_softmax(torch.zeros(3), torch.tensor([0, 1, 1]), 2).tolist()
    [1.0, 0.5, 0.5]
    """
    rows = _like_rows(target, scores)
    peaks = scores.new_zeros(vertices, *scores.shape[1:])
    peaks = peaks.scatter_reduce(0, rows, scores.detach(), "amax", include_self=False)
    powers = (scores - peaks.index_select(0, target)).exp()
    totals = powers.new_zeros(peaks.shape).index_add(0, target, powers)
    return powers / totals.index_select(0, target)


def graph_attention(  # noqa: PLR0913 - a graph is two tensors, and a part of it four numbers
    x: Tensor,
    by_source: Tensor,
    by_target: Tensor,
    source: Tensor,
    target: Tensor,
    vertices: int,
    slope: float,
    window: tuple[int, ...] = (),
    halos: tuple[int, ...] = (),
    loops: bool = False,
) -> Tensor:
    """Each vertex adds the rows of its neighbours up, weighted by the softmax of leaky scores made of both ends.

    With `loops` each is its own neighbour, once, whatever edges it has to itself.
    """
    edges = edges_of(source, target, window_of(x, vertices, window), loops=loops)
    return ON_DEVICE.attended(edges, x, by_source, by_target, slope)


class AlongEdges(Protocol):
    """What goes along edges that are in order."""

    def summed(self, edges: Edges, x: Tensor, weight: Tensor | None) -> Tensor:
        """Weighted sums; weights are those of the graph's edges."""

    def greatest(self, edges: Edges, x: Tensor) -> Tensor:
        """The greatest of each number."""

    def attended(self, edges: Edges, x: Tensor, by_source: Tensor, by_target: Tensor, slope: float) -> Tensor:
        """Attention."""


class _OnDevice:
    """Edges that are on the device of the rows."""

    def summed(self, edges: Edges, x: Tensor, weight: Tensor | None) -> Tensor:
        made: Tensor = _Sum.apply(x, weight, edges, False)  # type: ignore[no-untyped-call]
        return made

    def greatest(self, edges: Edges, x: Tensor) -> Tensor:
        made: Tensor = _Greatest.apply(x, edges)  # type: ignore[no-untyped-call]
        return made

    def attended(self, edges: Edges, x: Tensor, by_source: Tensor, by_target: Tensor, slope: float) -> Tensor:
        order, targets = edges.by_target, edges.targets
        sources = order.others.long()
        scores = functional.leaky_relu(by_source.index_select(0, sources) + by_target.index_select(0, targets), slope)
        weight = edge_softmax(scores, targets, edges.window.num_targets)
        made: Tensor = _Sum.apply(x, weight, edges, True)  # type: ignore[no-untyped-call]
        return made


ON_DEVICE: AlongEdges = _OnDevice()


def window_of(x: Tensor, vertices: int, window: tuple[int, ...]) -> EdgeWindow:
    """The rows that are here: all there are, unless a window says which."""
    first_source, sources, first_target, targets = window or (0, x.shape[0], 0, vertices)
    return EdgeWindow(first_source, x.shape[0], first_target, vertices, sources, targets)


def aggregate_over(
    edges: Edges, x: Tensor, weight: Tensor | None, reduce: str, along: AlongEdges = ON_DEVICE
) -> Tensor:
    """The same along edges that are in order; weights are those of the graph's edges."""
    if reduce == "max":
        return along.greatest(edges, x)
    if weight is not None and weight.shape[:1] != (edges.num_edges,):
        raise UsageError(
            f"A graph of {edges.num_edges} edges was given with weights of shape {list(weight.shape)}. Every edge has "
            f"its own, in the order of the edges. Give as many weights as edges."
        )
    total = along.summed(edges, x, weight)
    return total if reduce == "sum" else total / column_like(edges.num_incoming, total)


def column_like(counts: Tensor, rows: Tensor) -> Tensor:
    """A number for every row, by which rows can be divided."""
    return counts.to(rows).view(-1, *(1,) * (rows.dim() - 1))


class _Sum(torch.autograd.Function):
    """Weighted sums over edges; the gradient of x adds up the other way, that of a weight is a product of two rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, edges: Edges, in_order: bool) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.edges, ctx.in_order, ctx.shape = edges, in_order, x.shape
        if weight is not None and not in_order:
            weight = edges.by_target.of_edges(weight, stay=not ctx.needs_input_grad[1])
        return sum_along(x, edges.by_target, weight)

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        edges, found, gradient = ctx.edges, None, gradient.contiguous()
        if ctx.needs_input_grad[0]:
            if weight is not None and ctx.in_order:
                weight = edges.by_target.to_edges(weight, edges.num_edges)
            stay = not ctx.needs_input_grad[1] and not ctx.in_order
            ordered = None if weight is None else edges.by_source.of_edges(weight, stay=stay)
            found = sum_along(gradient, edges.by_source, ordered)
        if not ctx.needs_input_grad[1]:
            return found, None, None, None
        dots = dots_along(x, edges.by_target, gradient, prod(weight.shape[1:]), lambda: edges.targets)
        dots = dots if ctx.in_order else edges.by_target.to_edges(dots, edges.num_edges)
        return found, dots.view(-1, *weight.shape[1:]), None, None


class _Greatest(torch.autograd.Function):
    """The greatest over edges; equals share a gradient alike, as in torch, also with the 0 that it is written over."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, edges: Edges) -> Tensor:
        greatest, ties = greatest_along(x.contiguous(), edges.by_target, lambda: edges.targets)
        ctx.save_for_backward(x, greatest, ties + (greatest == 0))
        ctx.edges = edges
        return greatest

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, greatest, ties = ctx.saved_tensors
        shared = (gradient / ties.clamp(min=1)).contiguous()
        return shares_along(x.contiguous(), ctx.edges.by_source, greatest, shared), None


def _is_quick(x: Tensor, order: Order) -> bool:
    """Whether compiled kernels do it sooner than torch."""
    return order.others.shape[0] * prod(x.shape[1:]) >= _FEW and is_compiled_for(x)


def sum_along(x: Tensor, order: Order, weight: Tensor | None) -> Tensor:
    """The rows at the other ends of the edges of each row, added up: in memory of their own, no view of other."""
    num_rows, heads = order.first.shape[0] - 1, 1 if weight is None else prod(weight.shape[1:])
    size = prod(x.shape[1:])
    if x.is_meta:
        return x.new_empty(num_rows, *x.shape[1:])
    if _is_quick(x, order) and (weight is None or weight.dtype == x.dtype):
        x, weight = x.contiguous(), None if weight is None else weight.contiguous()
        made = new_in_large_pages(x, num_rows, *x.shape[1:])
        shape = num_rows, heads, size // heads
        run_kernel("sum", x, order.first, order.others, weight, made, *shape)
        return made
    if x.is_cuda and heads == 1 and _is_sparse_product(x, order, weight):
        return _sparse_product(x, order, weight)
    made = x.new_zeros(num_rows, *x.shape[1:])
    into, flat = (rows.view(rows.shape[0], heads, size // heads) for rows in (made, x.contiguous()))
    rows = rows_of(order)
    at_once = max(_CHUNK // max(size, 1), 1)
    for start in range(0, rows.shape[0], at_once):
        some = slice(start, start + at_once)
        taken = flat.index_select(0, order.others[some])
        if weight is not None:
            taken = taken * weight.reshape(-1, heads, 1)[some]
        into.index_add_(0, rows[some], taken.to(made.dtype))
    return made


def _is_sparse_product(x: Tensor, order: Order, weight: Tensor | None) -> bool:
    """Whether it is what a product with a sparse matrix gives, which GPUs have a kernel for."""
    same = weight is None or weight.dtype == x.dtype
    return same and x.dtype in (torch.float32, torch.float64) and 0 < order.others.shape[0] < _MOST_IN_32_BITS


def _sparse_product(x: Tensor, order: Order, weight: Tensor | None) -> Tensor:
    """The same by torch's product with a matrix that has a row for every row: edges are in its order already."""
    count, size = order.others.shape[0], prod(x.shape[1:])
    values = x.new_ones(count) if weight is None else weight.reshape(count)
    shape = order.first.shape[0] - 1, x.shape[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR tensor support|invariant checks)")  # torch tells once
        matrix = torch.sparse_csr_tensor(order.first.int(), order.others, values, shape, check_invariants=False)
    made = x.new_zeros(shape[0], *x.shape[1:])
    into = made.view(shape[0], size)
    rows = x.contiguous().view(x.shape[0], size)  # of numbers that lie apart the kernel of a GPU makes 18 times as long
    torch.addmm(into, matrix, rows, beta=0, out=into)  # `@` would hold two of its size
    return made


Rows = Callable[[], Tensor]
"""The row that each edge of an order belongs to."""


def rows_of(order: Order) -> Tensor:
    """The row of each edge."""
    rows = torch.arange(order.first.shape[0] - 1, device=order.first.device)
    return rows.repeat_interleave(order.first.diff(), output_size=order.others.shape[0])


def dots_along(x: Tensor, order: Order, ours: Tensor, heads: int, rows: Rows | None = None) -> Tensor:
    """For every edge of an order the product, head by head, of what is at its other end and of what its row has."""
    width = prod(x.shape[1:]) // heads
    if x.is_meta:
        return x.new_empty(order.others.shape[0], heads)
    if _is_quick(x, order) and ours.dtype == x.dtype:
        made = x.new_empty(order.others.shape[0], heads)
        num_rows = order.first.shape[0] - 1
        run_kernel("dots", x.contiguous(), order.first, order.others, ours.contiguous(), made, num_rows, heads, width)
        return made
    at = rows() if rows is not None else rows_of(order)
    theirs, ours = x.reshape(-1, heads, width), ours.reshape(-1, heads, width)
    return (theirs.index_select(0, order.others) * ours.index_select(0, at)).sum(2)


def greatest_along(x: Tensor, order: Order, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
    """The greatest at the other ends of the edges of each row, and how many are as great."""
    num_rows, size = order.first.shape[0] - 1, prod(x.shape[1:])
    if x.is_meta or _is_quick(x, order):
        made, ties = x.new_empty(num_rows, *x.shape[1:]), x.new_empty(num_rows, *x.shape[1:])
        if not x.is_meta:
            run_kernel("greatest", x, order.first, order.others, made, ties, num_rows, size)
        return made, ties
    at = rows() if rows is not None else rows_of(order)
    taken = x.index_select(0, order.others)
    made = x.new_zeros(num_rows, *x.shape[1:])
    made = made.scatter_reduce(0, _like_rows(at, x).expand_as(taken), taken, "amax", include_self=False)
    as_great = (taken == made.index_select(0, at)).to(x.dtype)
    return made, torch.zeros_like(made).index_add_(0, at, as_great)


def shares_along(x: Tensor, order: Order, greatest: Tensor, shared: Tensor) -> Tensor:
    """What each row gets of the gradients of those whose greatest it is, at the other ends of its edges."""
    made = torch.zeros_like(x)
    if x.is_meta:
        return made
    if _is_quick(x, order):
        num_rows, size = x.shape[0], prod(x.shape[1:])
        run_kernel("shares", x, order.first, order.others, greatest, shared, made, num_rows, size)
        return made
    at = rows_of(order)
    is_it = x.index_select(0, at) == greatest.index_select(0, order.others)
    return made.index_add_(0, at, shared.index_select(0, order.others) * is_it)


def _like_rows(rows: Tensor, values: Tensor) -> Tensor:
    """Row numbers for every number of each row, as scattering takes them."""
    shape = rows.shape[0], *(1,) * (values.dim() - 1)
    return rows.view(shape).expand(rows.shape[0], *values.shape[1:])
