"""Layers on vertices in large pages against torch's own: what they make, gradients, what they write over."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from conjoin.errors import UsageError
from conjoin.ops import linear_of_positive, linear_of_vertices, vertex_layers
from conjoin.ops.compiled_kernels import compiled_kernels


@pytest.fixture(autouse=True)
def _any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled_kernels() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(vertex_layers, "_LEAST_BYTES", 0)


def some(dtype: torch.dtype, bias: bool) -> list[Tensor | None]:
    torch.manual_seed(0)
    x, weight, offset = torch.randn(7, 3), torch.randn(4, 3), torch.randn(4)
    x[2, 1], x[3, 0] = 0, torch.nan
    return [x.to(dtype), weight.to(dtype), offset.to(dtype) if bias else None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positive", [True, False])
@pytest.mark.parametrize("learned", [(0, 1, 2), (0,), (1,), (2,), ()])
def test_a_layer_is_that_of_torch(dtype: torch.dtype, bias: bool, positive: bool, learned: tuple[int, ...]) -> None:
    given = some(dtype, bias)
    leaves = [leaf for place in learned if (leaf := given[place]) is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    x, weight, offset = given
    assert x is not None
    h = x * 1  # what a ReLU writes over is no leaf
    wanted = functional.linear(torch.relu(h) if positive else h, weight, offset)
    made = (linear_of_positive if positive else linear_of_vertices)(x * 1, weight, offset)
    torch.testing.assert_close(made, wanted, rtol=0, atol=0, equal_nan=True)
    assert made.requires_grad == bool(leaves)
    if leaves:
        back = torch.randn_like(wanted).t().contiguous().t()
        for _ in range(2):  # what came back once is not what comes back again
            grads = torch.autograd.grad(made, leaves, back, retain_graph=True)
            expected = torch.autograd.grad(wanted, leaves, back, retain_graph=True)
            torch.testing.assert_close(grads, expected, rtol=0, atol=0, equal_nan=True)


def test_a_relu_writes_over_what_it_reads_and_no_layer_does() -> None:
    x, weight, _ = some(torch.float32, bias=False)
    assert x is not None and weight is not None
    x.nan_to_num_()
    before = x.clone()
    linear_of_vertices(x, weight)
    assert torch.equal(x, before)
    linear_of_positive(x, weight)
    assert torch.equal(x, before.relu())


def test_other_forms_are_torchs_own() -> None:
    weight = torch.randn(4, 3)
    for shape in ((3,), (2, 5, 3), (0, 3)):
        x = torch.randn(shape)
        assert torch.equal(linear_of_vertices(x, weight), functional.linear(x, weight))


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x, weight = torch.randn(3, 2, requires_grad=True), torch.randn(2, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(linear_of_vertices(x, weight).sum(), x, create_graph=True)
    with pytest.raises(UsageError, match="gradient of a gradient"):
        grad.sum().backward()
