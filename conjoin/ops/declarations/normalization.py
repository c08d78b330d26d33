"""Normalisation: statistics over some dims, which must be whole or are reduced by the expansion."""

from __future__ import annotations

from functools import partial
from math import prod
from random import Random
from typing import Any

import torch

from conjoin.ops.aten import CAST
from conjoin.ops.composites import BATCH_MOMENTS, BATCH_NORM_BY_PIECES, MEAN_AND_VARIANCE, NORMALIZE_CHANNELS
from conjoin.ops.declarations.by_parts import norm_by_parts
from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import LocalForm, local_sizes
from conjoin.ops.notation import NotationError
from conjoin.ops.samples import Sample, real
from conjoin.ops.spec import Args, Call, Indexed, KernelBytes, OpSpec, Shapes, output_types


def _uses_batch(call: Call) -> bool:
    """Whether the statistics are those of this batch, not the running ones."""
    return call["running_mean"] is None or bool(call["training"])


def _batch_norm(call: Call) -> Indexed:
    """In training the statistics are over batch and space, which are whole; in eval every element is on its own."""
    batch = _uses_batch(call)
    mark = "!" if batch else ""
    x = " ".join([f"n{mark}", "c", *(f"s{i}{mark}" for i in range(len(call["input"].shape) - 2))])
    if call.op == "batch_norm":
        if batch and call["running_mean"] is not None:
            raise NotationError("batch_norm in training writes to its running statistics")
        return Indexed(f"{x}{', c' * (len(call.tensors) - 1)} -> {x}")
    if not batch and call.op.endswith("functional"):
        raise NotationError(f"{call.op} out of training hands its running statistics on")
    saved = ["c", "c"] if batch else ["none", "none"]
    moved = ["c", "c"] if call.op.endswith("functional") else []
    return Indexed(f"{x}{', c' * (len(call.tensors) - 1)} -> {', '.join([x, *saved, *moved])}", (("none", 0),))


def _batch_norm_sample(*flags: bool, statistics: bool = True) -> Sample:
    def sample(rng: Random) -> Args:
        c = rng.randint(1, 4)
        x = real(rng.randint(2, 4), c, *(rng.randint(1, 4) for _ in range(rng.choice((0, 1, 2)))))
        affine = rng.choice(((real(c), real(c)), (None, None)))
        running = (real(c), real(c)) if statistics else ()
        return (x, *affine, *running, *flags, 0.1, 1e-5)

    return sample


def _plain_sample(rng: Random) -> Args:
    """In evaluation, or without running statistics."""
    x, weight, bias, *rest = _batch_norm_sample(False)(rng)
    return (x, weight, bias, *rng.choice((rest, (None, None, True, *rest[3:]))), False)


def batch_norm_expansion(form: LocalForm) -> Any:
    """Training-mode batch norm from moments over the batch: those may be partial, so the batch may be split."""
    if not _uses_batch(form.call):
        return form.run()
    x, emit, eps = form["input"], form.emit, form.call["eps"]
    known = emit(MEAN_AND_VARIANCE, emit(BATCH_MOMENTS, x))
    y = emit(NORMALIZE_CHANNELS, x, known, form["weight"], form["bias"], eps)
    if form.call.op == "batch_norm":
        return y
    constant = emit("detach", known)
    mean, var = (emit("select.int", constant, 0, row) for row in range(2))
    scale = emit("rsqrt", emit("add.Tensor", var, eps))
    types = output_types(form.spec, form.call)
    saved = tuple(emit(CAST, each, type.dtype) for each, type in zip((mean, scale), types[1:3], strict=True))
    if not form.call.op.endswith("functional"):
        return y, *saved
    count = form.call["input"].num_elements // max(types[1].shape[0], 1)
    unbiased = emit("mul.Tensor", var, count / max(count - 1, 1))
    return y, *saved, _moved(form, "running_mean", mean), _moved(form, "running_var", unbiased)


def _moved(form: LocalForm, name: str, new: Any) -> Any:
    """A running statistic after this batch."""
    momentum, dtype = form.call["momentum"], form.call[name].dtype
    return form.emit("lerp.Scalar", form[name], form.emit(CAST, new, dtype), momentum)


def _by_pieces(call: Call) -> Indexed:
    """Each piece of the batch is normalized on its own; the running statistics are those that the first one leaves, to
    which the others add nothing."""
    x = " ".join(["(p n!)", "c", *(f"s{i}!" for i in range(len(call["input"].shape) - 2))])
    return Indexed(f"{x}{', c' * (len(call.tensors) - 1)} -> {x}, m! c", (("m", 2), ("p", call["pieces"])))


