"""Batch norm by moments: what stock batch norm gives, to rounding, in every form, and with nothing kept twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from conjoin.ops import (
    BATCH_MOMENTS,
    MEAN_AND_VARIANCE,
    NORMALIZE_CHANNELS,
    Call,
    LocalForm,
    TensorType,
    execute,
    find_operator,
    find_spec,
    space_of,
)

FUNCTIONAL, PLAIN = "_native_batch_norm_legit_functional", "_native_batch_norm_legit.no_stats"
SHAPES = {"1d": (32, 6), "1d long": (5, 6, 9), "2d": (7, 6, 5, 4), "3d": (3, 6, 4, 3, 5), "one value": (4, 6, 1, 1)}
EPS, MOMENTUM = 1e-5, 0.1


def batch_moments(x: Tensor) -> Tensor:
    return find_operator(BATCH_MOMENTS)(x)  # type: ignore[no-any-return]


def known_of(moments: Tensor) -> Tensor:
    return find_operator(MEAN_AND_VARIANCE)(moments)  # type: ignore[no-any-return]


def normalize(x: Tensor, moments: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return find_operator(NORMALIZE_CHANNELS)(x, known_of(moments), weight, bias, EPS)  # type: ignore[no-any-return]


def expanded(op: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The expansion of a batch norm, run on tensors."""
    types = tuple(TensorType(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else x for x in args)
    spec, call = find_spec(op), Call(op, types)
    assert spec is not None and spec.expansion is not None
    return spec.expansion(LocalForm(spec, call, space_of(spec, call), {}, args, execute))  # type: ignore[no-any-return]


def native(op: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return find_operator(op)(*args)  # type: ignore[no-any-return]


Run = Callable[[str, tuple[Any, ...]], tuple[Tensor, ...]]


def results(run: Run, op: str, args: tuple[Any, ...]) -> dict[str, Tensor]:
    """All outputs and the gradients of x, weight and bias, in float64."""
    tensors = [x.detach().clone().requires_grad_() if isinstance(x, Tensor) else x for x in args[:3]]
    y, *statistics = run(op, (*tensors, *args[3:]))
    wanted = [x for x in tensors if x is not None]
    gradient = torch.randint(-64, 65, y.shape, generator=torch.Generator().manual_seed(1)) / 64  # exact in any dtype
    gradients = torch.autograd.grad(y, wanted, gradient.to(y.dtype))
    names = [*("y", "mean", "scale", "running_mean", "running_var")[: 1 + len(statistics)], "gx", "gw", "gb"]
    return {name: x.detach().double() for name, x in zip(names, (y, *statistics, *gradients), strict=False)}


def arguments(
    op: str, shape: tuple[int, ...], dtype: torch.dtype, *, affine: bool = True, mean: float = 0, running: float = 0
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)

    def column(low: float) -> Tensor:
        return torch.rand(shape[1], generator=generator, dtype=torch.float64).add(low).to(wide)

    x = (torch.randn(shape, generator=generator, dtype=torch.float64) + mean).to(dtype)
    weights = (column(0.5), column(-0.5)) if affine else (None, None)
    statistics = (column(running), column(0.5)) if op == FUNCTIONAL else ()
    return (x, *weights, *statistics, True, MOMENTUM, EPS)


def largest_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == exact.keys()
    return {name: float((found[name] - x).abs().max() / x.abs().max()) for name, x in exact.items()}


def widened(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.double() if isinstance(x, Tensor) else x for x in args)


@pytest.mark.parametrize("op", [FUNCTIONAL, PLAIN])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_values_gradients_and_running_statistics_are_those_of_stock_batch_norm(
    shape: tuple[int, ...], affine: bool, op: str
) -> None:
    args = arguments(op, shape, torch.float64, affine=affine, mean=2, running=3)
    errors = largest_error(results(expanded, op, args), results(native, op, args))
    assert len(errors) == (3 if op == PLAIN else 5) + (3 if affine else 1)
    assert max(errors.values()) < 1e-12


@pytest.mark.parametrize("strides", [torch.contiguous_format, torch.channels_last], ids=["in rows", "channels last"])
@pytest.mark.parametrize("running", [0, 100])
@pytest.mark.parametrize(("mean", "tolerance"), [(0, 2e-6), (100, 2e-4)])
def test_a_mean_far_from_zero_costs_no_more_digits_than_with_stock_batch_norm(
    mean: float, tolerance: float, running: float, strides: torch.memory_format
) -> None:
    """A float32 of 100 is off by 4e-6: a hundred times the rounding of values of size 1 stays in x - mean."""
    x, *rest = arguments(FUNCTIONAL, (16, 8, 13, 11), torch.float32, mean=mean, running=running)
    args = (x.to(memory_format=strides), *rest)
    exact = results(native, FUNCTIONAL, widened(args))
    ours, stock = (largest_error(results(run, FUNCTIONAL, args), exact) for run in (expanded, native))
    assert max(ours.values()) < tolerance
    assert all(error < 8 * stock[name] + 1e-6 for name, error in ours.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [SHAPES["1d"], SHAPES["2d"]])
def test_half_precision_has_statistics_in_single(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    args = arguments(FUNCTIONAL, shape, dtype, mean=3, running=3)
    found = expanded(FUNCTIONAL, args)
    assert found[0].dtype == dtype and found[3].dtype == found[4].dtype == torch.float32
    errors = largest_error(results(expanded, FUNCTIONAL, args), results(native, FUNCTIONAL, widened(args)))
    assert max(errors["running_mean"], errors["running_var"]) < 2e-6
    assert max(errors["gw"], errors["gb"]) < 1e-4
    assert max(errors["y"], errors["gx"]) < 2 * torch.finfo(dtype).eps


def test_weights_and_running_statistics_may_be_in_half_precision_too() -> None:
    args = tuple(
        x.to(torch.bfloat16) if isinstance(x, Tensor) else x for x in arguments(FUNCTIONAL, (8, 4, 3, 3), torch.float32)
    )
    found, stock = (results(run, FUNCTIONAL, args) for run in (expanded, native))
    assert max(largest_error(found, stock).values()) < 3 * torch.finfo(torch.bfloat16).eps
    assert [x.dtype for x in expanded(FUNCTIONAL, args)[3:]] == [torch.bfloat16] * 2


def test_a_weight_may_come_without_a_bias() -> None:
    x, weight, _, *rest = arguments(PLAIN, (6, 3, 4), torch.float64)
    args = (x, weight, None, *rest)
    assert max(largest_error(results(expanded, PLAIN, args), results(native, PLAIN, args)).values()) < 1e-12


def test_uneven_parts_of_a_batch_have_the_moments_of_the_whole() -> None:
    """In single precision, where the mean is a thousand deviations away, and each part has another.

    The mean of a part is rounded to 3e-5; that is a few millionths of what the parts lie apart.
    """
    torch.manual_seed(0)
    x = torch.randn(16, 5, 6, 7) + torch.linspace(990, 1010, 16)[:, None, None, None]
    parts = x.split((1, 9, 4, 2))
    moments = torch.stack([batch_moments(part) * (len(part) / len(x)) for part in parts]).sum(0)
    var, mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert moments.dtype == torch.float64
    torch.testing.assert_close(moments[0], mean, rtol=1e-6, atol=0)
    torch.testing.assert_close(moments[1] - moments[0] ** 2, var, rtol=5e-5, atol=0)


def test_a_channel_that_does_not_vary_stays_finite() -> None:
    x = torch.full((6, 2, 3), 4e5, requires_grad=True)
    moments = torch.stack([batch_moments(part) * (len(part) / 6) for part in x.split((1, 5))]).sum(0)
    y = normalize(x, moments, None, None)
    y.sum().backward()
    assert x.grad is not None and torch.isfinite(y).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("affine", [True, False])
def test_gradients_are_the_derivatives_whatever_the_moments(affine: bool) -> None:
    """Those of other numbers than the moments of x: each operator is right by itself."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    moments = torch.tensor([[0.3, -0.7], [1.5, 2.5]], dtype=torch.float64, requires_grad=True)
    weights = [torch.rand(2, dtype=torch.float64, requires_grad=True) if affine else None for _ in range(2)]
    assert gradcheck(batch_moments, (x,))
    assert gradcheck(known_of, (moments,))
    assert gradcheck(normalize, (x, moments, *weights))


@pytest.mark.parametrize("op", [BATCH_MOMENTS, NORMALIZE_CHANNELS])
def test_only_x_is_kept_and_it_is_not_copied(op: str) -> None:
    kept: list[Tensor] = []
    x, moments, column = torch.randn(8, 4, 9, 9, requires_grad=True), torch.rand(2, 4).double(), torch.rand(4)
    args = (x,) if op == BATCH_MOMENTS else (x, moments, column, column, EPS)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        find_operator(op)(*args)
    large = [t for t in kept if t.numel() > moments.numel()]
    assert [t.data_ptr() for t in large] == [x.data_ptr()]


def test_only_what_needs_gradients_gets_them() -> None:
    x, weight, bias = torch.randn(4, 3, 5), torch.rand(3, requires_grad=True), torch.rand(3)
    normalize(x, batch_moments(x), weight, bias).sum().backward()
    assert weight.grad is not None and x.grad is None and bias.grad is None
    assert not batch_moments(x).requires_grad
