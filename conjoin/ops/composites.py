"""Operators of our own: plain functions over torch, for facts that no single ATen overload states."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

EMBEDDING_BAG = "conjoin::embedding_bag"
RAGGED_EMBEDDING_BAG = "conjoin::ragged_embedding_bag"


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


COMPOSITES: dict[str, Callable[..., Tensor]] = {
    EMBEDDING_BAG: embedding_bag,
    RAGGED_EMBEDDING_BAG: ragged_embedding_bag,
}