def _local_by_pieces(form: LocalForm) -> Any:
    """The pieces here; unless the first is among them, the running statistics are somebody else's."""
    y, moved = form.run()
    is_first = form.pieces.get("p", (0, 0))[0] == 0
    return y, moved if is_first else form.emit("zeros_like", moved)


def _by_pieces_sample(rng: Random) -> Args:
    c, pieces = rng.randint(1, 4), rng.randint(2, 4)
    x = real(pieces * rng.randint(2, 3), c, *(rng.randint(1, 4) for _ in range(rng.choice((0, 1, 2)))))
    affine = rng.choice(((real(c), real(c)), (None, None)))
    running = rng.choice(((real(c), real(c)), (None, None)))
    return x, *affine, *running, 0.1, 1e-5, pieces


def _moments(call: Call) -> Indexed:
    """Averages over batch and space of x and of its square."""
    space = "".join(f" s{i}~" for i in range(len(call["x"].shape) - 2))
    return Indexed(f"n~ c{space} -> m! c", (("m", 2),))


def _moments_sample(rng: Random) -> Args:
    return _batch_norm_sample()(rng)[:1]


def _normalize(call: Call) -> str:
    """Every element on its own, once mean and variance are known."""
    x = " ".join(["n", "c", *(f"s{i}" for i in range(len(call["x"].shape) - 2))])
    return f"{x}, m! c{', c' * (len(call.tensors) - 2)} -> {x}"


def _normalize_sample(rng: Random) -> Args:
    x, weight, bias, *_ = _batch_norm_sample()(rng)
    return x, real(2, x.shape[1]), weight, bias, 1e-5


def _trailing(call: Call, outputs: str = "{x}") -> str:
    """The last dims, as many as `normalized_shape` has, are whole."""
    rank, width = len(call.tensors[0].shape), len(call["normalized_shape"])
    if not width:
        raise NotationError(f"{call.op} is called for no dim at all")
    x = " ".join(f"d{i}!" if i >= rank - width else f"d{i}" for i in range(rank))
    vector = " ".join(f"d{i}!" for i in range(rank - width, rank))
    stats = " ".join([f"d{i}" for i in range(rank - width)] + ["1"] * width)
    return f"{', '.join([x] + [vector] * (len(call.tensors) - 1))} -> {outputs.format(x=x, stats=stats)}"


def _affine_terms(call: Call) -> str:
    """Linear in weight and bias together; a bias alone is added to what no partial sum shares."""
    return "weight + bias" if call["weight"] is not None else ""


def _layer_norm_sample(num_affine: int, always: bool = False) -> Sample:
    def sample(rng: Random) -> Args:
        shape = tuple(rng.randint(2, 5) for _ in range(rng.randint(1, 4)))
        width = rng.randint(1, min(2, len(shape)))
        given = real(*shape[-width:])
        affine = [given if always or rng.random() < 0.7 else None for _ in range(num_affine)]
        return (real(*shape), shape[-width:], *affine, 1e-5)

    return sample


def _group_norm(call: Call) -> Indexed:
    """Groups of channels may be split; the native form also gives mean and scale of every group."""
    spatial = " ".join(f"s{i}!" for i in range(len(call.tensors[0].shape) - 2))
    vectors = ", (g c!)" * (len(call.tensors) - 1)
    statistics = ", n g, n g" if call.op == "native_group_norm" else ""
    groups = call["num_groups"] or call["group"]
    return Indexed(f"n (g c!) {spatial}{vectors} -> n (g c!) {spatial}{statistics}", (("g", groups),))


def _group_norm_sample(rng: Random) -> Args:
    g, c = rng.randint(1, 3), rng.randint(1, 3)
    affine = rng.choice(((real(g * c), real(g * c)), (None, None)))
    return real(rng.randint(1, 3), g * c, *(3,) * rng.randint(0, 2)), g, *affine, 1e-5


def _native_group_sample(rng: Random) -> Args:
    x, g, weight, bias, eps = _group_norm_sample(rng)
    n, c = x.shape[:2]
    return x, weight, bias, n, c, x.num_elements // (n * c), g, eps


def _local_native_group(form: LocalForm) -> Any:
    """Its sizes are attributes, which follow the pieces."""
    sizes = local_sizes(form.space, form.pieces)
    return form.run(
        input=form.emit("contiguous", form["input"]), N=sizes["n"], C=sizes["g"] * sizes["c"], group=sizes["g"]
    )


def _instance_norm(call: Call) -> str:
    """Statistics of every sample and channel over space."""
    if call["running_mean"] is not None:
        raise NotationError("instance_norm with running statistics writes to them")
    x = " ".join(["n", "c", *(f"s{i}!" for i in range(len(call["input"].shape) - 2))])
    return f"{x}{', c' * (len(call.tensors) - 1)} -> {x}"


