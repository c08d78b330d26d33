"""Gradients added up where they are made: gradients made alone are the judge, also where torch's own sums fail."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from conjoin.runtime.program.gradient_sums import add_gradients, take_gradients


def leaves(count: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def flattened(parameters: list[Tensor], arrived: Tensor, w: Tensor) -> Tensor:
    """What has the same memory as the gradient of several parameters, and of what arrived."""
    total: Any = sum(x.view(-1) for x in (*parameters, arrived))
    return torch.tanh(total * w) * w


def test_gradients_that_share_memory_are_added_up_apart() -> None:
    *parameters, arrived = leaves(3)
    weights = [torch.randn(6, dtype=torch.float64) for _ in range(4)]
    alone = [torch.autograd.grad(flattened(parameters, arrived, w).sum(), [*parameters, arrived]) for w in weights]
    back = []
    for w in weights:
        total = flattened(parameters, arrived, w).sum()
        add_gradients((total,), (torch.ones_like(total),), parameters, [arrived])
        back += take_gradients([arrived])
    for place, found in enumerate(take_gradients(parameters)):
        torch.testing.assert_close(found, sum(each[place] for each in alone), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(back, [each[2] for each in alone], rtol=0, atol=0)


def test_torch_itself_counts_such_gradients_twice() -> None:
    """If this fails, copies of what overlaps are needed no more."""
    first, second = leaves(2)
    ones = torch.ones(6, dtype=torch.float64)
    for _ in range(2):
        torch.autograd.backward(flattened([first], second, ones), ones)
    right = torch.autograd.grad(flattened([first], second, ones).sum(), first)[0]
    assert first.grad is not None and torch.allclose(first.grad, 3 * right)


def test_who_has_no_gradient_keeps_none() -> None:
    used, unused = leaves(2)
    for _ in range(2):
        add_gradients((used.sum(),), (torch.ones((), dtype=torch.float64),), [used, unused])
    found = take_gradients([used, unused])
    assert found[1] is None and found[0] is not None and torch.equal(found[0], torch.full_like(used, 2.0))
    assert used.grad is None
