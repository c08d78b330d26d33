"""A linear layer in eight bits, against its definition worked out in float64, and against `torch._scaled_mm`."""

from __future__ import annotations

from math import frexp

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from conjoin.ops.scaled_layer import _cast, _product, _scale, scaled_linear

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOP = {E4M3: 256.0, E5M2: 32768.0}
HALF_ROUNDING = 2.0**-8


def sample(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).bfloat16()


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a tensor is in eight bits, by hand: a scale from the exponent of its largest number, in float64."""
    scale = 2.0 ** frexp(x.double().abs().max().item())[1] / TOP[dtype]
    return (x.double() / scale).to(dtype).double() * scale


CASES = [
    ((24,), 32, 16, 1.0), ((2, 3, 5), 16, 48, 1e-3), ((), 16, 16, 300.0), ((16,), 8, 3, 1e-30), ((1,), 16, 16, 1e30),
]  # fmt: skip


@pytest.mark.parametrize(("batch", "inner", "outer", "scale"), CASES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_gradients_are_those_of_the_definition(
    batch: tuple[int, ...], inner: int, outer: int, scale: float, with_bias: bool
) -> None:
    x, w = sample(*batch, inner, seed=1, scale=scale).requires_grad_(), sample(outer, inner, seed=2).requires_grad_()
    bias = sample(outer, seed=3, scale=scale).requires_grad_() if with_bias else None
    gradient = sample(*batch, outer, seed=4, scale=1e-4)
    y = scaled_linear(x, w, bias)
    y.backward(gradient)
    x8, w8, g8 = rounded(x.detach(), E4M3), rounded(w.detach(), E4M3), rounded(gradient, E5M2)
    rows = g8.reshape(-1, outer)
    wanted = {
        "y": functional.linear(x8, w8, None if bias is None else bias.detach().double()),
        "x": (rows @ w8).view(x.shape),
        "w": rows.t() @ x8.reshape(-1, inner),
    }
    assert x.grad is not None and w.grad is not None
    for name, found in (("y", y), ("x", x.grad), ("w", w.grad)):
        largest = wanted[name].abs().max().item()
        assert found.dtype == torch.bfloat16 and found.shape == wanted[name].shape
        torch.testing.assert_close(found.double(), wanted[name], rtol=HALF_ROUNDING, atol=1e-6 * largest)
    if bias is not None:
        assert bias.grad is not None
        torch.testing.assert_close(bias.grad, gradient.reshape(-1, outer).sum(0))


def test_products_are_those_of_torch_s_own_kernel() -> None:
    x, w, bias = sample(32, 64, seed=1), sample(48, 64, seed=2), sample(48, seed=3)
    scales = _scale(x, E4M3), _scale(w, E4M3)
    left, right = _cast(x, scales[0], E4M3), _cast(w, scales[1], E4M3)
    try:
        wanted = torch._scaled_mm(
            left, right.t(), scale_a=scales[0], scale_b=scales[1], bias=bias, out_dtype=torch.bfloat16
        )
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has no such kernel for CPUs: {error}")
    torch.testing.assert_close(scaled_linear(x, w, bias), wanted, rtol=2 * HALF_ROUNDING, atol=1e-2)


def test_the_error_is_that_of_eight_bits() -> None:
    x, w = sample(256, 256, seed=1), sample(256, 256, seed=2)
    exact = functional.linear(x.double(), w.double())
    assert 0.01 < ((scaled_linear(x, w).double() - exact).norm() / exact.norm()).item() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_wider_dtypes_it_is_a_linear_layer(dtype: torch.dtype) -> None:
    x, w, bias = sample(3, 16, seed=1).to(dtype), sample(32, 16, seed=2).to(dtype), sample(32, seed=3).to(dtype)
    assert torch.equal(scaled_linear(x, w, bias), functional.linear(x, w, bias))


@pytest.mark.parametrize(("dtype", "smallest"), [(E4M3, 2.0**-13), (E5M2, 2.0**-28)])
def test_a_piece_is_rounded_as_the_whole(dtype: torch.dtype, smallest: float) -> None:
    """Unless a number is very small beside the largest, which the piece may not have."""
    x = torch.cat([sample(8, 16, seed=1, scale=100.0), sample(8, 16, seed=2)])
    whole = _cast(x, _scale(x, dtype), dtype).double() * _scale(x, dtype)
    piece = _cast(x[8:], _scale(x[8:], dtype), dtype).double() * _scale(x[8:], dtype)
    large = x[8:].double().abs() > smallest * x.double().abs().max()
    assert torch.equal(whole[8:][large], piece[large]) and large.double().mean() > 0.95
    assert (whole[8:] - piece).abs().max() <= smallest * 2.0**-3 * x.double().abs().max()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("largest", [0.0, 1e-38, 1e-30, 1.0, 1.9921875, 2.0, 448.0, 3e38])
def test_nothing_overflows(dtype: torch.dtype, largest: float) -> None:
    x = torch.tensor([[largest, -largest, largest / 3]]).bfloat16()
    scale = _scale(x, dtype)
    made = _cast(x, scale, dtype).float()
    assert made.isfinite().all() and made.abs().max() <= TOP[dtype]
    assert largest < 1e-30 or made.abs().max() >= TOP[dtype] / 2
    assert frexp(scale.item())[0] == 0.5, "a power of two"


def test_what_is_no_number_stays_seen() -> None:
    x, w = sample(16, 16, seed=1), sample(16, 16, seed=2)
    for broken in (torch.inf, torch.nan):
        x[3, 3] = broken
        assert not scaled_linear(x, w)[3].isfinite().any()


def test_parts_that_are_empty() -> None:
    x, w = sample(0, 16, seed=1).requires_grad_(), sample(16, 16, seed=2).requires_grad_()
    scaled_linear(x, w, None).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 16) and w.grad is not None and not w.grad.any()


def test_a_gradient_that_nobody_asks_for_is_not_computed() -> None:
    x, w = sample(4, 16, seed=1), sample(16, 16, seed=2).requires_grad_()
    scaled_linear(x, w).sum().backward()
    assert x.grad is None and w.grad is not None
    scale = _scale(x, E4M3)
    assert _product(_cast(x, scale, E4M3), _cast(w.detach(), scale, E4M3).t(), scale, scale).shape == (4, 16)
