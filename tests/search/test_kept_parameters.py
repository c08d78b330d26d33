"""Parameters of some blocks stay gathered between the passes: the same training, fewer bytes sent, more held."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.cost import CostModel
from conjoin.errors import ConjoinError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan, regathered_parameters
from conjoin.machine import parse_machine
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.search import Wish, make_plan
from conjoin.search.entries import plan_of
from conjoin.search.kept_count import try_keeping
from conjoin.search.searches import open_contest
from conjoin.sim import predict, simulate
from tests.ir.wording import assert_three_sentences
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.relu(self.up(x)))
        return made


class Tower(nn.Module):
    def __init__(self, width: int, blocks: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        made: Tensor = self.last(x)
        return made


@cache
def small() -> tuple[Graph, nn.Module, Any]:
    torch.manual_seed(0)
    model, batch = Tower(8).train(), (torch.randn(8, 8), torch.randn(8, 8))
    return capture(model, batch, nn.functional.mse_loss), model, batch


def plan_by(strategy: str) -> Plan:
    return make_plan(small()[0], parse_machine("local:4"), strategy)


@pytest.mark.parametrize(
    ("strategy", "again"),
    [
        ("fsdp+keep=2", {"first", "blocks.0", "blocks.1"}),
        ("fsdp+keep=every-2", {"first", "blocks.0", "blocks.2", "last"}),
        ("hsdp:shard=2,replicate=2+keep=1+recompute=full", {"first", "blocks.0", "blocks.1", "blocks.2"}),
        ("fsdp+megatron:tp=2+keep=4+micro=2", {"first"}),
    ],
)
def test_what_is_kept_trains_as_on_one_device(strategy: str, again: set[str]) -> None:
    plan = plan_by(strategy)
    found = {".".join(name.split(".")[: 2 if name.startswith("blocks") else 1]) for name in regathered_parameters(plan)}
    assert found == again and f"+keep={strategy.partition('keep=')[2].partition('+')[0]}" in plan.strategy
    _, model, batch = small()
    assert conjoin.verify_plan(plan, model, batch, loss=nn.functional.mse_loss, num_steps=2).passed


def test_what_is_kept_is_not_sent_again() -> None:
    """A rank counts the bytes; those of kept blocks are gathered once and not twice."""
    plans = [plan_by("fsdp"), plan_by("fsdp+keep=2")]
    sent = [run_ranks(plan.mesh, lambda ranks, plan=plan: sent_by(plan, ranks)) for plan in plans]
    assert sent == [[explain(plan).bytes_of(rank) for rank in range(4)] for plan in plans]
    kept = 2 * (2 * 4 * 8 * 8 + 8 + 4 * 8) + 8 * 8 + 8  # two blocks and the last layer
    assert sent[0][0] - sent[1][0] == 4 * kept * 3 // 4, "three quarters of every parameter lie elsewhere"


def sent_by(plan: Plan, ranks: Communicator) -> int:
    module = module_on(plan, Sample(plan.graph, small()[1], ()), ranks)
    ranks.bytes_sent = 0
    module(*small()[2]).backward()
    return ranks.bytes_sent


def test_more_is_held_and_it_is_faster() -> None:
    machine = parse_machine("p3.8xlarge")
    plans = [make_plan(large(), machine, name) for name in ("fsdp", "fsdp+keep=8", "fsdp+keep=16", "zero1")]
    told = [predict(plan, machine, CostModel()) for plan in plans]
    peaks = [t.memory.peak for t in told]
    assert peaks[0] < min(peaks[1:3]) and max(peaks[1:3]) < peaks[3]
    assert told[0].seconds > told[1].seconds > told[2].seconds > told[3].seconds


@cache
def large() -> Graph:
    with torch.device("meta"):
        model, batch = Tower(1024, 24).train(), (torch.empty(64, 1024), torch.empty(64, 1024))
    return capture(model, batch, nn.functional.mse_loss)


def test_the_planner_keeps_what_memory_allows() -> None:
    machine = parse_machine("p3.8xlarge")
    plans = (make_plan(large(), machine, name) for name in ("fsdp", "zero1"))
    few, many = (predict(plan, machine, CostModel(), optimizer="sgd").memory.peak for plan in plans)
    wish = Wish(memory=(few + many) // 2, optimizer="sgd")
    contest = open_contest(large(), machine, CostModel(), wish)
    plain = contest.enter_plan(make_plan(large(), machine, "fsdp"), is_counted=False)
    assert contest.best is plain
    try_keeping(contest)
    best = contest.best
    assert best is not None and best.seconds < plain.seconds and (best.peak_bytes or 0) <= contest.capacity
    plan = plan_of(best, large(), machine)
    counts = {name.split(".")[1] for name in regathered_parameters(plan) if name.startswith("blocks")}
    assert 0 < len(counts) < 24 and counts == {str(i) for i in range(len(counts))}, "the last ones stay"
    assert simulate(plan, contest.prices).timeline.seconds == best.seconds
    assert predict(plan, machine, CostModel(), optimizer="sgd").memory.peak <= contest.capacity


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        ("zero1+keep=1", "none of them is gathered again"),
        ("fsdp+keep=9", "It has 4 blocks"),
        ("fsdp+keep=all", "the last so many blocks"),
        ("fsdp+keep=1+keep=2", "given keep twice"),
    ],
)
def test_what_cannot_be_kept_says_why(strategy: str, says: str) -> None:
    with pytest.raises(ConjoinError, match=says) as error:
        plan_by(strategy)
    assert_three_sentences(error.value)
