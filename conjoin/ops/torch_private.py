"""The one place here that touches kernels of torch which have no public name."""

from __future__ import annotations

import torch
from torch import Tensor


def flash_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """What queries see of keys, and the logarithms of the sums of their weights, by the kernel of the device."""
    aten = torch.ops.aten
    run = (
        aten._scaled_dot_product_flash_attention if query.is_cuda else aten._scaled_dot_product_flash_attention_for_cpu
    )
    out, lse, *_ = run(*map(_rows_in_one_piece, (query, key, value)), 0.0, causal, scale=scale)
    return out, lse


def flash_attention_backward(given: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given that of the output, what was read, the output and the logarithms."""
    aten, (gradient, query, key, value, out, lse) = torch.ops.aten, given
    given = *map(_rows_in_one_piece, (gradient, query, key, value, out)), lse
    if not query.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)  # type: ignore[no-any-return]
    lengths = None, None, query.shape[2], key.shape[2]  # one for all samples
    drawn = (torch.empty(0, dtype=torch.int64, device=query.device),) * 2  # nothing is dropped
    return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        *given, *lengths, 0.0, causal, *drawn, scale=scale
    )


def _rows_in_one_piece(tensor: Tensor) -> Tensor:
    """The kernels read features of a head one behind the other, whatever the strides say; torch's own attention copies
    before it calls them, or calls another."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
