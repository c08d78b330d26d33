"""Operators of our own: plain functions over torch, for facts that no single ATen overload states."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.ops.aggregation import aggregate, aggregate_once, edge_softmax, graph_attention
from conjoin.ops.attention_blocks import attention_from_row
from conjoin.ops.attention_sums import attention_peak, attention_sums
from conjoin.ops.batch_statistics import batch_moments, batch_norm_by_pieces, mean_and_variance, normalize_channels
from conjoin.ops.experts import expert_linear, expert_network, routed_experts
from conjoin.ops.fused_layer import linear_relu
from conjoin.ops.scaled_layer import scaled_linear
from conjoin.ops.writes import overwrite, strided_view, strided_write

LINEAR_RELU = "conjoin::linear_relu"
SCALED_LINEAR = "conjoin::scaled_linear"
BATCH_MOMENTS = "conjoin::batch_moments"
MEAN_AND_VARIANCE = "conjoin::mean_and_variance"
NORMALIZE_CHANNELS = "conjoin::normalize_channels"
BATCH_NORM_BY_PIECES = "conjoin::batch_norm_by_pieces"
EMBEDDING_BAG = "conjoin::embedding_bag"
RAGGED_EMBEDDING_BAG = "conjoin::ragged_embedding_bag"
EXPERT_LINEAR, EXPERT_NETWORK = "conjoin::expert_linear", "conjoin::expert_network"
ROUTED_EXPERTS = "conjoin::routed_experts"
EXPERT_LAYERS = (EXPERT_LINEAR, EXPERT_NETWORK, ROUTED_EXPERTS)
AGGREGATE, EDGE_SOFTMAX = "conjoin::aggregate", "conjoin::edge_softmax"
GRAPH_ATTENTION, AGGREGATE_ONCE = "conjoin::graph_attention", "conjoin::aggregate_once"
PEAK = "conjoin::peak"
RING_ATTENTION = "conjoin::ring_attention"
ATTENTION_FROM_ROW = "conjoin::attention_from_row"
ATTENTION_PEAK, ATTENTION_SUMS = "conjoin::attention_peak", "conjoin::attention_sums"
TOKEN_ENTROPY, TOKEN_LIKELIHOOD = "conjoin::token_entropy", "conjoin::token_likelihood"
OVERWRITE, STRIDED_VIEW, STRIDED_WRITE = "conjoin::overwrite", "conjoin::strided_view", "conjoin::strided_write"


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


def token_entropy(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, label_smoothing: float
) -> Tensor:
    """Cross-entropy of the scores of every token, classes last; ATen's own wants tokens in one dim, or classes second.
    """
    flat = scores.flatten(0, -2), target.flatten(), weight, reduction, ignore_index, label_smoothing
    losses: Tensor = torch.ops.aten.cross_entropy_loss(*flat)
    return losses if reduction else losses.view_as(target)


def token_likelihood(
    scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> Tensor:
    """The negative of every token's score of its target, classes last."""
    flat = scores.flatten(0, -2), target.flatten(), weight, reduction, ignore_index
    losses: Tensor = torch.ops.aten.nll_loss_nd(*flat)
    return losses if reduction else losses.view_as(target)


def peak(x: Tensor, dim: tuple[int, ...]) -> Tensor:
    """The greatest along some dims, which stay, as a finite constant: what is taken off before exponentials.

    >>> peak(torch.tensor([[1.0, 3.0], [-torch.inf, -torch.inf]]), (1,))[:, 0] > -torch.inf
    tensor([True, True])
    """
    finite = torch.finfo(x.dtype)
    return x.detach().amax(dim, keepdim=True).clamp(finite.min, finite.max)


def ring_attention(  # noqa: PLR0913 - what ATen asks for
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    attn_mask: Tensor | None = None,
) -> Tensor:
    """Attention of a sequence to itself; where that is split, its keys and values go around between the devices."""
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def reshard_along_dim(x: Tensor, dim: int, axes: tuple[str, ...]) -> Tensor:
    """Partition and Combine: the value stays, only where its pieces lie along a dim changes."""
    return x


def reshard_whole(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    """Replicate, Reduce and their inverses: the value stays, only what the devices along the axes hold changes."""
    return x


def reshard_at(x: Tensor, place: int, axes: tuple[str, ...]) -> Tensor:
    """Confine and Share: the value stays, only whether one place of the axes holds it or all do changes."""
    return x


def pipeline(x: Tensor, dim: int, count: int) -> Tensor:
    """The first of so many micro-batches of a dim: every `count`-th entry of it, so that pieces of it have their own.

    What is made of it runs for each of them in turn, up to `batch`.
    """
    return x[(slice(None),) * (dim % x.dim()) + (slice(0, None, count),)]


def batch(x: Tensor, dim: int, count: int) -> Tensor:
    """Micro-batches together again, as if all were as this one."""
    return x.repeat_interleave(count, dim)


PARTITION, COMBINE = "conjoin::partition", "conjoin::combine"
REPLICATE, REDUCE = "conjoin::replicate", "conjoin::reduce"
UNIFY, ASSIGN = "conjoin::unify", "conjoin::assign"
CONFINE, SHARE = "conjoin::confine", "conjoin::share"
GREATEST = "conjoin::greatest"
PIPELINE, BATCH = "conjoin::pipeline", "conjoin::batch"
PARALLEL_OPS = (PARTITION, COMBINE, REPLICATE, REDUCE, UNIFY, ASSIGN, GREATEST, CONFINE, SHARE)
"""Unity's parallelization operators (its section 3.1), with those that close the table: B -> I (unify) and I -> P
(assign); P(max) -> I (greatest); I -> At(k) (confine) and At(k) -> I (share), for what only a part of the devices
holds. Pipeline and Batch are no reshards: what stands between them is as large as a micro-batch."""

COMPOSITES: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
    LINEAR_RELU: linear_relu,
    SCALED_LINEAR: scaled_linear,
    EXPERT_LINEAR: expert_linear,
    EXPERT_NETWORK: expert_network,
    ROUTED_EXPERTS: routed_experts,
    AGGREGATE: aggregate,
    AGGREGATE_ONCE: aggregate_once,
    EDGE_SOFTMAX: edge_softmax,
    GRAPH_ATTENTION: graph_attention,
    EMBEDDING_BAG: embedding_bag,
    RAGGED_EMBEDDING_BAG: ragged_embedding_bag,
    BATCH_MOMENTS: batch_moments,
    MEAN_AND_VARIANCE: mean_and_variance,
    NORMALIZE_CHANNELS: normalize_channels,
    BATCH_NORM_BY_PIECES: batch_norm_by_pieces,
    PEAK: peak,
    ATTENTION_PEAK: attention_peak,
    ATTENTION_SUMS: attention_sums,
    RING_ATTENTION: ring_attention,
    ATTENTION_FROM_ROW: attention_from_row,
    TOKEN_ENTROPY: token_entropy,
    TOKEN_LIKELIHOOD: token_likelihood,
    OVERWRITE: overwrite,
    STRIDED_VIEW: strided_view,
    STRIDED_WRITE: strided_write,
    PARTITION: reshard_along_dim,
    COMBINE: reshard_along_dim,
    REPLICATE: reshard_whole,
    REDUCE: reshard_whole,
    UNIFY: reshard_whole,
    ASSIGN: reshard_whole,
    GREATEST: reshard_whole,
    CONFINE: reshard_at,
    SHARE: reshard_at,
    PIPELINE: pipeline,
    BATCH: batch,
}
