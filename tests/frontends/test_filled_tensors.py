"""A tensor that is made empty and filled part by part is what its parts are, put together."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.runtime import to_module


class Filled(nn.Module):
    """Two halves written into a tensor in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second = how, nn.Linear(4, 3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x), self.second(x)
        match self.how:
            case "copied":
                made = a.new_empty(*a.shape[:-1], 8)
                made[..., :3].copy_(a)
                made[..., 3:].copy_(b)
            case "backwards":
                made = x.new_zeros(2, 8)
                made[:, 3:], made[:, :3] = b, a
            case "in turns":
                made = x.new_zeros(2, 6)
                made[:, ::2], made[:, 1::2] = a, b[:, :3]
            case "overlap":
                made = x.new_zeros(2, 8)
                made[:, :3], made[:, 2:7] = a, b
            case "gap":
                made = x.new_zeros(2, 9)
                made[:, :3], made[:, 4:] = a, b
            case "read":
                made = x.new_zeros(2, 8)
                made[:, :3] = a
                b = b + made.sum()
                made[:, 3:] = b
            case "given":
                made = x.repeat(1, 2)
                made[:, :3], made[:, 3:] = a, b
            case "one number":
                made = x.new_zeros(2, 8)
                made[:, :3], made[:, 3:] = a, 1.0
        return made.tanh().square().sum()


@pytest.mark.parametrize("how", ["copied", "backwards", "in turns", "overlap", "gap", "read", "given", "one number"])
def test_parts_are_put_together_where_they_are_all_there_is(how: str) -> None:
    model, x = Filled(how).double(), torch.randn(2, 4, dtype=torch.float64)
    graph = capture(model, (x,))
    taken = copy.deepcopy(model)
    step = to_module(graph, taken)
    ours, plain = step(x), model(x)
    ours.backward()
    plain.backward()
    assert ours.item() == pytest.approx(plain.item(), rel=1e-12)
    for one, other in zip(taken.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=0)
    ops = [node.op for node in graph.nodes]
    is_together = how in ("copied", "backwards", "in turns")
    assert ("cat" in ops or "stack" in ops, "slice_scatter" in ops) == (is_together, not is_together)
    assert how != "copied" or not any("empty" in op for op in ops)
