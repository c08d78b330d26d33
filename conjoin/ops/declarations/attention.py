"""Scaled dot-product attention with causal masks, bias masks and grouped heads."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from random import Random
from typing import Any, NamedTuple

import torch

from conjoin.ops.aten import CAST
from conjoin.ops.composites import ATTENTION_FROM_ROW, ATTENTION_PEAK, ATTENTION_SUMS, RING_ATTENTION
from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import LocalForm
from conjoin.ops.notation import NotationError, broadcast_names
from conjoin.ops.samples import boolean, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


class _Words(NamedTuple):
    """The notation of the operands of attention, and sizes that none of them shows."""

    query: str
    key: str
    value: str
    mask: str
    rows: str
    """Of queries without their head dim."""
    sizes: tuple[tuple[str, int], ...]


def _words(call: Call, keys: str, feature: str) -> _Words:
    """As operands are spelled where the index of keys and that of the features of values are marked in some way."""
    q, k, v = (call[name].shape for name in ("query", "key", "key" if call["value"] is None else "value"))
    lead = [f"b{i}" for i in range(len(q) - 3)]
    heads = ["h"] * (len(q) > 2)
    grouped = bool(call["enable_gqa"] and heads)
    queries = [*lead, *(["(h r)"] if grouped else heads)]
    full = q if not grouped else (*q[:-3], k[-3], *q[-2:])
    key, value = (broadcast_names([*lead, *heads], shape[:-2], full[:-2]) for shape in (k, v))
    mask = call["attn_mask"]
    masked = "" if mask is None else f", {broadcast_names([*queries, 'l', 's'], mask.shape, (*q[:-1], k[-2]))}"
    rows = f"{' '.join(queries)} l"
    sizes = (("r", q[-3] // k[-3]),) if grouped else ()
    return _Words(f"{rows} e!", f"{key} {keys} e!", f"{value} {keys} {feature}", masked, rows, sizes)


def _attention(call: Call) -> Indexed:
    """Queries may be split; keys are normalised over, so their positions stay whole, and so do the head dims summed."""
    value = "f!" if call["dropout_p"] else "f"  # all value dims must meet the same dropped weights
    words = _words(call, "s!", value)
    return Indexed(f"{words.query}, {words.key}, {words.value}{words.mask} -> {words.rows} {value}", words.sizes)


def _peak(call: Call) -> Indexed:
    """The greatest score over keys, of which each device may have some."""
    words = _words(call, "s^", "f")
    return Indexed(f"{words.query}, {words.key}{words.mask} -> {words.rows} 1", words.sizes)


def _sums(call: Call) -> Indexed:
    """Sums over keys, of which each device may have some."""
    words = _words(call, "s", "f!")
    left = f"{words.query}, {words.key}, {words.value}, {words.rows} 1{words.mask}"
    return Indexed(f"{left} -> {words.rows} f!, {words.rows} 1", words.sizes)


def _ring(call: Call) -> Indexed:
    """A sequence and itself: queries, keys and values are split alike, and a mask by its rows."""
    q, k, v = (call[name].shape for name in ("query", "key", "value"))
    if not len(q) == len(k) == len(v) == 4 or not q[2] == k[2] == v[2]:
        raise NotationError(f"{call.op} is called for {q}, {k} and {v}, which are not one sequence of heads")
    heads, sizes = ("(h r)", (("r", q[1] // k[1]),)) if call["enable_gqa"] else ("h", ())
    mask = call["attn_mask"]
    masked = "" if mask is None else f", {broadcast_names(['b', heads, 't', 's!'], mask.shape, (*q[:3], k[2]))}"
    return Indexed(f"b {heads} t e!, b h t e!, b h t f!{masked} -> b {heads} t f!", sizes)


def _keys_reached(call: Call, operand: str, piece: tuple[int, int]) -> tuple[int, int]:
    """Queries look at all keys, or under a causal mask at those up to their own."""
    if operand in ("query", "attn_mask"):
        return piece
    return 0, piece[1] if call["is_causal"] else call["key"].shape[2]


def _local_ring(form: LocalForm) -> Any:
    """With all keys that are looked at here; the runtime has them come one piece after the other."""
    sequence = form.pieces.get("t")
    if sequence is None:
        return form.run()
    query, mask, rest = form["query"], form["attn_mask"], (form.call["scale"], form.call["enable_gqa"])
    causal, pair = form.call["is_causal"], (form["key"], form["value"])
    if causal and sequence[0]:
        return form.emit(ATTENTION_FROM_ROW, query, *pair, sequence[0], *rest)
    return form.emit("scaled_dot_product_attention", query, *pair, mask, 0.0, causal, *rest)


def _ring_sample(rng: Random) -> Args:
    b, h, g, e, f = (rng.randint(1, 3) for _ in range(5))
    length, gqa = rng.randint(2, 6), rng.random() < 0.4
    query = real(b, h * g if gqa else h, length, e)
    shapes = (length, length), (b, 1, 1, length), (1, query.shape[1], length, length), (b, 1, length, length)
    kind = rng.choice(("plain", "causal", "causal", "bool", "bias"))
    mask = {"bias": real, "bool": boolean}[kind](*rng.choice(shapes)) if kind in ("bias", "bool") else None
    keys = real(b, h, length, e), real(b, h, length, f)
    return query, *keys, kind == "causal", rng.choice((None, 0.3)), gqa, mask


def _ring_flops(call: Call, sizes: Mapping[str, int]) -> float:
    return _flops(call, {**sizes, "s": sizes["t"]})


def attention_by_parts(form: LocalForm) -> Any:
    """Attention where keys are split; rows that see no key at all are zero, as torch's own."""
    if form.call["dropout_p"]:
        return form.run()
    emit, query, key, value, mask = form.emit, *(form[name] for name in ("query", "key", "value", "attn_mask"))
    rest = mask, *(form.call[name] for name in ("is_causal", "scale", "enable_gqa"))
    peak = emit(ATTENTION_PEAK, query, key, *rest)
    weighed, total = emit(ATTENTION_SUMS, query, key, value, peak, *rest)
    mixed = emit("div.Tensor", weighed, emit("clamp", total, _NO_KEY))
    wanted = form.call["query"].dtype
    return mixed if wanted.itemsize >= torch.float32.itemsize else emit(CAST, mixed, wanted)


