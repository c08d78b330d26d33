"""Inspection: parameters, work and memory counted by hand, and against what is published of large models."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import conjoin
import zoo
from conjoin.ir import Graph, fingerprint, parse_graph, verify
from conjoin.report import Inspection, OperatorSummary, inspect, split_outcomes
from tests.ir import opaque
from zoo import llama
from zoo.tokens import next_token_loss


def graph_of(*lines: str, returns: str) -> Graph:
    def pack(count: int) -> str:
        return f'{{"kind":"tuple","keys":[],"children":[{",".join(["null"] * count)}]}}'

    head = ('graph "g" eval', "input:x f32[4,8]", "input:y f32[8]", f"takes [input:x, input:y] in {pack(2)}")
    end = f"returns [{returns}] in {pack(len(returns.split(', ')))}"
    return verify(parse_graph("\n".join((*head, *lines, end))))


def summary_of(found: Inspection, op: str) -> OperatorSummary:
    return next(summary for summary in found.operators if summary.op == op)


@pytest.fixture(scope="module")
def mlp() -> Inspection:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model[0].bias.requires_grad_(False)
    model.register_buffer("seen", torch.zeros(5))
    return inspect(conjoin.capture(model, torch.zeros(3, 8)))


def test_an_mlp_by_hand(mlp: Inspection) -> None:
    assert (mlp.name, mlp.training, mlp.num_nodes) == ("Sequential", True, 3)
    assert mlp.num_parameters == 8 * 16 + 16 + 16 * 4 + 4
    assert mlp.num_trainable == mlp.num_parameters - 16
    assert mlp.parameter_bytes == 4 * mlp.num_parameters
    assert mlp.input_bytes == 4 * 3 * 8
    assert mlp.forward_flops == 2 * 3 * 8 * 16 + 3 * 16 + 2 * 3 * 16 * 4
    assert mlp.activation_bytes == 4 * 3 * (16 + 16 + 4)
    assert mlp.peak_bytes == 4 * 3 * (16 + 16)
    assert mlp.opaque == ()


def test_operators_stand_in_order_of_their_work(mlp: Inspection) -> None:
    assert [(op.op, op.count, op.flops) for op in mlp.operators] == [("linear", 2, 1152.0), ("relu", 1, 48.0)]
    read, written = 4 * (3 * 8 + 8 * 16 + 16 + 3 * 16 + 16 * 4 + 4), 4 * 3 * (16 + 4)
    assert mlp.operators[0].bytes == read + written


def test_what_an_operator_can_be_split_along(mlp: Inspection) -> None:
    assert [op.splits for op in mlp.operators] == [("P", "S(0)", "S(1)"), ("S(0)", "S(1)")]


def test_data_can_be_written_as_json(mlp: Inspection) -> None:
    data = json.loads(json.dumps(mlp.to_json(), allow_nan=False))
    assert data["num_parameters"] == mlp.num_parameters and data["opaque"] == []
    assert data["operators"][1] == {
        "op": "relu", "count": 1, "flops": 48.0, "bytes": 384, "splits": ["S(0)", "S(1)"], "opaque": False,
        "expandable": False,
    }  # fmt: skip
    assert set(data) == {*Inspection.__slots__, "opaque"}


def test_the_fingerprint_is_that_of_the_graph() -> None:
    graph = graph_of("%0: f32[4,8] = relu(input:x)", returns="%0")
    assert inspect(graph).fingerprint == fingerprint(graph)


def test_views_cost_nothing() -> None:
    found = inspect(
        graph_of(
            "%0: f32[4,8] = relu(input:x)",
            "%1: f32[8,4] = t(%0)",
            "%2: f32[32] = reshape(%0, shape=[32])",
            "%3: f32[4,8,1] = unsqueeze(%0, dim=2)",
            returns="%1, %2, %3",
        )
    )
    views = [op for op in found.operators if op.op != "relu"]
    assert len(views) == 3 and all(op.flops == op.bytes == 0 for op in views)
    assert found.activation_bytes == found.peak_bytes == 4 * 32


def test_what_is_read_no_more_is_freed() -> None:
    steps = [f"%{i}: f32[4,8] = relu({f'%{i - 1}' if i else 'input:x'})" for i in range(10)]
    found = inspect(graph_of(*steps, returns="%9"))
    assert (found.activation_bytes, found.peak_bytes) == (10 * 128, 2 * 128)
    assert inspect(graph_of(*steps, returns="%0, %9")).peak_bytes == 3 * 128


def test_a_view_keeps_what_it_looks_at() -> None:
    lines = (
        "%0: f32[4,8] = relu(input:x)",
        "%1: f32[8,4] = t(%0)",
        "%2: f32[4,8] = neg(input:x)",
        "%3: f32[4,8] = neg(%2)",
        "%4: f32[8,4] = exp(%1)",
    )
    assert inspect(graph_of(*lines, returns="%3, %4")).peak_bytes == 3 * 128
    assert inspect(graph_of(*lines[:4], returns="%3")).peak_bytes == 2 * 128


def test_a_result_nobody_reads_is_freed_at_once() -> None:
    lines = ("%0: f32[4,8] = relu(input:x)", "%1: f32[4,8] = neg(input:x)")
    assert inspect(graph_of(*lines, returns="%1")).peak_bytes == 128


def test_an_empty_graph() -> None:
    found = inspect(graph_of(returns="input:x"))
    assert (found.num_nodes, found.forward_flops, found.peak_bytes, found.operators) == (0, 0, 0, ())


def test_an_undeclared_operator_is_opaque() -> None:
    graph = graph_of(f"%0: f32[2,8] = {opaque.NAME}(input:x)", returns="%0")
    found = inspect(graph)
    assert found.opaque == (opaque.NAME,)
    assert found.operators == (OperatorSummary(opaque.NAME, 1, 0.0, 4 * (32 + 16), (), True, False),)
    assert split_outcomes(graph.nodes[0]) == ()


@pytest.mark.parametrize("first", [0, 1])
def test_a_form_nobody_declared_is_opaque_beside_one_that_is_not(first: int) -> None:
    calls = ("block_diag([input:x, input:x])", "block_diag([input:y])")
    types = ("f32[8,16]", "f32[1,8]")
    lines = [f"%{i}: {types[which]} = {calls[which]}" for i, which in enumerate((first, 1 - first))]
    graph = graph_of(*lines, returns="%0, %1")
    assert sorted(node.spec is None for node in graph.nodes) == [False, True]
    found = inspect(graph)
    assert found.opaque == ("block_diag",) and found.operators[0].count == 2
    assert found.operators[0].bytes == 4 * (2 * 32 + 8 * 16) + 4 * (8 + 8)


def test_batch_norm_can_be_taken_apart() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            normed: Tensor = self.norm(self.conv(x))
            return normed

    found = inspect(conjoin.capture(Net(), torch.zeros(2, 3, 8, 8)))
    norms = [op for op in found.operators if "batch_norm" in op.op]
    assert len(norms) == 1 and norms[0].expandable
    assert not summary_of(found, "conv2d").expandable


@pytest.mark.parametrize("name", ["mlp", "lenet", "bert-base", "dlrm", "rnntc"])
@pytest.mark.parametrize("training", [True, False])
def test_no_more_is_alive_than_is_made(name: str, training: bool) -> None:
    model, batch, loss = zoo.build(f"{name}:tiny", device="meta")
    found = inspect(conjoin.capture(model.train(training), batch, loss))
    assert 0 < found.peak_bytes <= found.activation_bytes
    assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.buffer_bytes == sum(buffer.nbytes for buffer in model.buffers())
    assert json.dumps(found.to_json())


def test_resnet_50_as_published() -> None:
    """He et al., table 1: 3.8 G multiply-adds; with the stride in the 3x3 convolutions, as torchvision, 4.09 G."""
    model, batch, loss = zoo.build("resnet-50", batch_size=1, device="meta")
    found = inspect(conjoin.capture(model, batch, loss))
    assert found.num_parameters == found.num_trainable == 25_557_032
    assert found.forward_flops == pytest.approx(2 * 4.09e9, rel=0.03)
    assert found.opaque == () and found.peak_bytes < found.activation_bytes


def test_llama_7b_does_two_flops_a_parameter_and_token() -> None:
    """Of its 32 equal layers one tells of all: what it adds is counted as often."""
    one, two = (inspect(conjoin.capture(*_llama_7b(layers))) for layers in (1, 2))
    parameters, flops = (
        getattr(one, name) + 31 * (getattr(two, name) - getattr(one, name))
        for name in ("num_parameters", "forward_flops")
    )
    tokens = one.input_bytes // (2 * 8)
    assert tokens == 2048 and parameters == 6_738_415_616
    assert flops == pytest.approx(2 * parameters * tokens, rel=0.15)


def _llama_7b(layers: int) -> zoo.Workload:
    config = replace(llama._LLAMA_7B, layers=layers)
    with torch.device("meta"):
        return zoo.Workload(llama.Llama(config), llama.llama_batch(1, config), next_token_loss)
