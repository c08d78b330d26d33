"""Operators of our own: plain functions over torch, for facts that no single ATen overload states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn import functional

LINEAR_RELU = "conjoin::linear_relu"
EMBEDDING_BAG = "conjoin::embedding_bag"
RAGGED_EMBEDDING_BAG = "conjoin::ragged_embedding_bag"


class _LinearRelu(torch.autograd.Function):
    """On a GPU the product, the bias and the function are one kernel; elsewhere the function is applied in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if x.is_cuda:
            rows = torch.ops.aten._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t())
            y: Tensor = rows.view(*x.shape[:-1], weight.shape[0])
        else:
            y = functional.linear(x, weight, bias).relu_()
        ctx.save_for_backward(x, weight, y)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, y = ctx.saved_tensors  # type: ignore[attr-defined]
        needs = ctx.needs_input_grad  # type: ignore[attr-defined]
        g = torch.ops.aten.threshold_backward(gradients[0], y, 0)
        rows = g.reshape(-1, g.shape[-1])
        return (
            g @ weight if needs[0] else None,
            rows.t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None,
            rows.sum(0) if needs[2] else None,
        )


def linear_relu(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A linear layer and a ReLU at once: what is not positive is never written."""
    y: Tensor = _LinearRelu.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return y


def embedding_bag(
    weight: Tensor, indices: Tensor, per_sample_weights: Tensor | None, mode: str, padding_idx: int | None
) -> Tensor:
    """Bags of equal length, one a row of `indices`; ATen's own operator takes bags of any length by their offsets."""
    return functional.embedding_bag(
        indices, weight, mode=mode, per_sample_weights=per_sample_weights, padding_idx=padding_idx
    )


def ragged_embedding_bag(  # noqa: PLR0913 - what ATen asks for
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    mode: str,
    include_last_offset: bool,
    padding_idx: int | None,
) -> Tensor:
    """Bags of any length, cut out of `indices` at `offsets`; ATen's operator without its book-keeping outputs."""
    return functional.embedding_bag(
        indices, weight, offsets, mode=mode, per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset, padding_idx=padding_idx,
    )  # fmt: skip


def reshard_along_dim(x: Tensor, dim: int, axes: tuple[str, ...]) -> Tensor:
    """Partition and Combine: the value stays, only where its pieces lie along a dim changes."""
    return x


def reshard_whole(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """Replicate, Reduce and their inverses: the value stays, only what the devices along the axes hold changes."""
    return x


def reshard_at(x: Tensor, place: int, axes: tuple[str, ...]) -> Tensor:
    """Confine and Share: the value stays, only whether one place of the axes holds it or all do changes."""
    return x


def in_micro_batches(x: Tensor, dim: int, count: int) -> Tensor:
    """Pipeline and Batch: the value stays, only how many pieces of it are under way changes."""
    return x


PARTITION, COMBINE = "conjoin::partition", "conjoin::combine"
REPLICATE, REDUCE = "conjoin::replicate", "conjoin::reduce"
UNIFY, ASSIGN = "conjoin::unify", "conjoin::assign"
CONFINE, SHARE = "conjoin::confine", "conjoin::share"
PIPELINE, BATCH = "conjoin::pipeline", "conjoin::batch"
PARALLEL_OPS = (PARTITION, COMBINE, REPLICATE, REDUCE, UNIFY, ASSIGN, CONFINE, SHARE, PIPELINE, BATCH)
"""Unity's parallelization operators (its section 3.1), with those that close the table: B -> I (unify) and I -> P
(assign); I -> At(k) (confine) and At(k) -> I (share), for what only a part of the devices holds."""

COMPOSITES: dict[str, Callable[..., Tensor]] = {
    LINEAR_RELU: linear_relu,
    EMBEDDING_BAG: embedding_bag,
    RAGGED_EMBEDDING_BAG: ragged_embedding_bag,
    PARTITION: reshard_along_dim,
    COMBINE: reshard_along_dim,
    REPLICATE: reshard_whole,
    REDUCE: reshard_whole,
    UNIFY: reshard_whole,
    ASSIGN: reshard_whole,
    CONFINE: reshard_at,
    SHARE: reshard_at,
    PIPELINE: in_micro_batches,
    BATCH: in_micro_batches,
}
