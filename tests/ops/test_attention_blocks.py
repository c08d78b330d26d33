"""Attention put together from blocks of keys, judged by torch's own under a mask that is written out."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from conjoin.ops import ATTENTION_FROM_ROW, Attending, execute


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


@pytest.mark.parametrize("sizes", [(2, 2, 0, 5), (0, 2, 3, 5), (2, 0, 3, 5), (2, 2, 3, 0), (2, 2, 0, 0)])
def test_what_sees_nothing_or_is_nothing_does_not_end_the_process(sizes: tuple[int, int, int, int]) -> None:
    """Of samples, heads, queries or keys a rank may have none."""
    batch, heads, rows, keys = sizes
    query, key = (torch.randn(batch, heads, count, 4, dtype=torch.float64) for count in (rows, keys))
    attending = Attending(0.5, 1)
    out, lse = attending.forward(query, key, key, False)
    assert out.shape == query.shape and not out.any() and (not keys or not lse.numel() or lse.isfinite().all())
    found = attending.backward(out, query, (key, key), (out, lse), False)
    assert [x.shape for x in found[:3]] == [query.shape, key.shape, key.shape]
    if keys >= rows:
        tensors = [x.clone().requires_grad_() for x in (query, key, key)]
        made = execute(ATTENTION_FROM_ROW, *tensors, keys - rows, None, False)
        assert made.shape == query.shape
        assert [x.shape for x in torch.autograd.grad(made.sum(), tensors)] == [x.shape for x in tensors]


def test_keys_for_one_sample_are_those_of_all() -> None:
    """Torch's kernel would read what lies behind them."""
    torch.manual_seed(0)
    shapes = (3, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)
    query, key, value = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    wanted = functional.scaled_dot_product_attention(query, key, value, torch.ones(5, 7, dtype=torch.bool).tril(2))
    assert (execute(ATTENTION_FROM_ROW, query, key, value, 2, None, False) - wanted).abs().max() < 1e-13


@pytest.mark.parametrize("which", range(4))
def test_numbers_may_lie_in_memory_as_they_like(which: int) -> None:
    """Features apart from each other, among them memory that holds no numbers, and all in one place."""
    torch.manual_seed(0)
    shapes = (2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), (2, 2, 5, 8)
    for lay in (_in_columns, _in_every_other_place, _in_one_place):
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        tensors[which] = lay(tensors[which])
        *tensors, given = tensors
        read = [tensor.detach().requires_grad_() for tensor in tensors]
        assert all(one.stride() == other.stride() for one, other in zip(read, tensors, strict=True))
        wanted = functional.scaled_dot_product_attention(*read, torch.ones(5, 7, dtype=torch.bool).tril(2), scale=0.3)
        found = execute(ATTENTION_FROM_ROW, *read, 2, 0.3, False)
        told, made = (torch.autograd.grad(out, read, given) for out in (wanted, found))
        for one, other in zip((wanted, *told), (found, *made), strict=True):
            assert (one - other).abs().max() < 1e-13


def _in_columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT


def _in_every_other_place(tensor: torch.Tensor) -> torch.Tensor:
    wide = torch.full((*tensor.shape, 2), torch.nan, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def _in_one_place(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :1].expand(tensor.shape)