def _instance_norm_sample(rng: Random) -> Args:
    c = rng.randint(1, 4)
    x = real(rng.randint(1, 3), c, *(rng.randint(2, 4) for _ in range(rng.randint(1, 2))))
    affine = rng.choice(((real(c), real(c)), (None, None)))
    return x, *affine, None, None, True, 0.1, 1e-5, False


def _weight_norm(call: Call) -> str:
    """Norms over all dims but one; to torch -1 is no dim."""
    if call["dim"] == -1:
        raise NotationError(f"{call.op} is called with dim -1, the norm of all")
    v, dim = call["v"].shape, call.dim()
    names = " ".join("k" if i == dim else f"d{i}!" for i in range(len(v)))
    norms = " ".join("k" if i == dim else "1" for i in range(len(v)))
    return f"{names}, {norms} -> {names}"


def _weight_norm_sample(rng: Random) -> Args:
    shape = tuple(rng.randint(2, 4) for _ in range(3))
    dim = rng.choice((0, 2))
    return real(*shape), real(*(n if i == dim else 1 for i, n in enumerate(shape))), dim


def _rms_bytes(call: Call, shapes: Shapes) -> KernelBytes:
    """One number for each row; meta runs it spelled out, and keeps a copy of the rows in float32."""
    rows = prod(shapes[0]) // max(prod(call["normalized_shape"]), 1)
    return KernelBytes(rows * torch.float32.itemsize, keeps_operands=True)


_STATISTICS = ("running_mean", "running_var")
_THREE = (Dtype.FIRST,) * 3
_FIVE = (*_THREE, Dtype.LAST, Dtype.LAST)
"""The new running statistics are as wide as the old ones, which come last."""
_batch = partial(
    OpSpec, flops=8, domain=(0.1, 2.0), constants=_STATISTICS, kernels="batch norm", by_order=True,
    blocks=lambda call: call.tensors[0].shape[1],
)  # fmt: skip
_norm = partial(OpSpec, dtype=Dtype.FIRST, flops=8, kernels="norm")
_of_features = partial(_norm, by_parts=norm_by_parts)

OPS: tuple[OpSpec, ...] = (
    _batch("_native_batch_norm_legit_functional", _batch_norm, _batch_norm_sample(True), dtype=_FIVE,
           expansion=batch_norm_expansion),
    _batch("_native_batch_norm_legit.no_stats", _batch_norm, _batch_norm_sample(True, statistics=False),
           dtype=_THREE, expansion=batch_norm_expansion, constants=()),
    _batch("_native_batch_norm_legit_no_training", _batch_norm, _batch_norm_sample(), dtype=_THREE),
    _batch("batch_norm", _batch_norm, _plain_sample, dtype=Dtype.FIRST, expansion=batch_norm_expansion),
    _batch(BATCH_NORM_BY_PIECES, _by_pieces, _by_pieces_sample, dtype=(Dtype.FIRST, Dtype.LAST),
           follows={"pieces": "p"}, local=_local_by_pieces),
    OpSpec(BATCH_MOMENTS, _moments, _moments_sample, dtype=Dtype.FLOAT64, flops=4, num_kernels=(5, 6)),
    OpSpec(MEAN_AND_VARIANCE, "m! c -> m! c", lambda rng: (real(2, rng.randint(1, 5)),), dtype=Dtype.FIRST, flops=2,
           num_kernels=(3, 2)),
    _norm(NORMALIZE_CHANNELS, _normalize, _normalize_sample, terms=_affine_terms, flops=4, domain=(0.1, 2.0),
          family="elementwise", num_kernels=(6, 10), backward_passes=4, kernels=""),
    _of_features("layer_norm", _trailing, _layer_norm_sample(2), terms=_affine_terms),
    _of_features("native_layer_norm", lambda call: _trailing(call, "{x}, {stats}, {stats}"),
                 _layer_norm_sample(2, True)),
    _of_features("rms_norm", _trailing, _layer_norm_sample(1), terms="weight", flops=6, gpu_bytes=_rms_bytes),
    _of_features("_fused_rms_norm", lambda call: _trailing(call, "{x}, {stats}"), _layer_norm_sample(1), flops=6,
                 dtype=(Dtype.FIRST, Dtype.WIDE)),
    _norm("group_norm", _group_norm, _group_norm_sample, follows={"num_groups": "g"}, terms=_affine_terms),
    _norm("native_group_norm", _group_norm, _native_group_sample, local=_local_native_group),
    _norm("instance_norm", _instance_norm, _instance_norm_sample, terms=_affine_terms),
    _norm("_weight_norm", _weight_norm, _weight_norm_sample, terms="g", flops=4, kernels=""),
)  # fmt: skip
