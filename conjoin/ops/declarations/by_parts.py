"""Operators that take a dim whole, composed of others that need not: the dim may then be split.

    z = x - peak(x)                                       peak is P(max), and constant
    softmax(x) = exp(z) / sum(exp(z))                     the sum is P
    log_softmax(x) = z - log(sum(exp(z)))
    cross_entropy(x, t) = w[t] (log(sum(exp(z))) - z[t])  z[t] is a lookup, P where classes are split
    layer_norm(x) = (x - m) / sqrt(v + eps)               m and v are averages, v of what is left of x

All of it is computed in float32 or wider, as torch's own kernels compute inside.
"""

from __future__ import annotations

from typing import Any

import torch

from conjoin.ops.aten import CAST
from conjoin.ops.composites import PEAK, TOKEN_ENTROPY, TOKEN_LIKELIHOOD
from conjoin.ops.local import LocalForm
from conjoin.ops.spec import output_types
from conjoin.ops.tensor_type import TensorType

_OF_TOKENS = (TOKEN_ENTROPY, TOKEN_LIKELIHOOD)


def softmax_by_parts(form: LocalForm) -> Any:
    """Softmax, or its logarithm, along a dim."""
    emit, dims = form.emit, (form.call.dim(),)
    z, _ = _lowered(form, dims)
    if "log" in form.call.op:
        return _as_declared(form, emit("sub.Tensor", z, _log_sum(form, z, dims)))
    raised = emit("exp", z)
    return _as_declared(form, emit("div.Tensor", raised, emit("sum.dim_IntList", raised, dims, True)))


def log_sum_by_parts(form: LocalForm) -> Any:
    """The logarithm of the sum of exponentials over some dims."""
    dims = form.call.dims(empty=False)
    z, peak = _lowered(form, dims)
    total = form.emit("add.Tensor", _log_sum(form, z, dims), peak)
    if not form.call["keepdim"]:
        total = form.emit("reshape", total, output_types(form.spec, form.call)[0].shape)
    return _as_declared(form, total)


def entropy_by_parts(form: LocalForm) -> Any:
    """Cross-entropy of scores whose classes are split, with all that torch lets it have."""
    emit, classes = form.emit, (_class_dim(form),)
    z, _ = _lowered(form, classes)
    total = _log_sum(form, z, classes)
    smoothing, num_classes = form.call["label_smoothing"], _scores(form).shape[classes[0]]
    if form.call["target"].dtype.is_floating_point:
        aims = emit(CAST, form["target"], _dtype(form))
        if smoothing:
            aims = emit("add.Tensor", emit("mul.Tensor", aims, 1 - smoothing), smoothing / num_classes)
        return _reduced(form, _missed(form, aims, z, total))
    losses = emit("sub.Tensor", total, _picked(form, z))
    losses = _weighed(form, losses)
    if smoothing:
        spread = emit("mul.Tensor", _missed(form, None, z, total), smoothing / num_classes)
        losses = emit("add.Tensor", emit("mul.Tensor", losses, 1 - smoothing), spread)
    return _reduced(form, losses)


def likelihood_by_parts(form: LocalForm) -> Any:
    """The negative of the scores of targets, where classes are split."""
    return _reduced(form, _weighed(form, form.emit("neg", _picked(form, _wide(form, form.call.operand_names[0])))))


def norm_by_parts(form: LocalForm) -> Any:
    """Layer norm and RMS norm of features that are split; mean and scale too where the operator gives them.

    Without an eps it is that of the dtype a graph is run in, which a composition cannot say.
    """
    emit, x, call = form.emit, _wide(form, "input"), form.call
    if call["eps"] is None:
        return form.run()
    rank = len(call["input"].shape)
    dims = tuple(range(rank - len(call["normalized_shape"]), rank))
    centred = "rms" not in call.op
    mean = emit("mean.dim", x, dims, True) if centred else None
    left = emit("sub.Tensor", x, mean) if centred else x
    square = emit("mean.dim", emit("mul.Tensor", left, left), dims, True)
    scale = emit("rsqrt", emit("add.Tensor", square, call["eps"]))
    y = emit("mul.Tensor", left, scale)
    for name, op in (("weight", "mul.Tensor"), ("bias", "add.Tensor")):
        if call[name] is not None:
            y = emit(op, y, form[name])
    types = output_types(form.spec, call)
    if len(types) == 1:
        return _as_declared(form, y)
    made = (y, emit("detach", mean), emit("detach", scale)) if centred else (y, scale)
    return tuple(emit(CAST, each, type.dtype) for each, type in zip(made, types, strict=True))


