"""Losses: a number per sample, or its sum or mean over the batch."""

from __future__ import annotations

from functools import partial
from math import prod
from random import Random
from typing import Any

from conjoin.ops.aten import CAST
from conjoin.ops.composites import TOKEN_ENTROPY, TOKEN_LIKELIHOOD
from conjoin.ops.declarations.by_parts import entropy_by_parts, likelihood_by_parts, weights_of_targets
from conjoin.ops.dtypes import Dtype
from conjoin.ops.local import LocalForm
from conjoin.ops.notation import NotationError, broadcast_names, broadcast_shape
from conjoin.ops.samples import Sample, integer, random_shape, real
from conjoin.ops.spec import Args, Call, KernelBytes, OpSpec, Shapes

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduction(call: Call) -> int:
    if call["reduction"] not in (_NONE, _MEAN, _SUM):
        raise NotationError(f"{call.op} is called with reduction {call['reduction']}, which torch takes for none")
    return int(call["reduction"])


def _pairwise(call: Call) -> str:
    """Elementwise on prediction and target, which broadcast; then kept, averaged or summed."""
    mark = "~" if _reduction(call) == _MEAN else ""
    full = broadcast_shape(tensor.shape for tensor in call.tensors)
    names = [f"d{i}{mark}" for i in range(len(full))]
    operands = ", ".join(broadcast_names(names, tensor.shape, full) for tensor in call.tensors)
    return f"{operands} -> {' '.join(names) if _reduction(call) == _NONE else ''}"


def _by_sample(call: Call) -> str:
    """Vectors n c compared along c, which is whole, and a label for each sample where there is one."""
    mark = "~" if _reduction(call) == _MEAN else ""
    batch = f"n{mark}" * (len(call.tensors[0].shape) > 1)
    sides = [f"{batch} c!" if len(tensor.shape) == len(call.tensors[0].shape) else batch for tensor in call.tensors]
    return f"{', '.join(sides)} -> {batch if _reduction(call) == _NONE else ''}"


def _classified(call: Call) -> str:
    """Scores n c …, targets n …: classes are whole; so are samples in a mean over those that count."""
    scores, target = call["self"].shape, call["target"]
    probabilities = target.dtype.is_floating_point
    mark = "" if _reduction(call) != _MEAN else "~" if probabilities else "!"
    batch = [f"n{mark}"] if len(scores) > 1 else []
    space = [f"s{i}{mark}" for i in range(len(scores) - 2)]
    left = " ".join([*batch, "c!", *space])
    labels = left if probabilities else " ".join([*batch, *space])
    weight = ", c!" if call["weight"] is not None else ""
    out = " ".join([*batch, *space]) if _reduction(call) == _NONE else ""
    return f"{left}, {labels}{weight} -> {out}"


def _of_tokens(call: Call) -> str:
    """As `_classified`, with classes last."""
    mark = "!" if _reduction(call) == _MEAN else ""
    tokens = " ".join(f"d{i}{mark}" for i in range(len(call["target"].shape)))
    weight = ", c!" if call["weight"] is not None else ""
    return f"{tokens} c!, {tokens}{weight} -> {tokens if _reduction(call) == _NONE else ''}"


def _margins(call: Call) -> str:
    """Scores n c against the true class; every sample counts."""
    mark = "~" if _reduction(call) == _MEAN else ""
    batch = f"n{mark}" * (len(call["self"].shape) > 1)
    weight = ", c!" if call["weight"] is not None else ""
    return f"{batch} c!, {batch}{weight} -> {batch if _reduction(call) == _NONE else ''}"


def _aligned(call: Call) -> str:
    """Scores t n c of all steps, padded targets n s, and the lengths of both; targets one after the other are whole."""
    if len(call["log_probs"].shape) != 3 or len(call["targets"].shape) != 2:
        raise NotationError(f"{call.op} is declared for scores of 3 dims and targets of 2, one row a sample")
    sample = "n~" if _reduction(call) == _MEAN else "n"
    return f"t! {sample} c!, {sample} s!, {sample}, {sample} -> {sample if _reduction(call) == _NONE else ''}"


