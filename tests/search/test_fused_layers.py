"""Layers computed as one are taken apart without changing what is computed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Node, verify
from conjoin.machine import Machine
from conjoin.runtime import to_module
from conjoin.search import make_plan
from conjoin.search.fused_layers import find_fused, unfuse


class Attention(nn.Module):
    """Query, key and value in one product, cut in one of the ways people write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.qkv(x)
        match self.how:
            case "unbind":
                parts = y.reshape(batch, length, 3, 4, 2).unbind(2)
            case "permute":
                parts = tuple(
                    p.transpose(1, 2) for p in y.view(batch, length, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
                )
            case "chunk":
                parts = tuple(p.reshape(batch, length, 4, 2) for p in y.chunk(3, dim=-1))
            case "heads":
                parts = y.view(batch, length, 12, 2).split([4, 4, 4], dim=2)
            case _:
                parts = tuple(y[..., i : i + 8].reshape(batch, length, 4, 2) for i in (0, 8, 16))
        q, k, v = (part.transpose(1, 2) for part in parts)
        z = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.out(z.transpose(1, 2).reshape(batch, length, 8)).square().mean()


@pytest.mark.parametrize("how", ["unbind", "permute", "chunk", "heads", "slice"])
def test_query_key_and_value_are_taken_apart(how: str) -> None:
    model, x = Attention(how), torch.randn(2, 3, 8)
    graph = capture(model.train(), (x,))
    layers = [node for node in graph.nodes if find_fused(graph, node) is not None]
    assert [node.types[0].shape[-1] for node in layers] == [24]
    apart = unfuse(graph, layers)
    shapes = [node.types[0].shape for node in apart.nodes if node.op == "linear"]
    assert shapes == [(2, 3, 8)] * 4
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    losses = to_module(graph, one)(x), to_module(apart, other)(x)
    assert torch.allclose(*losses)
    for loss in losses:
        loss.backward()
    assert torch.allclose(one.qkv.weight.grad, other.qkv.weight.grad, atol=1e-6)


class Features(nn.Module):
    """Every feature of a layer on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.layer(x).unbind(-1)), -2).softmax(-1).square().mean()


def test_single_features_are_taken_apart() -> None:
    model, x = Features(), torch.randn(2, 5, 4)
    graph = capture(model.train(), (x,))
    apart = verify(unfuse(graph, [node for node in graph.nodes if find_fused(graph, node) is not None]))
    assert sum(node.op == "linear" for node in apart.nodes) == 3
    assert torch.allclose(to_module(apart, copy.deepcopy(model))(x), model(x))


def test_the_plan_says_that_the_layer_was_taken_apart() -> None:
    graph = capture(Attention("unbind").train(), (torch.randn(2, 3, 8),))
    plan = make_plan(graph, Machine("local", 1, 4, "cpu"), "megatron:tp=4")
    assert [s.name for s in plan.substitutions] == ["unfuse-linear", *["part-split_with_sizes"] * 2]


class Branching(nn.Module):
    """The product is used whole besides being cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        a, b = y.chunk(2, dim=-1)
        return (a * b).sum() + y.sum()


def test_a_layer_whose_output_is_used_whole_is_left() -> None:
    graph = capture(Branching().train(), (torch.randn(2, 4),))
    assert not [node for node in graph.nodes if find_fused(graph, node) is not None]
    nodes: list[Node] = list(graph.nodes)
    assert unfuse(graph, nodes) is graph


class Scores(nn.Module):
    """A product with one vector: what is cut are positions, not features."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.matmul(x, self.vector).chunk(2, dim=-1)
        return (first * second.tanh()).mean()


@pytest.mark.parametrize("length", [4, 6])
def test_products_with_a_vector_are_one(length: int) -> None:
    graph = capture(Scores(), (torch.randn(2, length, 4),))
    assert all(find_fused(graph, node) is None for node in graph.nodes)
