"""Operators written out as others: the same values, gradients and buffers, and nothing left that nobody reads."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Graph, can_expand, drop_unused, expand, find_faults, parse_graph
from conjoin.runtime import to_module


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))  # type: ignore[no-any-return]


def loss(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, labels, ignore_index=1)


def run(graph: Graph, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    module = to_module(graph, copy.deepcopy(model))
    value = module(batch)
    value.backward()
    found = {f"{name}.grad": parameter.grad for name, parameter in module.named_parameters()}
    return {"loss": value.detach(), **found, **dict(module.named_buffers())}  # type: ignore[dict-item]


def test_batch_norm_and_a_mean_loss_written_out_compute_the_same() -> None:
    torch.manual_seed(0)
    model = Net().double().train()
    batch = torch.randn(6, 2, 5, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 1, 4])
    graph = capture(model, batch, loss)
    chosen = [node for node in graph.nodes if can_expand(node)]
    assert [node.op for node in chosen] == ["_native_batch_norm_legit_functional", "cross_entropy_loss"]
    written = expand(graph, chosen)
    assert find_faults(written) == ()
    assert chosen[0].op not in [node.op for node in written.nodes] and written.nodes[-1].op == "div.Tensor"
    plain, expanded = run(graph, model, batch), run(written, model, batch)
    assert plain.keys() == expanded.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(expanded[name], tensor, rtol=1e-9, atol=1e-9)


def test_one_of_two_may_be_written_out() -> None:
    model = Net().train()
    graph = capture(model, (torch.randn(6, 2, 5, 5), torch.zeros(6, dtype=torch.int64)), loss)
    norm, entropy = (node for node in graph.nodes if can_expand(node))
    without_norm = [node.op for node in expand(graph, [norm]).nodes]
    assert norm.op not in without_norm and without_norm[-1] == entropy.op
    assert norm in expand(graph, [entropy]).nodes


def test_the_users_line_stays_with_what_stands_for_his_call() -> None:
    graph = capture(Net().train(), (torch.randn(6, 2, 5, 5), torch.zeros(6, dtype=torch.int64)), loss)
    norm = next(node for node in graph.nodes if can_expand(node))
    source = graph.source_of(norm)
    written = expand(graph, [norm])
    new = [node for node in written.nodes if node not in graph.nodes and written.source_of(node) == source]
    assert source is not None and len(new) > 5


def test_nothing_to_write_out_gives_the_same_graph() -> None:
    graph = parse_graph('graph "g" eval\ninput:x f32[2]\ntakes [input:x] in null\n%0: f32[2] = relu(input:x)\n'
                        "returns [%0] in null\n")  # fmt: skip
    assert expand(graph, ()) is graph
    assert drop_unused(graph) is graph


def test_unused_nodes_go_but_random_draws_stay() -> None:
    graph = parse_graph("""\
graph "g" train
input:x f32[2]
takes [input:x] in null
%0: f32[2] = relu(input:x)
%1: f32[2] = neg(%0)
%2: f32[2] = dropout(%0, p=0.5, train=true)
%3: f32[2] = tanh(input:x)  @ "a.py":7
returns [%3] in null
""")
    left = drop_unused(graph)
    assert [node.op for node in left.nodes] == ["relu", "dropout", "tanh"]
    assert str(left.source_of(left.nodes[-1])) == "a.py:7"
