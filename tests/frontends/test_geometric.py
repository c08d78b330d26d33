"""Layers of PyTorch Geometric as they are, captured and with vertices split: the library's own model is the judge."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.errors import CaptureError
from conjoin.ops import AGGREGATE, GRAPH_ATTENTION, Split
from conjoin.runtime.movement.dealt_edges import DealtEdges, Part
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from tests.runtime.hand_plans import by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it uses calls of torch's that are to go
    geometric = importlib.import_module("torch_geometric.nn")
VERTICES, EDGES = 11, 34


class Network(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor, edges: Tensor, *weight: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, edges, *weight)), edges, *weight)


class Weighted(Network):
    def forward(self, x: Tensor, edges: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edges, weight)


class Plain(Network):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, edges)


def layers(*widths: int) -> nn.Module:
    return nn.Sequential(nn.Linear(*widths[:2]), nn.ReLU(), nn.Linear(*widths[1:]))


def convolutions(kind: Callable[..., nn.Module], **options: Any) -> Network:
    return Plain(kind(5, 8, **options), kind(8, 3, **options))


MODELS: dict[str, Callable[[], Network]] = {
    "GCN": lambda: convolutions(geometric.GCNConv),
    "GCN improved": lambda: convolutions(geometric.GCNConv, improved=True),
    "GCN without loops": lambda: convolutions(geometric.GCNConv, add_self_loops=False),
    "GCN with weights": lambda: Weighted(geometric.GCNConv(5, 8), geometric.GCNConv(8, 3, improved=True)),
    "SAGE": lambda: convolutions(geometric.SAGEConv),
    "SAGE of the greatest": lambda: convolutions(geometric.SAGEConv, aggr="max"),
    "GIN": lambda: Plain(geometric.GINConv(layers(5, 6, 8)), geometric.GINConv(layers(8, 6, 3), train_eps=True)),
    "GAT": lambda: Plain(geometric.GATConv(5, 4, heads=2), geometric.GATConv(8, 3)),
    "GAT without loops": lambda: Plain(
        geometric.GATConv(5, 4, heads=2, add_self_loops=False), geometric.GATConv(8, 3, add_self_loops=False)
    ),
}


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "APPNP": lambda: Plain(geometric.GCNConv(5, 3), geometric.APPNP(2, 0.1)),
    "SG": lambda: convolutions(partial(geometric.SGConv, K=2)),
    "SSG": lambda: convolutions(partial(geometric.SSGConv, alpha=0.1, K=2)),
    "MixHop": lambda: Plain(geometric.MixHopConv(5, 4), geometric.SAGEConv(12, 3)),
    "GCN2": lambda: TwoInputs(geometric.GCN2Conv(5, 0.5), geometric.SAGEConv(5, 3)),
    "FA": lambda: TwoInputs(geometric.FAConv(5), geometric.SAGEConv(5, 3)),
    "GATv2": lambda: Plain(geometric.GATv2Conv(5, 4, heads=2), geometric.GATv2Conv(8, 3, concat=False)),
    "AGNN": lambda: Plain(geometric.AGNNConv(), geometric.SAGEConv(5, 3)),
    "GAT with edges": lambda: Weighted(geometric.GATConv(5, 4, edge_dim=1), geometric.GATConv(4, 3, edge_dim=1)),
    "GATv2 with edges": lambda: Weighted(
        geometric.GATv2Conv(5, 4, edge_dim=1, fill_value="add"), geometric.GATv2Conv(4, 3, edge_dim=1, fill_value=0.3)
    ),
}
"""Others that put loops in; these may be captured in any way."""


class TwoInputs(Network):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
        return self.second(torch.relu(self.first(x, x * 2, edges)), edges)


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_that_put_loops_in(name: str) -> None:
    torch.manual_seed(2)
    edges = torch.randint(VERTICES - 1, (2, EDGES))
    model = OTHERS[name]()
    weights = (torch.rand(EDGES),) if isinstance(model, Weighted) else ()
    batch = torch.randn(VERTICES, 5), edges, *weights, torch.randint(3, (VERTICES,))
    sample = captured(model, batch, nn.functional.cross_entropy)
    loss, gradients = step_of_plain(sample)
    plan = by_strategy(sample, "vertex-parallel", 2)
    for theirs in run_ranks(plan.mesh, partial(step_of, plan, sample)):
        assert theirs[0] == pytest.approx(loss, rel=1e-9)
        torch.testing.assert_close(theirs[1], gradients, rtol=1e-9, atol=1e-12)


@cache
def sample_of(name: str) -> Sample:
    torch.manual_seed(2)
    edges = torch.randint(VERTICES - 1, (2, EDGES))
    assert (edges[0] == edges[1]).any(), "some vertices have an edge to themselves"
    model = MODELS[name]()
    loop_once = torch.cat((edges[:, edges[0] != edges[1]], torch.tensor([[3], [3]])), dim=1)
    weighted = isinstance(model, Weighted)  # of two loops of one vertex the library takes any weight
    graph = loop_once if weighted else edges
    weights = (torch.rand(graph.shape[1]),) if weighted else ()
    batch = torch.randn(VERTICES, 5), graph, *weights, torch.randint(3, (VERTICES,))
    return captured(model, batch, nn.functional.cross_entropy)


def step_of(plan: Any, sample: Sample, ranks: Communicator) -> tuple[float, dict[str, Tensor]]:
    module = module_on(plan, sample, ranks)
    loss = module(*sample.inputs)
    loss.backward()
    return loss.item(), {name: p.grad.as_subclass(Tensor) for name, p in module.named_parameters()}  # type: ignore[union-attr]


@pytest.mark.parametrize("name", MODELS)
def test_layers_are_captured_as_they_are_and_vertices_split(name: str) -> None:
    sample = sample_of(name)
    ops = [node.op for node in sample.graph.nodes]
    assert ops.count(AGGREGATE) + ops.count(GRAPH_ATTENTION) == 2
    assert ops.count(GRAPH_ATTENTION) == 2 * name.startswith("GAT")
    loss, gradients = step_of_plain(sample)
    plan = by_strategy(sample, "vertex-parallel", 3)
    for theirs in run_ranks(plan.mesh, partial(step_of, plan, sample)):
        assert theirs[0] == pytest.approx(loss, rel=1e-9)
        torch.testing.assert_close(theirs[1], gradients, rtol=1e-9, atol=1e-12)


def step_of_plain(sample: Sample) -> tuple[float, dict[str, Tensor | None]]:
    """The library's own model."""
    plain = copy.deepcopy(sample.model)
    loss = nn.functional.cross_entropy(plain(*sample.inputs[:-1]), sample.inputs[-1])
    loss.backward()
    return loss.item(), {key: p.grad for key, p in plain.named_parameters()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["GCN", "GCN improved", "GAT", "GAT without loops"])
