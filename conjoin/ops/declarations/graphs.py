"""Operators over the edges of a graph: sources address the rows that are read, targets those that are made.

Split by features, or by edges into partial sums, they are as other operators. Split by vertices every device makes the
rows of its own vertices; the rows that it reads may lie split too, and those of its neighbours' vertices come to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf, prod
from random import Random
from typing import Any

from conjoin.ops.aggregation import REDUCTIONS
from conjoin.ops.composites import AGGREGATE, AGGREGATE_ONCE, EDGE_SOFTMAX, GRAPH_ATTENTION
from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import LocalForm
from conjoin.ops.notation import NotationError
from conjoin.ops.samples import integer, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def _aggregate(call: Call) -> Indexed:
    """A mean and a greatest value are of all edges of a vertex."""
    x, weight, reduce = call["x"].shape, call["weight"], call["reduce"]
    if reduce not in REDUCTIONS or (reduce == "max" and weight is not None):
        raise NotationError(f"edges {'with weights ' if weight is not None else ''}are not aggregated by {reduce!r}")
    mark = "" if reduce == "sum" else "!"
    dims = [f"d{i}" for i in range(1, len(x))]
    weights = "" if weight is None else f", {' '.join((f'e{mark}', *dims[: len(weight.shape) - 1]))}"
    row = " ".join(dims)
    return Indexed(f"u{mark} {row}, e{mark}@u, e{mark}@v{weights} -> v {row}", (("v", call["vertices"]),))


def _attention(call: Call) -> Indexed:
    width = " ".join(f"d{i}" for i in range(2, len(call["x"].shape)))
    if call["loops"] and call["x"].shape[0] != call["vertices"]:
        raise NotationError(f"{call['x'].shape[0]} vertices are not the {call['vertices']} that edges come to")
    return Indexed(f"u! h {width}, u! h, v h, e!@u, e!@v -> v h {width}", (("v", call["vertices"]),))


def _softmax(call: Call) -> Indexed:
    dims = " ".join(f"d{i}" for i in range(1, len(call["scores"].shape)))
    return Indexed(f"e! {dims}, e!@v -> e! {dims}", (("v", call["vertices"]),))


def _edges_here(call: Call, sizes: Mapping[str, int]) -> float:
    """Of the edges of a part of the vertices as many are here as if all had as many."""
    _, sources, _, targets = call["window"] or (0, sizes["u"], 0, sizes["v"])
    return float(sizes["e"] * sizes["u"] * sizes["v"] / max(sources * targets, 1))


def _flops(call: Call, sizes: Mapping[str, int]) -> float:
    """A product and a sum for every number of every edge."""
    return float(2 * _edges_here(call, sizes) * prod(call["x"].shape[1:]))


def _read(call: Call, sizes: Mapping[str, int]) -> int:
    """A row for every edge, and the edges; the order of edges is kept in half as many bytes as they are given in."""
    x = call["x"]
    row = prod(x.shape[1:]) * x.dtype.itemsize
    others = sum(t.bytes for t in call.tensors[1:] if t.dtype.is_floating_point)
    return int(_edges_here(call, sizes) * (row + call["source"].dtype.itemsize // 2)) + others


def _local(form: LocalForm) -> Any:
    """Edges that come from elsewhere, or go there, are left out: the window says which are here."""
    if not {"u", "v"} & set(form.pieces):
        return form.run()
    sizes = form.space.sizes
    first_u, sources, first_v, targets = form.call["window"] or (0, sizes["u"], 0, sizes["v"])
    starts = (form.pieces.get(index, (0, 0))[0] for index in "uv")
    window = (first_u + next(starts), sources, first_v + next(starts), targets)
    return form.run(window=window)


def _one_by_one(form: LocalForm) -> Any:
    """Attention as scores of edges, their softmax, and a weighted sum."""
    emit, source, target = form.emit, form["source"], form["target"]
    if form["loops"]:
        own = emit("arange", form["vertices"], form.call["source"].dtype)
        is_loop = emit("cat", (emit("eq.Tensor", source, target), emit("ne.Tensor", own, own)), 0)
        source, target = (emit("cat", (ends, own), 0) for ends in (source, target))
    sides = (emit("index_select", form[name], 0, at) for name, at in (("by_source", source), ("by_target", target)))
    scores = emit("leaky_relu", emit("add.Tensor", *sides, 1), form["slope"])
    if form["loops"]:
        scores = emit("masked_fill.Scalar", scores, emit("unsqueeze", is_loop, 1), -inf)
    weight = emit(EDGE_SOFTMAX, scores, target, form["vertices"])
    return emit(AGGREGATE, form["x"], source, target, weight, form["vertices"], "sum", (), form["halos"])


def _aggregate_sample(rng: Random) -> Args:
    u, v, e, *sizes = (rng.randint(1, 5) for _ in range(3 + rng.randint(1, 2)))
    reduce = rng.choice(REDUCTIONS)
    heads = sizes[: rng.randint(0, len(sizes) - 1)]
    weight = real(e, *heads) if reduce != "max" and rng.random() < 0.6 else None
    return real(u, *sizes), integer(e), integer(e), weight, v, reduce


def _attention_sample(rng: Random) -> Args:
    u, v, e, h, f = (rng.randint(1, 5) for _ in range(5))
    loops = rng.random() < 0.4
    v = u if loops else v
    return real(u, h, f), real(u, h), real(v, h), integer(e), integer(e), v, 0.2, (), (), loops


def _softmax_sample(rng: Random) -> Args:
    e, h, v = (rng.randint(1, 5) for _ in range(3))
    return real(e, h), integer(e), v


_OF_EDGES = ("source", "target", "weight")
_over_edges = partial(
    OpSpec, dtype=Dtype.FIRST, flops=_flops, reads=_read, follows={"vertices": "v"}, one_dtype=True, family="lookup"
)

OPS: tuple[OpSpec, ...] = (
    _over_edges(
        AGGREGATE, _aggregate, _aggregate_sample, owned={"v": ("x",)}, dealt={"v": _OF_EDGES}, local=_local,
        by_rows=True, terms=lambda call: "" if call["reduce"] == "max" else "x weight",
    ),
    _over_edges(
        AGGREGATE_ONCE, _aggregate, _aggregate_sample, local=_local, flops=0, reads=lambda call, sizes: 0,
        terms=lambda call: "" if call["reduce"] == "max" else "x weight",
    ),
    _over_edges(
        GRAPH_ATTENTION, _attention, _attention_sample, terms="x", owned={"v": ("x", "by_source")},
        dealt={"v": _OF_EDGES}, local=_local, expansion=_one_by_one, by_rows=True,
    ),
    OpSpec(EDGE_SOFTMAX, _softmax, _softmax_sample, dtype=Dtype.FIRST, flops=5, kernels="softmax"),
)  # fmt: skip
