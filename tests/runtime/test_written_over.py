"""What is written over a sum over neighbours or a layer, against the plain model: where others read it, nothing is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
import zoo
from conjoin.frontends import capture
from conjoin.ir import recompute_actions
from conjoin.ops import aggregation, vertex_layers
from conjoin.ops.compiled_kernels import compiled_kernels
from conjoin.runtime import to_module

VERTICES, WIDTH = 30, 4
Form = Callable[[Tensor, Tensor], Tensor]


def in_one(h: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(h + bias)


def twice(h: Tensor, bias: Tensor) -> Tensor:
    return (h + bias + bias).relu()


def sum_read_later(h: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(h + bias) * h


def biased_read_later(h: Tensor, bias: Tensor) -> Tensor:
    biased = h + bias
    return torch.relu(biased) + torch.sin(biased)


def sum_read_by_a_gradient(h: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(torch.tanh(h) + bias)


def active_read_by_a_gradient(h: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(h) + bias


def grown(h: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(h + bias.unsqueeze(-1).unsqueeze(-1))


def widened(h: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(h + bias.double())


def viewed(h: Tensor, bias: Tensor) -> Tensor:
    return h.t().relu().t() + h.view(-1).view_as(h) + bias


def into_a_layer(h: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(torch.relu(h + bias), bias.expand(5, -1))


def of_a_layer(h: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(functional.linear(h, bias.expand(WIDTH, -1)) + bias)


def between_layers(h: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(of_a_layer(h, bias), bias.expand(5, -1), bias[:1].expand(5))


def layer_read_later(h: Tensor, bias: Tensor) -> Tensor:
    made = functional.linear(torch.relu(h), bias.expand(WIDTH, -1))
    return torch.relu(made + bias) * made


def active_read_by_two_layers(h: Tensor, bias: Tensor) -> Tensor:
    active = torch.relu(h + bias)
    return functional.linear(active, bias.expand(5, -1)) + functional.linear(active, bias.expand(5, -1) + 1)


def weight_made_of_the_sum(h: Tensor, bias: Tensor) -> Tensor:
    return functional.linear(bias.expand(5, -1), torch.relu(h)) + 1


IN_PLACE = {into_a_layer: 2, of_a_layer: 2, between_layers: 2, layer_read_later: 1, active_read_by_two_layers: 3,
            weight_made_of_the_sum: 2, in_one: 2, twice: 3, active_read_by_a_gradient: 1, grown: 0, widened: 0,
            viewed: 0, sum_read_later: 0, biased_read_later: 1, sum_read_by_a_gradient: 0}  # fmt: skip
"""How many calls of each write over what they read."""
OF_LAYERS = {of_a_layer: 2, between_layers: 2, active_read_by_two_layers: 1, weight_made_of_the_sum: 1}
"""How many do where what they read of neighbours is no sum."""


class Network(nn.Module):
    def __init__(self, form: Form, reduce: str) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(3, WIDTH, bias=False), nn.Parameter(torch.randn(WIDTH))
        self.form, self.reduce = form, reduce

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        rows = self.layer(x)[edges[0]]
        at, made = edges[1].unsqueeze(1).expand_as(rows), rows.new_zeros(VERTICES, WIDTH)
        return self.form(made.scatter_reduce(0, at, rows, self.reduce, include_self=False), self.bias)


def writes(code: str) -> int:
    return sum(map(code.count, ("torch_Tensor_add_(", "torch.relu_(", "linear_of_positive(")))


@pytest.mark.parametrize("form", IN_PLACE, ids=lambda form: form.__name__)
@pytest.mark.parametrize(("reduce", "compiled"), [("sum", False), ("sum", True), ("mean", True), ("amax", True)])
def test_gradients_are_those_of_the_plain_model(
    form: Form, reduce: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if compiled and compiled_kernels() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(aggregation, "_FEW", 0 if compiled else 1 << 60)
    monkeypatch.setattr(vertex_layers, "_LEAST_BYTES", 0 if compiled else 1 << 60)
    torch.manual_seed(0)
    model, x, edges = Network(form, reduce), torch.randn(VERTICES, 3), torch.randint(VERTICES, (2, 90))
    module = to_module(capture(model, (x, edges)), model)
    assert "aggregate" in module.code
    assert writes(module.code) == (OF_LAYERS.get(form, 0) if reduce == "amax" else IN_PLACE[form])
    weights = list(model.parameters())
    for run in range(2):
        mine, plain = module(x, edges), model(x, edges)
        torch.testing.assert_close(mine, plain, msg=f"run {run}")
        wanted = torch.randn_like(plain)
        torch.testing.assert_close(
            torch.autograd.grad(mine, weights, wanted), torch.autograd.grad(plain, weights, wanted)
        )


def test_nothing_is_written_over_under_an_autocast() -> None:
    """There, what a call makes may be of another dtype than what it reads."""
    torch.manual_seed(0)
    model, x, edges = Network(in_one, "sum"), torch.randn(VERTICES, 3), torch.randint(VERTICES, (2, 90))
    module = to_module(capture(model, (x, edges)), model)
    with torch.autocast("cpu", torch.bfloat16):
        mine, plain = module(x, edges), model(x, edges)
    assert mine.dtype == plain.dtype
    torch.testing.assert_close(mine, plain, rtol=2e-2, atol=2e-2)


def test_networks_on_no_graph_keep_what_they_make() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bias = nn.Linear(3, WIDTH, bias=False), nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.layer(x) + self.bias)

    module = to_module(capture(model := Plain(), (torch.randn(5, 3),)), model)
    assert not writes(module.code) and "linear_of_vertices" not in module.code


@pytest.mark.parametrize("segment", [(4, 5), (4, 6), (5, 6), (5, 9), (6, 7), (8, 9)])
def test_what_a_segment_reads_when_it_is_run_again_is_not_written_over(segment: tuple[int, int]) -> None:
    """The operators are a layer, two that take the edges apart, a sum, its bias and ReLU, and the same without ReLU."""
    work: Any = zoo.build("gcn-ppi:tiny", batch_size=20)
    x, _, _, labels = work.batch
    batch = (x, torch.randint(20, (2, 60)), torch.rand(60), labels)
    plan = conjoin.plan(work.model, batch, "local:1", loss=work.loss, strategy="single")
    again = replace(plan, memory=recompute_actions(plan.graph, [segment]))
    assert conjoin.verify_plan(again, work.model, batch, loss=work.loss, num_steps=2).passed
