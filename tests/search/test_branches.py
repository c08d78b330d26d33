"""Branches: found between forks and joins, dealt out in balance, and placed where that is faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph, place
from conjoin.machine import Machine
from conjoin.ops import LINEAR_RELU
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import Wish, find_plan, make_plan
from conjoin.search.branch_places import _Placing, place_branches
from conjoin.search.branches import find_forks
from conjoin.search.contest import Contest, Enough
from conjoin.search.searches import open_contest
from conjoin.search.variants import as_variant
from conjoin.sim import Skeleton, take_graph_apart


class Towers(nn.Module):
    """Towers of small layers, each on an input of its own, and a head over all."""

    def __init__(self, depths: tuple[int, ...], width: int = 32) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))
            for depth in depths
        )
        self.head = nn.Linear(len(depths) * width, 1)

    def forward(self, *inputs: Tensor) -> Tensor:
        *xs, y = inputs
        both = torch.cat([tower(x) for tower, x in zip(self.towers, xs, strict=True)], 1)
        return nn.functional.mse_loss(self.head(both), y)


def towers(*depths: int) -> tuple[Graph, nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, batch = Towers(depths), (*(torch.randn(8, 32) for _ in depths), torch.randn(8, 1))
    return capture(model, batch), model, batch


def skeleton_of(function: Any, *inputs: Tensor) -> Skeleton:
    class Model(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return function(*xs)  # type: ignore[no-any-return]

    return take_graph_apart(capture(Model().eval(), inputs))[0]


def names(skeleton: Skeleton) -> list[list[str]]:
    forks = find_forks(skeleton)
    return [[" ".join(skeleton.operators[i].call.op for i in branch) for branch in fork.branches] for fork in forks]


def test_branches_lie_between_a_fork_and_its_join() -> None:
    x = torch.randn(4, 4)
    assert names(skeleton_of(lambda x: (x.tanh().exp() + x.sin()).sum(), x)) == [["tanh exp", "sin"]]
    assert names(skeleton_of(lambda x: (x.tanh() + x).sum(), x)) == []
    nested = names(skeleton_of(lambda x: (((h := x.exp()).tanh() * h.cos()).neg() + h.sin()).sum(), x))
    assert nested == [["tanh cos mul.Tensor neg", "sin"], ["tanh", "cos"]]


def test_ways_that_cross_are_branches_only_until_they_do() -> None:
    def crossed(x: Tensor) -> Tensor:
        one, other = x.tanh(), x.sin()
        return torch.cat([one.exp() + other, other.cos()]).sum()

    assert names(skeleton_of(crossed, torch.randn(4, 4))) == [["tanh exp", "sin"], ["add.Tensor", "cos"]]


MACHINE = Machine.preset("dgx-h100")


def contest_of(graph: Graph, strategy: str, machine: Machine = MACHINE) -> Contest:
    contest = open_contest(graph, machine, CostModel(), Wish())
    contest.enter_plan(make_plan(graph, machine, strategy))
    return contest


def test_branches_are_dealt_out_in_balance() -> None:
    graph, _, _ = towers(4, 1, 1, 2)
    contest = contest_of(graph, "data-parallel")
    assert contest.best is not None
    work = _Placing(contest, as_variant(contest.best))
    (fork,) = next(kind for kind in work.kinds() if len(kind[0].branches) == 4)
    dealt = work.deal(fork, ("d0",))
    by_place = [sorted(len(b) for b in fork.branches if dealt[b[0]] == (("d0", p),)) for p in range(2)]
    assert by_place == [[8], [2, 2, 4]]


def test_towers_are_placed_beside_each_other_and_train_the_same() -> None:
    """Eight devices wait for launches of kernels that do next to nothing: each place then launches its own tower."""
    graph, model, batch = towers(3, 3, 3, 3)
    contest = contest_of(graph, "data-parallel")
    found = place_branches(contest)
    assert contest.best is not None and found is not None
    assert found.seconds < 0.65 * contest.best.seconds
    contest.judge(found.entry, found.simulation)
    result = find_plan(graph, MACHINE, CostModel(), Wish(budget=600, steps=120))
    assert "branches beside each other" in result.plan.strategy or "random changes" in result.plan.strategy
    assert result.seconds_per_step <= found.seconds
    confined = [place(n, MACHINE.mesh).at for n in result.plan.graph.nodes if n.op in ("linear", LINEAR_RELU)]
    assert len({*confined}) > 2
    verdict = verify_in_process(Case(result.plan, graph, model, batch), 1)
    assert verdict.worst < 1e-9


def test_a_chain_has_no_branches_to_place() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    graph = capture(model, (torch.randn(8, 16),), lambda y: y.square().mean())
    contest = contest_of(graph, "data-parallel")
    assert place_branches(contest) is None


def test_a_search_without_time_still_ends_with_a_plan() -> None:
    graph, _, _ = towers(1, 1)
    assert find_plan(graph, MACHINE, CostModel(), Wish(budget=0.0)).seconds_per_step > 0


def test_branches_that_were_found_are_kept_when_steps_run_out() -> None:
    """A search that is stopped in the midst of placing branches has judged what it found of them."""
    graph, _, _ = towers(3, 3, 3, 3)
    contest = contest_of(graph, "data-parallel")
    whole = place_branches(contest_of(graph, "data-parallel"))
    assert contest.best is not None and whole is not None
    before, contest.steps_left = contest.best.seconds, 3
    with pytest.raises(Enough):
        place_branches(contest)
    assert contest.best.seconds < before
