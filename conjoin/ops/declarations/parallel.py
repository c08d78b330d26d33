"""The parallelization operators: identities as functions of the value, changes of layout on the mesh; and what cuts a
part of a graph in micro-batches."""

from __future__ import annotations

from functools import partial

from conjoin.ops.composites import (
    ASSIGN,
    BATCH,
    COMBINE,
    CONFINE,
    GREATEST,
    PARTITION,
    PIPELINE,
    REDUCE,
    REPLICATE,
    SHARE,
    UNIFY,
)
from conjoin.ops.dtypes import Dtype
from conjoin.ops.samples import real
from conjoin.ops.spec import Call, Indexed, OpSpec

_AXES = ("d0",)
_identity = partial(OpSpec, index="... -> ...", terms="x", dtype=Dtype.FIRST, flops=0, view=True)


def _pipeline(call: Call) -> Indexed:
    """A piece of the dim has as many micro-batches as the whole, each with its entries of them."""
    whole, part = _micro_batched(call, call["x"].shape)
    return Indexed(f"{whole} -> {part}", (("n", call["count"]),))


def _batch(call: Call) -> Indexed:
    whole, part = _micro_batched(call, call["x"].shape)
    return Indexed(f"{part} -> {whole}", (("n", call["count"]),))


def _micro_batched(call: Call, shape: tuple[int, ...]) -> tuple[str, str]:
    dim, names = call.dim(), [f"d{i}" for i in range(len(shape))]
    return " ".join(f"({d} n!)" if i == dim else d for i, d in enumerate(names)), " ".join(names)


OPS: tuple[OpSpec, ...] = (
    _identity(PARTITION, sample=lambda rng: (real(4, 3), 0, _AXES), overloads=(COMBINE,)),
    _identity(REPLICATE, sample=lambda rng: (real(4, 3), _AXES), overloads=(REDUCE, UNIFY, ASSIGN, GREATEST)),
    _identity(CONFINE, sample=lambda rng: (real(4, 3), 0, _AXES), overloads=(SHARE,)),
    OpSpec(
        PIPELINE, _pipeline, lambda rng: (real(2, 6, 3), 1, rng.choice((2, 3))), terms="x", dtype=Dtype.FIRST, flops=0
    ),
    OpSpec(BATCH, _batch, lambda rng: (real(2, 3, 3), 1, rng.choice((2, 3))), terms="x", dtype=Dtype.FIRST, flops=0),
)
