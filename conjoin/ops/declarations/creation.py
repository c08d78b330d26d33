"""Operators that make tensors from sizes: constants, ranges, triangles of indices."""

from __future__ import annotations

from functools import partial
from math import ceil
from random import Random
from typing import Any

import torch

from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import LocalForm
from conjoin.ops.notation import NotationError
from conjoin.ops.samples import Sample, random_shape, real
from conjoin.ops.spec import Args, Call, Indexed, OpSpec

SIZED = {"size": "shape"}
"""An attribute that is the shape of the output."""


def sized(call: Call) -> Indexed:
    """A tensor of a given size; what it is made like of does not matter."""
    names = [f"d{i}" for i in range(len(call["size"]))]
    like = " ".join(f"e{i}!" for i in range(len(call.tensors[0].shape))) if call.tensors else ""
    return Indexed(f"{like} -> {' '.join(names)}", tuple(zip(names, call["size"], strict=True)))


def _arange(call: Call) -> Indexed:
    start, end, step = call["start"] or 0, call["end"], call["step"] or 1
    if isinstance(end, bool):
        raise NotationError(f"{call.op} is called with a truth value")
    counted = all(type(number) is int for number in (start, end, step))
    if not counted and (call["dtype"] or torch.float32).is_floating_point is False:
        raise NotationError(f"{call.op} of {start}, {end}, {step} in whole numbers cuts them off first")
    length = -(-(end - start) // step) if counted else ceil((end - start) / step)  # as torch counts: in doubles
    return Indexed("-> k", (("k", max(0, length)),))


def _local_arange(form: LocalForm) -> Any:
    """A piece of a range is a range that starts later; half a step short of the next, as floats round."""
    if "k" not in form.pieces:
        return form.run()
    (lo, hi), start, step = form.pieces["k"], form.call["start"] or 0, form.call["step"] or 1
    whole = all(isinstance(number, int) for number in (start, step, form.call["end"]))
    end = start + hi * step if whole else start + (hi - 0.5) * step
    return form.emit("arange.start_step", start + lo * step, end, step, form.call["dtype"])


def _linspace(call: Call) -> Indexed:
    return Indexed("-> k!", (("k", call["steps"]),))


def _eye(call: Call) -> Indexed:
    n = call["n"]
    return Indexed("-> a! b!", (("a", n), ("b", n if call["m"] is None else call["m"])))


def _triangle_indices(call: Call) -> Indexed:
    """Row and column of every element on one side of a diagonal."""
    upper, offset = call.op == "triu_indices", call["offset"]
    count = 0
    for row in range(call["row"]):
        kept = min(max(row + offset + (0 if upper else 1), 0), call["col"])
        count += call["col"] - kept if upper else kept
    return Indexed("-> a! k!", (("a", 2), ("k", count)))


def shape_sample(*rest: Any) -> Sample:
    """A size, then the same further arguments each time."""
    return lambda rng: (random_shape(rng), *rest)


def _range_sample(rng: Random) -> Args:
    return rng.choice(((1, 12, 2), (0, 7, 1), (5, -4, -2), (0.0, 1.0, 0.25), (1.5, 4.0, 1)))


def like_sample(rng: Random) -> Args:
    """A tensor to be like, and a size."""
    return real(*random_shape(rng)), random_shape(rng)


_constant = partial(OpSpec, flops=0, smooth=False)
_range = partial(OpSpec, flops=0, smooth=False, dtype=Dtype.NUMBER, local=_local_arange)

OPS: tuple[OpSpec, ...] = (
    _constant("zeros", sized, shape_sample(), overloads=("ones",), follows=SIZED),
    _constant("full", sized, lambda rng: (random_shape(rng), rng.choice((0.5, 2))), follows=SIZED, dtype=Dtype.NUMBER),
    _constant("new_zeros", sized, like_sample, overloads=("new_ones",), follows=SIZED, dtype=Dtype.FIRST),
    _constant("new_full", sized, lambda rng: (*like_sample(rng), 0.5), follows=SIZED, dtype=Dtype.FIRST),
    _constant("zeros_like", "... -> ...", {}, overloads=("ones_like",), dtype=Dtype.FIRST),
    _constant("full_like", "... -> ...", {"fill_value": (0.5,)}, dtype=Dtype.FIRST),
    _range("arange", _arange, lambda rng: (rng.choice((rng.randint(1, 7), 4.5)),)),
    _range("arange.start", _arange, lambda rng: (2, rng.randint(3, 9))),
    _range("arange.start_step", _arange, _range_sample),
    _constant("linspace", _linspace, lambda rng: (0, rng.choice((1, 1.5)), rng.randint(1, 5)), overloads=("logspace",),
              dtype=Dtype.FLOAT),
    _constant("eye", _eye, lambda rng: (rng.randint(1, 5),)),
    _constant("eye.m", _eye, lambda rng: (rng.randint(1, 5), 3)),
    _constant("scalar_tensor", "-> ", lambda rng: (0.5,)),
    _constant("tril_indices", _triangle_indices, lambda rng: (rng.randint(1, 4), rng.randint(1, 4), rng.randint(-2, 2)),
              overloads=("triu_indices",), dtype=Dtype.INT64),
)  # fmt: skip