def test_a_rank_has_its_vertices_edges_and_no_others(name: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops are put in where the vertices are, so that edges are split as they come."""
    parts: list[Part] = []

    def find(dealt: DealtEdges, *ends: Any) -> Part:
        parts.append(found(dealt, *ends))
        return parts[-1]

    found = DealtEdges.find
    monkeypatch.setattr(DealtEdges, "find", find)
    sample = sample_of(name)
    plan = by_strategy(sample, f"vertex-parallel:parts={ranks}", ranks)
    edges = next(leaf for leaf in plan.graph.leaves if leaf.type.shape == (2, EDGES))
    assert {placement for _, placement in edges.type.layout} == {Split(1)}
    loss, gradients = step_of_plain(sample)
    for theirs in run_ranks(plan.mesh, partial(step_of, plan, sample)):
        assert theirs[0] == pytest.approx(loss, rel=1e-9)
        torch.testing.assert_close(theirs[1], gradients, rtol=1e-9, atol=1e-12)
    assert sum(len(part.ends[0]) for part in parts) == 2 * EDGES  # of two layers; each edge is on one rank


class Own(geometric.GCNConv):  # type: ignore[misc, name-defined]
    """Messages without their weights: a loop of weight 0 counts as any other."""

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return x_j


@pytest.mark.parametrize(
    "layer",
    [
        lambda: geometric.GCNConv(5, 3, aggr="mean"),
        lambda: geometric.GCNConv(5, 3, aggr="max"),
        lambda: geometric.GATConv(5, 3, aggr="mean"),
        lambda: Own(5, 3),
        lambda: geometric.SGConv(5, 3, aggr="max"),
    ],
)
def test_a_layer_that_would_count_loops_that_it_took_out_is_refused(layer: Callable[[], nn.Module]) -> None:
    batch = torch.randn(VERTICES, 5), torch.randint(VERTICES, (2, EDGES)), torch.randint(3, (VERTICES,))
    with pytest.raises(CaptureError, match=r"The layer module_0 .* add_self_loops=False"):
        captured(geometric.Sequential("x, e", [(layer(), "x, e -> x")]), batch, nn.functional.cross_entropy)


def test_layers_whose_shapes_edges_decide_are_told_as_such() -> None:
    batch = torch.randn(VERTICES, 5), torch.randint(VERTICES, (2, EDGES)), torch.randint(3, (VERTICES,))
    model = geometric.Sequential("x, e", [(geometric.SuperGATConv(5, 3), "x, e -> x")])
    with pytest.raises(CaptureError, match="a shape depends on tensor values"):
        captured(model, batch, nn.functional.cross_entropy)