def classified_expansion(form: LocalForm) -> Any:
    """The mean as a sum over the samples that count, divided by their number: both sums may be partial."""
    emit, call, dtype = form.emit, form.call, form.call.tensors[0].dtype
    if _reduction(call) != _MEAN or call["target"].dtype.is_floating_point:
        return form.run()
    total = form.run(reduction=_SUM)
    if call["weight"] is not None:
        return emit("div.Tensor", total, emit(CAST, emit("sum", weights_of_targets(form)), dtype))
    counted = emit("ne.Scalar", form["target"], call["ignore_index"])
    count = emit("sum", emit(CAST, counted, dtype))
    return emit("div.Tensor", total, count)


def _pair_sample(*before: Any, after: tuple[Any, ...] = ()) -> Sample:
    """Two tensors of one shape, attributes before the reduction, the reduction, attributes after it."""

    def sample(rng: Random) -> Args:
        shape = random_shape(rng, 1, 3)
        return real(*shape), real(*shape), *before, rng.randrange(3), *after

    return sample


def _bce_sample(num_weights: int) -> Sample:
    def sample(rng: Random) -> Args:
        shape = random_shape(rng, 1, 3)
        weights = (rng.choice((None, real(shape[-1]))) for _ in range(num_weights))
        return real(*shape), real(*shape), *weights, rng.randrange(3)

    return sample


def _kl_sample(rng: Random) -> Args:
    return *_pair_sample()(rng), rng.random() < 0.5


def _class_sample(rng: Random) -> Args:
    n, c = rng.randint(1, 5), rng.randint(2, 5)
    space = tuple(rng.randint(1, 3) for _ in range(rng.choice((0, 0, 1, 2))))
    return real(n, c, *space), integer(n, *space), rng.choice((real(c), None)), rng.randrange(3), rng.choice((1, -100))


def _entropy_sample(rng: Random) -> Args:
    scores, labels, weight, reduction, ignored = _class_sample(rng)
    if rng.random() < 0.3:
        labels, ignored = real(*scores.shape), -100
    return scores, labels, weight, reduction, ignored, rng.choice((0.0, 0.1))


def _nll_sample(rng: Random) -> Args:
    n, c = rng.randint(1, 5), rng.randint(2, 5)
    return real(n, c), integer(n), rng.choice((None, real(c))), rng.randrange(3), rng.choice((1, -100))


def _token_sample(rng: Random) -> Args:
    b, s, c = (rng.randint(2, 5) for _ in range(3))
    return real(b, s, c), integer(b, s), rng.choice((real(c), None)), rng.randrange(3), rng.choice((1, -100))


def _multi_margin_sample(rng: Random) -> Args:
    n, c = rng.randint(1, 4), rng.randint(2, 4)
    return real(n, c), integer(n), 1, 1.0, rng.choice((None, real(c))), rng.randrange(3)


def _poisson_sample(rng: Random) -> Args:
    shape = random_shape(rng, 1, 3)
    return real(*shape), real(*shape), rng.random() < 0.5, False, 1e-8, rng.randrange(3)


def _labels_sample(rng: Random) -> Args:
    n, c = rng.randint(1, 4), rng.randint(2, 4)
    return real(n, c), integer(n, c), rng.randrange(3)


def _ranking_sample(rng: Random) -> Args:
    shape = random_shape(rng, 1, 2)
    return (real(*shape),) * 3 + (0.1, rng.randrange(3))


def _triplet_sample(rng: Random) -> Args:
    x = real(rng.randint(1, 4), rng.randint(1, 4))
    return x, x, x, 0.5, 2.0, 1e-6, False, rng.randrange(3)


