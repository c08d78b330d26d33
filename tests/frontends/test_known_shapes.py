"""Shapes that follow from constants are as fixed as these: what a written mask selects; those of inputs are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.errors import CaptureError
from conjoin.frontends import capture
from conjoin.runtime import to_module


class Selecting(nn.Module):
    """Reads rows and columns in some way."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read
        self.shown = torch.tensor([True, False, True, True])  # an attribute, which may be another one at loading

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear(x))


def assigned(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, torch.tensor([True, False, True, False])] = 0.5
    return h


def kept_pairs(h: Tensor) -> Tensor:
    gram = h.T @ h
    return gram[~torch.eye(4, dtype=torch.bool)]


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask of columns": lambda h: h[:, torch.arange(4) < 3],
    "a mask of two dims": kept_pairs,
    "a mask beside an index": lambda h: h[torch.tensor([0, 5, 7]), torch.tensor([True, False, True, True])],
    "bytes for a mask": lambda h: h[:, torch.from_numpy(numpy.array([1, 0, 1, 1], dtype=numpy.bool_))],
    "nonzero": lambda h: h[:, torch.tensor([1, 0, 1, 1]).nonzero()[:, 0]],
    "where": lambda h: h[:, torch.where(torch.tensor([1, 0, 1, 0]) > 0)[0]],
    "masked_select": lambda h: h.masked_select(torch.ones(8, 4).tril().bool()),
    "masked_select of each row": lambda h: h.masked_select(torch.tensor([True, False, True, False])),
    "unique": lambda h: h[:, torch.tensor([2, 0, 2]).unique()],
    "repeat_interleave": lambda h: h.repeat_interleave(torch.tensor([1, 2, 0, 1]), 1),
    "rows repeated": lambda h: h[:, torch.repeat_interleave(torch.tensor([1, 2, 0, 1]))],
    "a count": lambda h: h[:, : int(torch.tensor([1, 1, 0]).sum())],
    "assigned": assigned,
    "nothing": lambda h: h.sum() + h[:, torch.zeros(4, dtype=torch.bool)].sum(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_constants_select_is_captured(read: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = Selecting(read), torch.randn(8, 4)
    graph = capture(model, x)
    assert all(node.spec is not None for node in graph.nodes), "each call is declared, so it can be split"
    found, right = to_module(graph, model)(x), model(x)
    assert torch.equal(found, right)
    mine, its = (torch.autograd.grad(out.square().sum(), model.linear.weight)[0] for out in (found, right))
    torch.testing.assert_close(mine, its)


@pytest.mark.parametrize(
    "read",
    [
        lambda m, x: x[:, m.shown],
        lambda m, x: x[:, m.linear.weight[0] > 0],
        lambda m, x: x.masked_select(x > 0),
        lambda m, x: x.repeat_interleave((x[0] > 0).long(), 1),
        lambda m, x: x[:, torch.rand(4) > 0],
    ],
    ids=["an attribute", "a parameter", "an input", "repeats by an input", "a draw"],
)
def test_what_others_select_is_refused(read: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = Selecting(lambda h: read(model, h))
    with pytest.raises(CaptureError, match="depends on tensor values"):
        capture(model, torch.randn(8, 4))


def test_what_constants_select_is_split() -> None:
    model = nn.Sequential(nn.Linear(6, 4), Selecting(READS["a mask of columns"])).double()
    batch = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    plan = conjoin.plan(model, batch, "local:2", loss=nn.functional.mse_loss, strategy="data-parallel")
    assert conjoin.verify_plan(plan, model, batch, loss=nn.functional.mse_loss).passed