_NO_KEY = 0.5
"""Less than any sum of exponentials of which one is of zero."""


def _terms(call: Call) -> str:
    """Linear in the values, except where each device would drop other weights."""
    return "" if call["dropout_p"] else "value"


def _flops(call: Call, sizes: Mapping[str, int]) -> float:
    """Two matrix products and the softmax between them; half of it under a causal mask."""
    return _unmasked_flops(sizes) / (2 if call["is_causal"] else 1)


def _unmasked_flops(sizes: Mapping[str, int]) -> float:
    pairs = prod(size for name, size in sizes.items() if name not in ("e", "f"))
    return float(pairs * (2 * sizes["e"] + 2 * sizes["f"] + 12))


def _local_attention(form: LocalForm) -> Any:
    """A piece of causal queries sees the keys up to its own: whole before its first row, a triangle from there on."""
    rows = form.pieces.get("l")
    if rows is None or not form.call["is_causal"]:
        return form.run()
    (first, last), keys = rows, form.space.sizes["s"]
    if first >= keys:
        return form.run(is_causal=False)
    if form.call["dropout_p"] or last > keys or not _is_plain(form.call):
        return _local(form)
    key, value = form["key"], form["value"]
    if last < keys:
        key, value = (form.emit("slice.Tensor", x, 2, 0, last, 1) for x in (key, value))
    if first == 0:
        return form.run(key=key, value=value)
    return form.emit(ATTENTION_FROM_ROW, form["query"], key, value, first, form.call["scale"], form.call["enable_gqa"])


def _is_plain(call: Call) -> bool:
    """Whether there are a batch and heads, and nothing is broadcast."""
    q, k, v = (call[name].shape for name in ("query", "key", "value"))
    return len(q) == len(k) == len(v) == 4 and q[0] == k[0] and k[:2] == v[:2] and (call["enable_gqa"] or q[1] == k[1])


