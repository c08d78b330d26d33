"""Every model of the zoo: loss, gradients and statistics of the graph are those of the plain model, bit for bit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zoo
from conjoin.frontends import capture, not_understood
from conjoin.ir import parse_graph, verify
from conjoin.runtime import CapturedModule, to_module
from tests.ir.graphs import check_round_trip
from tests.zoo.graphs import captured
from tests.zoo.workloads import tiny_names

MODES = {
    "train, float32": (True, torch.float32),
    "train, float64": (True, torch.float64),
    "eval": (False, torch.float32),
}


def in_dtype(workload: zoo.Workload, dtype: torch.dtype) -> zoo.Workload:
    batch = tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in workload.batch)
    return zoo.Workload(workload.model.to(dtype), batch, workload.loss)


def step(net: nn.Module, workload: zoo.Workload) -> tuple[Tensor, Tensor]:
    """Loss and random state after one forward and backward from a fixed seed."""
    torch.manual_seed(3)
    if isinstance(net, CapturedModule):
        loss = net(*workload.batch)
    else:
        taken = len(inspect.signature(net.forward).parameters)
        loss = workload.loss(net(*workload.batch[:taken]), *workload.batch[taken:])
    loss.backward()
    return loss, torch.get_rng_state()


NAMES = tiny_names()
REORDERED = {"gat": 1e-6, "gat-ppi": 1e-6}
"""What adds edges up in the order of their targets, in which the plain model does not: by how much it may differ."""
OTHERS = {"train, float64": 0, "eval": 3}
CASES = [(name, mode) for i, name in enumerate(NAMES) for mode in MODES if OTHERS.get(mode, i % 4) == i % 4]
"""A graph has the dtypes and the mode of its model: that it can have others is seen of every fourth (with `eval` of a
network with batch norm, one with dropout and a recurrent one)."""


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_graph_equals_the_plain_model(name: str, mode: str, unequal: Callable[..., list[str]]) -> None:
    training, dtype = MODES[mode]
    workload = in_dtype(zoo.build(f"{name}:tiny"), dtype)
    workload.model.train(training)
    plain = copy.deepcopy(workload.model)
    graph = captured(name) if (training, dtype) == (True, torch.float32) else capture(*workload)
    module = to_module(graph, workload.model)
    (loss, drawn), (want, want_drawn) = step(module, workload), step(plain, workload)
    assert torch.equal(loss, want) and loss.dtype == dtype
    assert torch.equal(drawn, want_drawn)
    assert unequal(module, plain, REORDERED.get(name, 0.0)) == []
    assert not_understood(graph).complete, str(not_understood(graph))
    assert graph.training is training and graph.loss == 0
    assert any(graph.sources)
    assert verify(parse_graph(str(graph))) == graph
    check_round_trip(graph)
