"""Plans made after another plan: what the strategy makes of the other shape, and legal wherever it makes none."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, LeafKind, Node, find_layout_faults, recomputed_segments
from conjoin.machine import Machine
from conjoin.search import make_plan, plan_alike
from conjoin.search.counterparts import find_counterparts

FOUR = Machine("four", 1, 4, "cpu")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(self.norm(x)).chunk(3, -1)
        return x + functional.dropout(self.down(torch.relu(a) * b + c), 0.5, self.training)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(16, 8), nn.ModuleList(map(_layer, range(3))), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _layer(_: int) -> Layer:
    return Layer()


def _loss(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


@cache
def graph_of(batch: int, length: int, training: bool = True) -> Graph:
    ids = torch.zeros(batch, length, dtype=torch.int64)
    return capture(Tower().train(training), (ids, ids), _loss)


STRATEGIES = (
    "data-parallel", "fsdp", "zero1+recompute=full", "megatron:tp=2,dp=2", "megatron:tp=4,sp",
    "fsdp+megatron:tp=2+micro=2",
)  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_the_plan_that_the_strategy_makes_of_the_other_shape(strategy: str) -> None:
    plan = make_plan(graph_of(8, 8), FOUR, strategy)
    for batch, length, training in ((12, 8, True), (6, 5, True), (8, 8, False), (9, 4, False)):
        if "micro" in strategy and batch > 8:
            continue  # more micro-batches of the same size, where the strategy has as many larger ones
        graph = graph_of(batch, length, training)
        try:
            wanted = make_plan(graph, FOUR, strategy)
        except StrategyError:  # micro-batches are for training
            assert "micro" in strategy
            continue
        found = plan_alike(plan, graph)
        assert (found.shortened, found.fresh) == (0, 0)
        if not training and "megatron" in strategy:
            continue  # without dropout the strategy leaves sums unfinished for longer
        assert found.plan.graph == wanted.graph and found.plan.memory == wanted.memory
        assert found.plan.computes == wanted.computes and found.plan.model == wanted.model
        assert {each.name for each in found.plan.substitutions} == {each.name for each in wanted.substitutions}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("batch", "length"), [(1, 8), (2, 1), (3, 3)])
def test_what_is_too_short_is_split_less_and_stored_alike(strategy: str, batch: int, length: int) -> None:
    plan = make_plan(graph_of(8, 8), FOUR, strategy)
    made = plan_alike(plan, graph_of(batch, length)).plan
    assert not find_layout_faults(made.graph, FOUR.mesh)
    stored = [[leaf for leaf in each.graph.leaves if leaf.kind is not LeafKind.INPUT] for each in (plan, made)]
    assert stored[0] == stored[1]
    assert len(recomputed_segments(made)) == len(recomputed_segments(plan))


def _pictures(batch: int, training: bool = True) -> Graph:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    return capture(
        model.train(training), (torch.zeros(batch, 2, 4, 4), torch.zeros(batch).long()), nn.CrossEntropyLoss()
    )


def test_statistics_of_each_rank_stay_so_and_uneven_pieces_are_refused() -> None:
    strategy = "data-parallel+statistics=rank"
    plan = make_plan(_pictures(8), FOUR, strategy)
    made, wanted = plan_alike(plan, _pictures(12)).plan, make_plan(_pictures(12), FOUR, strategy)
    assert made.graph == wanted.graph
    assert [each.name for each in made.substitutions] == [each.name for each in wanted.substitutions]
    assert not find_layout_faults(plan_alike(plan, _pictures(7, False)).plan.graph, FOUR.mesh)
    with pytest.raises(StrategyError, match="Its batch of 7 has no 4 equal pieces"):
        plan_alike(plan, _pictures(7))


def test_counterparts_are_found_without_what_the_other_has_not() -> None:
    training, evaluation = graph_of(8, 8), graph_of(9, 4, False)
    found = find_counterparts(training, evaluation)
    left = [node.op for node in training.nodes if node not in found]
    assert left == ["dropout"] * 3
    assert all(_weights(mine) == _weights(yours) for mine, yours in found.items())


def _weights(node: Node) -> tuple[str, list[str]]:
    return node.op, [str(value.owner) for value in node.inputs if str(value.owner).startswith("param")]