def _dtype(form: LocalForm) -> torch.dtype:
    """What is computed in."""
    return torch.promote_types(form.call.tensors[0].dtype, torch.float32)


def _wide(form: LocalForm, name: str) -> Any:
    x, dtype = form[name], form.call["dtype"] if isinstance(form.call["dtype"], torch.dtype) else _dtype(form)
    return x if form.call[name].dtype == dtype else form.emit(CAST, x, dtype)


def _as_declared(form: LocalForm, y: Any) -> Any:
    """In the dtype that the operator gives."""
    wanted = output_types(form.spec, form.call)[0].dtype
    return y if wanted == _dtype(form) else form.emit(CAST, y, wanted)


def _lowered(form: LocalForm, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """The scores with their peak taken off, and the peak."""
    x = _wide(form, form.call.operand_names[0])
    peak = form.emit(PEAK, x, dims)
    return form.emit("sub.Tensor", x, peak), peak


def _log_sum(form: LocalForm, z: Any, dims: tuple[int, ...]) -> Any:
    """The logarithm of the sum of exponentials along dims that stay."""
    return form.emit("log", form.emit("sum.dim_IntList", form.emit("exp", z), dims, True))


def _class_dim(form: LocalForm) -> int:
    """The second dim, and of tokens the last."""
    rank = len(_scores(form).shape)
    return rank - 1 if form.call.op in _OF_TOKENS else min(1, rank - 1)


def _scores(form: LocalForm) -> TensorType:
    """The first operand, which operators call by different names."""
    return form.call.tensors[0]


def _targets(form: LocalForm) -> tuple[Any, Any]:
    """Targets with the dim of classes, one long, those ignored set to the first class; and which are ignored."""
    shape = _scores(form).shape
    dim = _class_dim(form)
    targets = form.emit("reshape", form["target"], (*shape[:dim], 1, *shape[dim + 1 :]))
    ignored = form.emit("eq.Scalar", targets, form.call["ignore_index"])
    return form.emit("masked_fill.Scalar", targets, ignored, 0), ignored


def _picked(form: LocalForm, x: Any) -> Any:
    """The scores of the targets."""
    return form.emit("gather", x, _class_dim(form), _targets(form)[0])


def weights_of_targets(form: LocalForm) -> Any:
    """What each target counts: its class's weight, or one, and nothing where it is ignored."""
    emit, (targets, ignored) = form.emit, _targets(form)
    if form.call["weight"] is None:
        return emit(CAST, emit("logical_not", ignored), _dtype(form))
    shape, dim = _scores(form).shape, _class_dim(form)
    chosen = emit("index_select", _wide(form, "weight"), 0, emit("reshape", targets, (-1,)))
    chosen = emit("reshape", chosen, (*shape[:dim], 1, *shape[dim + 1 :]))
    return emit("masked_fill.Scalar", chosen, ignored, 0)


def _weighed(form: LocalForm, losses: Any) -> Any:
    losses = form.emit("masked_fill.Scalar", losses, _targets(form)[1], 0)
    return losses if form.call["weight"] is None else form.emit("mul.Tensor", losses, weights_of_targets(form))


def _missed(form: LocalForm, aims: Any, z: Any, total: Any) -> Any:
    """The sum over classes of aims × weights × (total - z), where there are aims; else for all classes alike."""
    emit, dim, rank = form.emit, _class_dim(form), len(_scores(form).shape)
    missed = emit("sub.Tensor", total, z)
    missed = missed if aims is None else emit("mul.Tensor", missed, aims)
    if form.call["weight"] is not None:
        along = tuple(-1 if i == dim else 1 for i in range(rank))
        missed = emit("mul.Tensor", missed, emit("reshape", _wide(form, "weight"), along))
    missed = emit("sum.dim_IntList", missed, (dim,), True)
    return missed if aims is not None else emit("masked_fill.Scalar", missed, _targets(form)[1], 0)


def _reduced(form: LocalForm, losses: Any) -> Any:
    """Kept by sample, added up, or divided by what the targets count together."""
    emit, shape, reduction = form.emit, _scores(form).shape, form.call["reduction"]
    dim = _class_dim(form)
    if reduction == 0:
        return _as_declared(form, emit("reshape", losses, shape[:dim] + shape[dim + 1 :]))
    total = emit("sum", losses)
    if reduction == 1 and form.call["target"].dtype.is_floating_point:
        total = emit("div.Tensor", total, _scores(form).num_elements / shape[dim])
    elif reduction == 1:
        total = emit("div.Tensor", total, emit("sum", weights_of_targets(form)))
    return _as_declared(form, total)
