"""Attention put together from blocks of keys, judged by torch's own under a mask that is written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from conjoin.ops import ATTENTION_FROM_ROW, execute


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("sizes", [(0, 5, 1, 4), (3, 7, 2, 4), (6, 7, 1, 4), (3, 7, 2, 3)])
def test_later_rows_see_what_a_mask_lets_them_see(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, error: float
) -> None:
    torch.manual_seed(0)
    first, length, repeats, features = sizes
    shapes = (2, 2 * repeats, length - first, 4), (2, 2, length, 4), (2, 2, length, features)
    tensors = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
    mask = torch.ones(length - first, length, dtype=torch.bool).tril(first)
    wanted = functional.scaled_dot_product_attention(*tensors, mask, scale=0.3, enable_gqa=repeats > 1)
    found = execute(ATTENTION_FROM_ROW, *tensors, first, 0.3, repeats > 1)
    given = torch.randn_like(wanted)
    told, made = (torch.autograd.grad(out, tensors, given) for out in (wanted, found))
    for one, other in zip((wanted, *told), (found, *made), strict=True):
        assert (one - other).abs().max() < error and one.dtype == other.dtype