def _from_row(call: Call) -> Indexed:
    """Rows stay together: what each sees depends on where it is."""
    q, k = call["query"].shape, call["key"].shape
    heads, sizes = ("(h r)", (("r", q[1] // k[1]),)) if call["enable_gqa"] else ("h", ())
    return Indexed(f"b {heads} l! e!, b h s! e!, b h s! f! -> b {heads} l! f!", sizes)


def _from_row_sample(rng: Random) -> Args:
    b, h, g, first, e, f = (rng.randint(1, 3) for _ in range(6))
    length, gqa = first + rng.randint(0, 3), rng.random() < 0.4
    query = real(b, h * g if gqa else h, max(length - first, 1), e)
    return query, real(b, h, length, e), real(b, h, length, f), first, rng.choice((None, 0.3)), gqa


def _from_row_flops(call: Call, sizes: Mapping[str, int]) -> float:
    """What stands before the first row is seen by all, of the rest half."""
    return float(_unmasked_flops(sizes) * (call["first"] + sizes["s"]) / (2 * sizes["s"]))


def _local(form: LocalForm) -> Any:
    """A piece of causal queries starts at a later row of the triangle, one of keys at a later column: the mask is
    written out."""
    if not form.call["is_causal"] or form.pieces.keys().isdisjoint(("l", "s")):
        return form.run()
    (first, last), (left, right) = (form.pieces.get(index, (0, form.space.sizes[index])) for index in ("l", "s"))
    ones = form.emit("new_ones", form["query"], (last - first, right - left), torch.bool)
    return form.run(attn_mask=form.emit("tril", ones, first - left), is_causal=False)


def _sample(rng: Random) -> Args:
    b, h, g, s, e, f = (rng.randint(1, 3) for _ in range(6))
    length = rng.randint(1, 5)
    gqa = rng.random() < 0.4
    kind = rng.choice(("plain", "causal", "bool", "bias"))
    q = real(b, h * g if gqa else h, length, e)
    shapes = ((length, s), (b, 1, length, s), (b, q.shape[1], length, s), (b, 1, 1, s))
    mask_shape = rng.choice(shapes)
    mask = {"bias": real(*mask_shape), "bool": boolean(*mask_shape)}.get(kind)
    shared = 1 if not gqa and rng.random() < 0.2 else h
    return q, real(b, shared, s, e), real(b, shared, s, f), mask, 0.0, kind == "causal", None, gqa


def _peak_sample(rng: Random) -> Args:
    query, key, _, mask, _, *rest = _sample(rng)
    return query, key, mask, *rest


def _sums_sample(rng: Random) -> Args:
    query, key, value, mask, _, *rest = _sample(rng)
    return query, key, value, real(*query.shape[:-1], 1), mask, *rest


def _peak_flops(call: Call, sizes: Mapping[str, int]) -> float:
    return _flops(call, {**sizes, "f": 0})


OPS: tuple[OpSpec, ...] = (
    OpSpec("scaled_dot_product_attention", _attention, _sample, terms=_terms, flops=_flops,
           local=_local_attention, asks_where=("l", "s"), grows=("l",), one_dtype=True, rate="dropout_p",
           by_parts=attention_by_parts, family="attention", by_order=True),
    OpSpec(RING_ATTENTION, _ring, _ring_sample, terms="value", flops=_ring_flops, local=_local_ring,
           reaches={"t": _keys_reached}, asks_where=("t",), grows=("t",), one_dtype=True, family="attention"),
    OpSpec(ATTENTION_FROM_ROW, _from_row, _from_row_sample, terms="value", flops=_from_row_flops, one_dtype=True,
           family="attention"),
    OpSpec(ATTENTION_PEAK, _peak, _peak_sample, dtype=Dtype.WIDE, flops=_peak_flops, local=_local, smooth=False,
           asks_where=("l", "s"), family="contraction"),
    OpSpec(ATTENTION_SUMS, _sums, _sums_sample, dtype=Dtype.WIDE, flops=_flops, local=_local, constants=("peak",),
           asks_where=("l", "s"), family="contraction"),
)  # fmt: skip