def _cosine_sample(rng: Random) -> Args:
    n, x = rng.randint(1, 4), rng.randint(1, 4)
    return real(n, x), real(n, x), real(n), 0.1, rng.randrange(3)


def _aligned_sample(rng: Random) -> Args:
    n, c = rng.randint(1, 4), rng.randint(3, 5)
    return real(6, n, c), integer(n, 3), integer(n), integer(n), 0, rng.randrange(3), True


def _aligned_bytes(call: Call, shapes: Shapes) -> KernelBytes:
    """Likelihoods of all places in all targets at all steps are kept, and their counterparts made in the backward pass;
    targets one after the other are taken to be equally long."""
    (steps, *samples, _), targets = shapes[:2]
    count = prod(samples)
    longest = targets[-1] if len(targets) == 2 else -(-targets[0] // max(count, 1))
    likelihoods = count * steps * (2 * longest + 1) * call.tensors[0].dtype.itemsize
    return KernelBytes(likelihoods, likelihoods)


_PROBABILITY = (0.1, 0.9)
_loss = partial(OpSpec, dtype=Dtype.PROMOTE)
_classes = partial(OpSpec, dtype=Dtype.FIRST, constants=("weight",), flops=4)
_likelihood = partial(_classes, expansion=classified_expansion, by_parts=likelihood_by_parts)

OPS: tuple[OpSpec, ...] = (
    _loss("mse_loss", _pairwise, _pair_sample(), flops=3),
    _loss("l1_loss", _pairwise, _pair_sample(), flops=3),
    _loss("smooth_l1_loss", _pairwise, _pair_sample(after=(1.0,)), flops=4, overloads=("huber_loss",)),
    _loss("soft_margin_loss", _pairwise, _pair_sample(), flops=12, constants=("target",)),
    _loss("hinge_embedding_loss", _pairwise, _pair_sample(1.0), flops=4, constants=("target",)),
    _loss("poisson_nll_loss", _pairwise, _poisson_sample, flops=12, domain=_PROBABILITY),
    _loss("margin_ranking_loss", _pairwise, _ranking_sample, flops=4),
    _loss("triplet_margin_loss", _by_sample, _triplet_sample, flops=8),
    _loss("multilabel_margin_loss", _by_sample, _labels_sample, flops=4, dtype=Dtype.FIRST),
    _loss("cosine_embedding_loss", _by_sample, _cosine_sample, flops=8, constants=("target",)),
    _loss("kl_div", _pairwise, _kl_sample, flops=12, domain=_PROBABILITY),
    _loss("binary_cross_entropy", _pairwise, _bce_sample(1), flops=20, domain=_PROBABILITY, constants=("weight",),
          kernels="softmax"),
    _loss("binary_cross_entropy_with_logits", _pairwise, _bce_sample(2), flops=20, domain=_PROBABILITY,
          constants=("weight", "pos_weight"), kernels="softmax"),
    _likelihood("nll_loss_nd", _classified, _class_sample),
    _likelihood("nll_loss", _classified, _nll_sample),
    _likelihood("nll_loss2d", _classified, lambda rng: (real(3, 4, 2, 3), integer(3, 2, 3), None, rng.randrange(3), 1)),
    _classes("cross_entropy_loss", _classified, _entropy_sample, expansion=classified_expansion, domain=_PROBABILITY,
             by_parts=entropy_by_parts, kernels="softmax"),
    _likelihood(TOKEN_LIKELIHOOD, _of_tokens, _token_sample),
    _classes(TOKEN_ENTROPY, _of_tokens, lambda rng: (*_token_sample(rng), rng.choice((0.0, 0.1))),
             expansion=classified_expansion, domain=_PROBABILITY, by_parts=entropy_by_parts, kernels="softmax"),
    _loss("ctc_loss.Tensor", _aligned, _aligned_sample, flops=30, dtype=Dtype.FIRST, gpu_bytes=_aligned_bytes),
    _classes("multi_margin_loss", _margins, _multi_margin_sample),
)  # fmt: skip
