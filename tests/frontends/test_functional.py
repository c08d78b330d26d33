"""In-place writing becomes functional: values, gradients and buffers are those of the plain model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.runtime import to_module


class Writes(nn.Module):
    """A layer and a buffer around some code that writes in place."""

    def __init__(self, body: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("total", torch.zeros(3, 4))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.total, Tensor)
        return self.body(self.layer(x), self.total).sum()


def shifted(y: Tensor, total: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z[:, 1:] = y[:, :-1]
    z[:, 0] = 1.5
    return z * y


def slice_of_slice(y: Tensor, total: Tensor) -> Tensor:
    z = y * 2
    z[0, 1:3] *= 3
    w = z * 2
    z[1] = w[0]
    return z + w


def part_of_a_buffer(y: Tensor, total: Tensor) -> Tensor:
    total[1] = y.detach()[0]
    total[0, 2:] += 1
    return y * total


def chained(y: Tensor, total: Tensor) -> Tensor:
    return torch.relu_((y * 1).add_(1).mul_(2))


def counted(y: Tensor, total: Tensor) -> Tensor:
    total.add_(1)
    total.mul_(2)
    return y * total


def through_a_transpose(y: Tensor, total: Tensor) -> Tensor:
    z = y * 1
    z.t()[0] = 7.0
    return z * y


def view_read_afterwards(y: Tensor, total: Tensor) -> Tensor:
    z = y * 1
    flat = z.view(-1)
    z.add_(1)
    return flat.reshape(y.shape) * y


def widened(y: Tensor, total: Tensor) -> Tensor:
    z = torch.zeros(3, 4, dtype=torch.float64)
    z += y
    return z


BODIES = [
    shifted, slice_of_slice, part_of_a_buffer, chained, counted, through_a_transpose, view_read_afterwards, widened,
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_writing_is_as_in_the_plain_model(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Writes(body)
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    step = to_module(capture(model, x), model)
    for _ in range(2):
        ours, theirs = step(x), plain(x)
        ours.backward()
        theirs.backward()
        assert torch.equal(ours, theirs)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
    assert torch.equal(model.total, plain.total)  # type: ignore[arg-type]
