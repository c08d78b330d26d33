"""Which layers are computed in eight bits: products with a parameter, sizes that kernels take, never the head."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
from conjoin.errors import UsageError
from conjoin.ir import Graph
from conjoin.ops import SCALED_LINEAR
from tests.ir.wording import assert_three_sentences


class Turned(nn.Module):
    """Weights as GPT-2 has them, inputs by outputs."""

    def __init__(self, inner: int, outer: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inner, outer) / inner**0.5)
        self.bias = nn.Parameter(torch.zeros(outer)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).view(*x.shape[:-1], -1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(32, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.inner(self.table(tokens)) @ self.table.weight.t()


def graph_of(model: nn.Module, *batch: Tensor, precision: str = "fp8-mixed") -> Graph:
    return conjoin.capture(model.train(), batch, functional.mse_loss, precision=precision)


def layers_of(graph: Graph) -> list[Any]:
    """The shapes of the weights of layers in eight bits, outputs by inputs."""
    return [node.inputs[1].type.shape for node in graph.nodes if node.op == SCALED_LINEAR]


def plain(*sizes: int) -> nn.Module:
    return nn.Sequential(*(layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.GELU())))


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (plain(16, 32, 48, 16), [(32, 16), (48, 32)]),
        (plain(16, 32, 20, 16, 16), [(32, 16)]),
        (nn.Sequential(Turned(16, 32, True), nn.GELU(), Turned(32, 16, False), nn.GELU(), Turned(16, 16, True)),
         [(32, 16), (16, 32)]),
        (nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16)), [(32, 16)]),
    ],
)  # fmt: skip
def test_layers_whose_sizes_kernels_take_but_not_the_head(model: nn.Module, wanted: list[Any]) -> None:
    graph = graph_of(model, torch.randn(4, 8, 16), torch.randn(4, 8, 16))
    assert layers_of(graph) == wanted
    for node in graph.nodes:
        if node.op == SCALED_LINEAR:
            assert {value.type.dtype for value in node.inputs} == {torch.bfloat16} == {node.types[0].dtype}
    batch = torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    plan = conjoin.plan(model, batch, "local:2", loss=functional.mse_loss, strategy="megatron", precision="fp8-mixed")
    assert conjoin.verify_plan(plan, model, batch, loss=functional.mse_loss, num_steps=2).passed


def test_a_head_whose_weight_is_tied_stays() -> None:
    graph = graph_of(Tied(), torch.randint(32, (4, 8)), torch.randn(4, 8, 32))
    assert layers_of(graph) == [(16, 16)]


def test_all_else_is_as_in_bf16_mixed() -> None:
    model, batch = plain(16, 32, 48, 16), (torch.randn(4, 16), torch.randn(4, 16))
    eight, sixteen = (graph_of(model, *batch, precision=name) for name in ("fp8-mixed", "bf16-mixed"))
    named = [node.op.replace(SCALED_LINEAR, "linear") for node in eight.nodes]
    assert named == [node.op for node in sixteen.nodes] and eight.leaves == sixteen.leaves
    assert [node.types for node in eight.nodes] == [node.types for node in sixteen.nodes]


class Region(nn.Module):
    """A layer that the user keeps out of autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = self.second(x.float())
        return self.head(x)


def test_what_is_kept_in_float32_stays_so() -> None:
    graph = graph_of(Region(), torch.randn(4, 16), torch.randn(4, 16))
    assert len(layers_of(graph)) == 1
    assert [node.types[0].dtype for node in graph.nodes if node.op == "linear"] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("model", [plain(16, 16), plain(16, 20, 16), nn.Sequential(nn.LayerNorm(16), nn.Tanh())])
def test_a_model_without_such_a_layer_is_told(model: nn.Module) -> None:
    with pytest.raises(UsageError, match="Choose bf16-mixed") as told:
        graph_of(model, torch.randn(4, 16), torch.randn(4, 16))
    assert_three_sentences(told.value)


@pytest.mark.parametrize(("machine", "lacks"), [("dgx-a100", "A100-SXM4-80GB"), ("p3.8xlarge", "V100-SXM2-16GB")])
def test_a_gpu_without_it_refuses(machine: str, lacks: str) -> None:
    model, batch = plain(16, 32, 16), (torch.randn(8, 16), torch.randn(8, 16))
    with pytest.raises(UsageError, match=f"{lacks} has no rate for float8, only for float64") as told:
        conjoin.plan(model, batch, machine, loss=functional.mse_loss, strategy="fsdp", precision="fp8-mixed")
    assert_three_sentences(told.value)


@pytest.mark.parametrize("machine", ["dgx-h100", "dgx-h200", "g6e.48xlarge", "dgx-b200", "mi300x"])
def test_one_with_it_plans(machine: str) -> None:
    model, batch = plain(16, 32, 16), (torch.randn(8, 16), torch.randn(8, 16))
    plan = conjoin.plan(model, batch, machine, loss=functional.mse_loss, strategy="fsdp", precision="fp8-mixed")
    assert plan.precision == "fp8-mixed@cuda" and conjoin.simulate_plan(plan, machine).seconds > 0
