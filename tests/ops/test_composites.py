"""Operators of our own against what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from conjoin.ops import LINEAR_RELU, find_operator


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 4, 3)])
@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (True, False, True)])
def test_a_fused_layer_is_a_layer_and_a_relu(shape: tuple[int, ...], needs: tuple[bool, bool, bool]) -> None:
    torch.manual_seed(0)
    made = [torch.randn(*sizes, dtype=torch.float64) for sizes in (shape, (6, 3), (6,))]
    seeds = torch.randn(*shape[:-1], 6, dtype=torch.float64)
    found = []
    for run in (find_operator(LINEAR_RELU), lambda x, w, b: functional.linear(x, w, b).relu()):
        x, w, b = (tensor.clone().requires_grad_(need) for tensor, need in zip(made, needs, strict=True))
        y = run(x, w, b)
        y.backward(seeds)
        found.append([y.detach(), *(t.grad for t in (x, w, b) if t.requires_grad)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert (found[0][0] == 0).any() and (found[0][0] > 0).any()


def test_a_fused_layer_follows_autocast() -> None:
    x, w, b = (torch.randn(*sizes).requires_grad_() for sizes in ((5, 3), (6, 3), (6,)))
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = find_operator(LINEAR_RELU)(x, w, b), functional.linear(x, w, b).relu()
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_a_fused_layer_has_types_without_values() -> None:
    x, w, b = (torch.randn(*sizes, device="meta").requires_grad_() for sizes in ((5, 3), (6, 3), (6,)))
    y = find_operator(LINEAR_RELU)(x, w, b)
    y.sum().backward()
    assert y.shape == (5, 6) and x.grad is not None and x.grad.shape == (5, 3)
