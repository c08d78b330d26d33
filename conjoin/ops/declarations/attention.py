"""Scaled dot-product attention with causal masks, bias masks and grouped heads."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import torch

from conjoin.ops.local import LocalForm
from conjoin.ops.notation import broadcast_names
from conjoin.ops.sampling import boolean, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec


def _attention(call: Call) -> Indexed:
    """Queries may be split; keys are normalised over, so their positions stay whole, and so do the head dims summed."""
    q, k, v = (call[name].shape for name in ("query", "key", "value"))
    lead = [f"b{i}" for i in range(len(q) - 3)]
    heads = ["h"] * (len(q) > 2)
    grouped = bool(call["enable_gqa"] and heads)
    value = "f!" if call["dropout_p"] else "f"  # all value dims must meet the same dropped weights
    queries = [*lead, *(["(h r)"] if grouped else heads)]
    full = q if not grouped else (*q[:-3], k[-3], *q[-2:])
    keys, values = (broadcast_names([*lead, *heads], shape[:-2], full[:-2]) for shape in (k, v))
    left = f"{' '.join(queries)} l e!, {keys} s! e!, {values} s! {value}"
    if call["attn_mask"] is not None:
        left += f", {broadcast_names([*queries, 'l', 's'], call['attn_mask'].shape, (*q[:-1], k[-2]))}"
    return Indexed(f"{left} -> {' '.join(queries)} l {value}", (("r", q[-3] // k[-3]),) if grouped else ())


def _terms(call: Call) -> str:
    """Linear in the values, except where each device would drop other weights."""
    return "" if call["dropout_p"] else "value"


def _flops(call: Call, sizes: Mapping[str, int]) -> float:
    """Two matrix products and the softmax between them; half of it under a causal mask."""
    pairs = 1.0
    for name, size in sizes.items():
        pairs *= size if name not in ("e", "f") else 1
    work = pairs * (2 * sizes["e"] + 2 * sizes["f"] + 12)
    return work / 2 if call["is_causal"] else work


def _local(form: LocalForm) -> Any:
    """A piece of causal queries starts at a later row of the triangle: the mask is written out."""
    if not form.call["is_causal"] or "l" not in form.pieces:
        return form.run()
    lo, hi = form.pieces["l"]
    ones = form.emit("new_ones", form["query"], (hi - lo, form.space.sizes["s"]), torch.bool)
    return form.run(attn_mask=form.emit("tril", ones, lo), is_causal=False)


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


OPS: tuple[OpSpec, ...] = (
    OpSpec("scaled_dot_product_attention", _attention, _sample, terms=_terms, flops=_flops, local=_local,
           one_dtype=True, rate="dropout_p"),
)
