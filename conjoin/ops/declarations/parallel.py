"""The parallelization operators: identities as functions of the value, changes of layout on the mesh."""

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
from conjoin.ops.sampling import real
from conjoin.ops.spec import OpSpec

_AXES = ("d0",)
_identity = partial(OpSpec, index="... -> ...", terms="x", dtype=Dtype.FIRST, flops=0, view=True)

OPS: tuple[OpSpec, ...] = (
    _identity(PARTITION, sample=lambda rng: (real(4, 3), 0, _AXES), overloads=(COMBINE,)),
    _identity(REPLICATE, sample=lambda rng: (real(4, 3), _AXES), overloads=(REDUCE, UNIFY, ASSIGN, GREATEST)),
    _identity(CONFINE, sample=lambda rng: (real(4, 3), 0, _AXES), overloads=(SHARE,)),
    _identity(PIPELINE, sample=lambda rng: (real(4, 3), 0, 2), overloads=(BATCH,)),
)
