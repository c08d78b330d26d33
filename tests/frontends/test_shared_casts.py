"""Casts of one tensor are made once: fewer operators and bytes, the same values, gradients as near as before."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.frontends import capture
from conjoin.frontends.shared_casts import share_casts
from conjoin.ir import Graph
from conjoin.ops import CAST
from conjoin.runtime import to_module

WIDTH = 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + functional.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h))


def captured() -> tuple[Attention, Tensor, Graph]:
    torch.manual_seed(0)
    model, x = Attention().train(), torch.randn(2, 8, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        return model, x, capture(model, x, lambda y: y.float().square().mean())


def casts_of(graph: Graph) -> list[object]:
    return [node.inputs[0] for node in graph.nodes if node.op == CAST and node.types[0].dtype == torch.bfloat16]


def test_what_a_block_is_given_is_cast_once() -> None:
    _, _, graph = captured()
    assert len(casts_of(graph)) == len(set(casts_of(graph))) + 2, "query, key and value each"
    shared = share_casts(graph)
    assert len(casts_of(shared)) == len(set(casts_of(shared))) == len(set(casts_of(graph)))
    assert share_casts(shared) is shared


def test_the_loss_is_the_same_and_gradients_are_as_near_to_full_precision() -> None:
    model, x, graph = captured()

    def run(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        loss = module(x)
        loss.backward()
        return loss, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}

    exact = copy.deepcopy(model)
    exact(x).square().mean().backward()
    truth = {name: p.grad for name, p in exact.named_parameters() if p.grad is not None}
    plain_loss, plain = run(to_module(graph, copy.deepcopy(model)))
    loss, found = run(to_module(share_casts(graph), copy.deepcopy(model)))
    assert torch.equal(loss, plain_loss)
    for name, gradient in truth.items():
        usual = (plain[name] - gradient).norm()
        assert (found[name] - gradient).norm() <= 2 * usual + 1e-6 * gradient.norm(), name
