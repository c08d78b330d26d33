"""Batch norm by the statistics of each rank's piece: torch's DistributedDataParallel is the judge, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.ir import Plan, parse_graph, pieces_of, plan_from_json, plan_to_json
from conjoin.machine import parse_machine
from conjoin.ops import BATCH_NORM_BY_PIECES, Partial
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_plan
from conjoin.sim import predict
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample

RANKS, STEPS, BATCH = 2, 3, 8


class Block(nn.Module):
    """The basic block of ResNet-18."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(3))
        self.down = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.two(functional.relu(self.norms[0](self.one(x)))))
        return functional.relu(y + self.norms[2](self.down(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4, momentum=0.3)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 6, 2))
        self.own = nn.BatchNorm1d(6, track_running_stats=False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.norm(self.stem(x))))
        return self.head(self.own(x.mean((2, 3))))


@cache
def sample() -> Sample:
    torch.manual_seed(5)
    return captured(Net(), batches()[0], functional.cross_entropy)


@cache
def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(6)
    return [(torch.randn(BATCH, 3, 6, 6).double(), torch.randint(5, (BATCH,))) for _ in range(STEPS)]


class Trained(NamedTuple):
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]


def trained(model: nn.Module, run: Callable[[tuple[Tensor, ...]], Tensor]) -> Trained:
    """Some steps of stochastic gradient descent."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses, gradients = [], []
    for batch in batches():
        optimizer.zero_grad()
        loss = run(batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append({_plain(name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return Trained(losses, gradients, {_plain(name): value.clone() for name, value in model.state_dict().items()})


def _plain(name: str) -> str:
    return name.removeprefix("module.")


def by_ddp(rank: int) -> Trained:
    """Every rank has the loss of its own piece; gradients are averages."""
    model = DistributedDataParallel(copy.deepcopy(sample().model))

    def run(batch: tuple[Tensor, ...]) -> Tensor:
        x, wanted = (part.chunk(RANKS)[rank] for part in batch)
        return functional.cross_entropy(model(x), wanted)

    return trained(model, run)


def by_plan(communicator: Communicator, plan: Plan) -> Trained:
    module = module_on(plan, sample(), communicator)
    return trained(module, lambda batch: module(*batch))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every rank has after some steps of each."""
    plans = {name: by_strategy(sample(), f"ddp+statistics={name}", RANKS) for name in ("rank", "all")}

    def program(communicator: Communicator) -> dict[str, Any]:
        mine = {name: by_plan(communicator, plan) for name, plan in plans.items()}
        return {**mine, "ddp": by_ddp(communicator.rank)}

    return run_processes(plans["rank"].mesh, program, tmp_path_factory.mktemp("ranks"))


def test_losses_gradients_weights_and_running_statistics_are_those_of_ddp(ranks: list[dict[str, Any]]) -> None:
    judge = ranks[0]["ddp"]  # whose running statistics all ranks take at the next step
    means = torch.tensor([rank["ddp"].losses for rank in ranks], dtype=torch.float64).mean(0)
    for rank in ranks:
        mine = rank["rank"]
        torch.testing.assert_close(torch.tensor(mine.losses, dtype=torch.float64), means, rtol=1e-9, atol=0)
        torch.testing.assert_close(mine.gradients, judge.gradients, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(mine.state, judge.state, rtol=1e-9, atol=1e-12)


def test_statistics_of_all_are_others(ranks: list[dict[str, Any]]) -> None:
    mine, others = ranks[0]["rank"], ranks[0]["all"]
    assert mine.losses != pytest.approx(others.losses, rel=1e-3)
    assert not torch.allclose(mine.state["norm.running_var"], others.state["norm.running_var"], rtol=1e-3)


@pytest.mark.parametrize("strategy", ["ddp:4", "hsdp:shard=2,replicate=2"])
def test_a_plan_is_compared_with_a_graph_of_as_many_pieces(strategy: str) -> None:
    plan = by_strategy(sample(), f"{strategy}+statistics=rank")
    assert "+statistics=rank" in plan.strategy and pieces_of(plan.graph) == 4
    assert verify_in_process(Case(plan, sample().graph, sample().model, sample().inputs), 2).passed


def test_running_statistics_of_all_layers_are_one_collective() -> None:
    plan = by_strategy(sample(), "ddp+statistics=rank")
    told = explain(plan)
    summed = [node for node in plan.graph.nodes if node.op == "conjoin::reduce"]
    floats = [node for node in summed if node.types[0].shape]
    assert [node.types[0].shape for node in floats] == [(2, 4 + 3 * 4 + 3 * 6)]
    norms = [node for node in plan.graph.nodes if node.op == BATCH_NORM_BY_PIECES]
    assert len(norms) == 8 and all(Partial() in dict(norm.types[1].layout).values() for norm in norms)
    assert sum(s.name.startswith("statistics-") for s in plan.substitutions) == 8
    assert "pieces=4" in str(plan.graph) and told.bytes_of(0) < explain(by_strategy(sample(), "ddp")).bytes_of(0)


def test_an_average_over_all_batches_is_one_over_the_first_pieces() -> None:
    """The model reads its new statistics in the same step; the plain model on the first piece is the judge."""
    torch.manual_seed(7)
    own = captured(
        nn.Sequential(nn.BatchNorm2d(3, momentum=None), nn.Flatten(), nn.Linear(108, 5)),
        batches()[0],
        functional.cross_entropy,
    )
    plan = by_strategy(own, "ddp+statistics=rank", RANKS)

    def program(communicator: Communicator) -> dict[str, Tensor]:
        module = module_on(plan, own, communicator)
        for batch in batches():
            module(*batch).backward()
        return {name: value.clone() for name, value in module.named_buffers()}

    plain = copy.deepcopy(own.model)
    for x, _ in batches():
        plain(x.chunk(RANKS)[0])
    for found in run_ranks(plan.mesh, program):
        torch.testing.assert_close(found, dict(plain.named_buffers()), rtol=1e-12, atol=0)


def test_a_plan_file_keeps_it_and_one_piece_is_all() -> None:
    plan = by_strategy(sample(), "ddp+statistics=rank")
    assert plan_from_json(plan_to_json(plan)) == plan and parse_graph(str(plan.graph)) == plan.graph
    alone = by_strategy(sample(), "single+statistics=rank", 1)
    assert alone.graph == by_strategy(sample(), "single", 1).graph


def test_a_predicted_step_waits_for_no_statistics() -> None:
    machine = parse_machine("dgx-h100")
    plans = [make_plan(sample().graph, machine, f"ddp+statistics={name}") for name in ("rank", "all")]
    mine, others = (predict(plan, machine, CostModel()) for plan in plans)
    assert mine.seconds < 0.9 * others.seconds


@pytest.mark.parametrize(
    ("strategy", "kind", "says"),
    [
        ("ddp+statistics=some", UsageError, "Write statistics=all or statistics=rank"),
        ("ddp+statistics=rank+statistics=rank", UsageError, "statistics twice"),
        ("statistics=rank", UsageError, "names none"),
        ("ddp:3+statistics=rank", StrategyError, "batch of 8 has no 3 equal pieces"),
        ("spatial:h=2,w=1,dp=2+statistics=rank", StrategyError, "gathered over h"),
    ],
)
def test_what_cannot_be_is_told(strategy: str, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        by_strategy(sample(), strategy, 3 if ":3" in strategy else 4)
