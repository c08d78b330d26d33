"""What models make of the neighbours of vertices, written as rows read at sources and added up at targets, as one call.

    zeros.index_add(0, target, x[source] * weight)           ->   conjoin::aggregate(x, source, target, weight, "sum")
    zeros.scatter_reduce(0, target, x[source], "mean")       ->   conjoin::aggregate(x, source, target, None, "mean")
    zeros.scatter_reduce(0, target, x[source], "amin")       ->   0 - conjoin::aggregate(0 - x, .., None, "max")
    exp(s - peak[target]) / zeros.index_add(..)[target]      ->   conjoin::edge_softmax(s, target)
    aggregate(x, .., edge_softmax(leaky(a[source] + b[target])))   ->   conjoin::graph_attention(x, a, b, ..)

So no row is made for an edge, and vertices may be split. How many rows their parts would send each other is counted in
`halo_counts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch
from torch import nn

from conjoin.frontends.halo_counts import known_values, with_halos
from conjoin.frontends.torch_export import Exported
from conjoin.ir import Graph, Node, Rewriting, Value, drop_unused
from conjoin.ops import AGGREGATE, CAST, EDGE_SOFTMAX, GRAPH_ATTENTION

_ZEROS = ("zeros", "zeros_like", "new_zeros")
_ADDED = ("index_add", "index_put", "index_reduce", "scatter_add", "scatter_reduce.two")
_LEAST = "min"
_REDUCED = {"sum": "sum", "mean": "mean", "amax": "max", "amin": _LEAST}
_NEGLIGIBLE = 1e-12
"""What is added to a sum of at least 1 to keep it from 0."""

def with_neighbours(graph: Graph, exported: Exported, model: nn.Module) -> Graph:
    """The graph with what vertices make of their neighbours as single calls; the same graph where there is none."""
    if not any(node.op in _ADDED for node in graph.nodes):
        return graph
    for find in (_find_softmax, _find_sum, _find_attention):
        graph = _replaced(graph, find)
    return with_halos(graph, known_values(exported, model))


@dataclass(frozen=True, slots=True)
class _Found:
    """A call that computes what a node does; arguments are values of the graph, some of them in another form."""

    op: str
    args: tuple[Any, ...]
    turned: bool = False
    """Whether of what it reads first, and of what it makes, the sign is turned: the least is the greatest then."""


@dataclass(frozen=True, slots=True)
class _Formed:
    """A value in another shape, or a wider dtype."""

    value: Value
    shape: tuple[int, ...]
    dtype: torch.dtype


def _replaced(graph: Graph, find: Callable[[Node], _Found | None]) -> Graph:
    found = {node: made for node in graph.nodes if (made := find(node)) is not None}
    if not found:
        return graph
    work = Rewriting(graph)

    def new(node: Node, arg: Any) -> Any:
        if isinstance(arg, _Formed):
            value = work.values[arg.value]
            value = value if value.type.shape == arg.shape else work.emit(node, "reshape", value, arg.shape)
            return value if value.type.dtype == arg.dtype else work.emit(node, CAST, value, arg.dtype)
        return work.values[arg] if isinstance(arg, Value) else arg

    for node in graph.nodes:
        if node in found:
            made, args = found[node], [new(node, arg) for arg in found[node].args]
            if made.turned:
                args[0] = work.emit(node, "rsub.Scalar", args[0], 0, 1)
            value = work.emit(node, made.op, *args)
            work.values[Value(node)] = work.emit(node, "rsub.Scalar", value, 0, 1) if made.turned else value
        else:
            work.keep(node)
    return drop_unused(work.finish())


def _made_by(value: Any, *ops: str) -> Node | None:
    """The call that makes a value, where it is one of these."""
    owner = value.owner if isinstance(value, Value) else None
    return owner if isinstance(owner, Node) and owner.op in ops else None


@dataclass(frozen=True, slots=True)
class _Added:
    """Rows that are added up, or reduced otherwise, at targets."""

    rows: Value
    target: Value
    vertices: int
    reduce: str


def _find_added(node: Node) -> _Added | None:
    along = node.op in _ADDED and (node.op == "index_put" or node.call.dim() == 0)
    if not along or _made_by(_before_widening(node.args[0]), *_ZEROS) is None:
        return None
    shape = node.types[0].shape
    if node.op in ("index_add", "index_reduce"):
        target, rows = node.args[2], node.args[3]
        if node.op == "index_add" and node.call["alpha"] != 1:
            return None
    elif node.op == "index_put":
        places, rows = node.args[1:3]
        if not node.call["accumulate"] or len(places) != 1 or places[0] is None:
            return None
        (target,) = places
        if target.type.dtype == torch.bool or rows.type.shape[:1] != target.type.shape:
            return None
    else:
        spread, rows = node.args[2], node.args[3]
        found = _spread_from(spread) if spread.type.shape == rows.type.shape else None
        if found is None:
            return None
        target = found
    reduce = _REDUCED.get(node.call["reduce"]) if node.op in ("scatter_reduce.two", "index_reduce") else "sum"
    if reduce is None or (reduce != "sum" and node.call["include_self"]):
        return None
    if reduce == "mean" and not rows.type.dtype.is_floating_point:  # rounded down
        return None
    fits = rows.type.shape[1:] == shape[1:] and rows.type.dtype == node.types[0].dtype and rows.type.shape
    return _Added(rows, target, shape[0], reduce) if fits and len(target.type.shape) == 1 else None


def _spread_from(value: Value) -> Value | None:
    """The row numbers that were repeated for every number of a row."""
    count = value.type.shape[0] if value.type.shape else 0
    while len(value.type.shape) != 1:
        owner = _made_by(value, "expand", "unsqueeze", "reshape")
        is_rows = value.type.shape[:1] == (count,)
        if owner is None or not is_rows or (owner.op != "expand" and value.type.num_elements != count):
            return None
        if owner.op == "expand" and len(owner.args[0].type.shape) != len(value.type.shape):  # of columns, not of rows
            return None
        value = owner.args[0]
    return value if value.type.shape == (count,) else None


def _find_read(value: Any) -> tuple[Value, Value] | None:
    """What rows are read from, and at which numbers."""
    node = _made_by(value, "index.Tensor", "index_select", "gather", "embedding")
    if node is None:
        return None
    if node.op == "index_select":
        return (node.args[0], node.args[2]) if node.call.dim() == 0 else None
    if node.op == "gather":
        spread = _spread_from(node.args[2])
        is_rows = node.call.dim() == 0 and node.args[2].type.shape[1:] == node.args[0].type.shape[1:]
        return (node.args[0], spread) if is_rows and spread is not None else None
    if node.op == "embedding":
        is_plain = node.call["padding_idx"] < 0 and not node.call["scale_grad_by_freq"] and not node.call["sparse"]
        return node.args[:2] if is_plain and len(node.args[1].type.shape) == 1 else None
    taken = node.args[1]
    plain = len(taken) == 1 and taken[0] is not None and len(taken[0].type.shape) == 1
    return (node.args[0], taken[0]) if plain and taken[0].type.dtype != torch.bool else None


def _find_sum(node: Node) -> _Found | None:
    added = _find_added(node)
    if added is None:
        return None
    dtype = added.rows.type.dtype
    for rows, weight in _weighted(_before_widening(added.rows)):
        read = _find_read(_before_widening(rows))
        greatest, least = added.reduce in ("max", _LEAST), added.reduce == _LEAST
        if read is not None and not (greatest and weight is not None):
            if least and not dtype.is_floating_point:  # of some whole numbers there is no other sign
                return None
            x = _Formed(read[0], read[0].type.shape, dtype)
            weight = None if weight is None else replace(weight, dtype=dtype)
            args = x, read[1], added.target, weight, added.vertices, "max" if least else added.reduce, (), ()
            return _Found(AGGREGATE, args, turned=least)
    return None


def _before_widening(value: Value) -> Value:
    """What became of a wider floating-point dtype: the sum of such numbers is no other if what they are read from is
    cast, which are fewer."""
    cast = _made_by(value, CAST)
    given = None if cast is None else cast.args[0]
    return given if given is not None and _is_widened(given.type.dtype, value.type.dtype) else value


def _is_widened(dtype: torch.dtype, to: torch.dtype) -> bool:
    floats = dtype.is_floating_point and to.is_floating_point
    return dtype == to or (floats and torch.promote_types(dtype, to) == to)


def _weighted(value: Value) -> Iterator[tuple[Value, _Formed | None]]:
    """Rows and the weights they are multiplied with, either way round; or rows alone."""
    yield value, None
    product = _made_by(value, "mul.Tensor")
    if product is None or not all(isinstance(arg, Value) for arg in product.args):
        return
    for rows, weight in (product.args, product.args[::-1]):
        shape = list(weight.type.shape)
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        aligned = len(weight.type.shape) == len(rows.type.shape) == len(value.type.shape)
        widened = all(_is_widened(factor.type.dtype, value.type.dtype) for factor in (rows, weight))
        if aligned and widened and tuple(shape) == rows.type.shape[: len(shape)]:
            yield rows, _formed(_before_widening(weight), tuple(shape))


def _formed(value: Value, shape: tuple[int, ...]) -> _Formed:
    """A value in another shape, without the shapes it had in between."""
    owner = _made_by(value, "unsqueeze", "reshape")
    if owner is None or value.type.shape == shape:
        return _Formed(value, shape, value.type.dtype)
    return _formed(owner.args[0], shape)


def _find_softmax(node: Node) -> _Found | None:
    if node.op != "div.Tensor" or not all(isinstance(arg, Value) for arg in node.args):
        return None
    powers, total = node.args
    total = _without_negligible(total)
    read, power = _find_read(total), _made_by(powers, "exp")
    maker = None if read is None else _without_negligible(read[0]).owner
    added = _find_added(maker) if isinstance(maker, Node) else None
    if read is None or added is None or power is None:
        return None
    if (added.rows, added.target, added.reduce) != (powers, read[1], "sum"):
        return None
    shifted = _made_by(power.args[0], "sub.Tensor")
    if shifted is None or shifted.call["alpha"] != 1:
        return None
    scores, shift = shifted.args[:2]
    at = _find_read(shift)
    highest = _find_added(at[0].owner) if at is not None and isinstance(at[0].owner, Node) else None
    if at is None or highest is None or highest.reduce != "max" or not highest.target == added.target == at[1]:
        return None
    detached = _made_by(highest.rows, "detach")
    is_own = scores in (highest.rows, None if detached is None else detached.args[0])
    return _Found(EDGE_SOFTMAX, (scores, added.target, added.vertices)) if is_own else None


def _without_negligible(value: Value) -> Value:
    """A sum of at least 1 without what keeps it from 0."""
    plus = _made_by(value, "add.Tensor", "add.Scalar")
    is_it = plus is not None and isinstance(plus.args[1], float) and abs(plus.args[1]) < _NEGLIGIBLE
    return plus.args[0] if plus is not None and is_it else value


def _find_attention(node: Node) -> _Found | None:
    if node.op != AGGREGATE or node.call["reduce"] != "sum" or len(node.call["x"].shape) < 2:
        return None
    x, source, target, weight, vertices = node.args[:5]
    flat = _made_by(weight, "reshape")  # of a single head
    softmax = _made_by(weight if flat is None else flat.args[0], EDGE_SOFTMAX)
    looped = _find_loops(softmax.args[0], source, target, vertices) if softmax is not None else None
    scores = None if softmax is None else softmax.args[0] if looped is None else looped.scores
    leaky = _made_by(scores, "leaky_relu")
    both = _made_by(leaky.args[0], "add.Tensor") if leaky is not None else None
    if softmax is None or leaky is None or both is None or both.call["alpha"] != 1 or softmax.args[1] != target:
        return None
    sides = [_find_read(side) for side in both.args[:2]]
    for one, other in (sides, sides[::-1]):
        if one is None or other is None or (one[1], other[1]) != (source, target):
            continue
        if one[0].type.shape == x.type.shape[:2] and other[0].type.shape == (vertices, x.type.shape[1]):
            ends = (source, target) if looped is None else looped.ends
            slope, loops = leaky.call["negative_slope"], looped is not None
            return _Found(GRAPH_ATTENTION, (x, one[0], other[0], *ends, vertices, slope, (), (), loops))
    return None


@dataclass(frozen=True, slots=True)
class _Looped:
    """Edges to which one from every vertex to itself was added, and the scores of all, before those count for nothing
    that were there before."""

    scores: Value
    ends: tuple[Value, Value]
    """Of the edges without these."""


def _find_loops(scores: Value, source: Value, target: Value, vertices: int) -> _Looped | None:
    masked = _made_by(scores, "masked_fill.Scalar")
    none = _made_by(masked.args[1], "bitwise_not", "logical_not") if masked is not None else None
    shaped = _made_by(none.args[0], "reshape", "unsqueeze") if none is not None else None
    joined = _made_by(shaped.args[0], "cat") if shaped is not None else None
    if masked is None or joined is None or masked.call["value"] != -inf or len(joined.args[0]) != 2:
        return None
    differ, ones = _made_by(joined.args[0][0], "ne.Tensor"), _made_by(joined.args[0][1], "ones")
    if differ is None or ones is None or ones.types[0].shape != (vertices,):
        return None
    ends: tuple[Value, Value] = differ.args[:2]
    edges = [_edges_with_loops(end, vertices, at) for at, end in enumerate((source, target))]
    read = [_selected(end) for end in ends]
    same = edges[0] is not None and read == [(edges[0], 0), (edges[0], 1)] and edges[0] == edges[1]
    return _Looped(masked.args[0], ends) if same else None


def _edges_with_loops(ends: Value, vertices: int, at: int) -> Value | None:
    """The two rows of edges behind which one from every vertex to itself was put, of which these are the one `at`."""
    chosen = _selected(ends)
    joined = _made_by(chosen[0], "cat") if chosen is not None and chosen[1] == at else None
    if joined is None or joined.call.dim() != 1 or len(joined.args[0]) != 2:
        return None
    stacked = _made_by(joined.args[0][1], "stack")
    if stacked is None or stacked.call["dim"] or len(stacked.args[0]) != 2:
        return None
    rows = [_made_by(row, "arange") for row in stacked.args[0]]
    found: Value = joined.args[0][0]
    return found if all(row is not None and row.types[0].shape == (vertices,) for row in rows) else None


def _selected(value: Value) -> tuple[Value, int] | None:
    """Of what a value is a row, and which."""
    node = _made_by(value, "select.int")
    return (node.args[0], node.call["index"]) if node is not None and node.call.dim() == 0 else None
