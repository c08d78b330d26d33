"""A part of a model in micro-batches, the rest on the whole batch: the plain model on one device is the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import PlanError, StrategyError, UsageError
from conjoin.frontends import capture
from conjoin.ir import Plan, micro_batched_parts, plan_from_json, plan_to_json
from conjoin.machine import parse_machine
from conjoin.ops import BATCH, PIPELINE
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.verification.checking import Case, verify_in_process
from conjoin.search import make_plan
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample


class Contrastive(nn.Module):
    """Two towers, and a loss in which every sample meets every other one."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.left = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(rate), nn.Linear(16, 4))
        self.right = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 4))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        left = functional.normalize(self.left(self.words(tokens)).mean(1), dim=-1)
        right = functional.normalize(self.right(image), dim=-1)
        scores = left @ right.T * self.scale.exp()
        pairs = torch.arange(len(tokens))
        return (functional.cross_entropy(scores, pairs) + functional.cross_entropy(scores.T, pairs)) / 2


def itself(loss: Tensor) -> Tensor:
    return loss


def batch_of(rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(11, (rows, 3)), torch.randn(rows, 5).double()


def made_for(strategy: str, ranks: int, rate: float = 0.0) -> tuple[Plan, nn.Module, Any]:
    """A plan as its file has it, the model and its graph."""
    torch.manual_seed(0)
    model = Contrastive(rate).double().train()
    graph = capture(model, batch_of(), itself)
    plan = make_plan(graph, parse_machine(f"local:{ranks}"), strategy)
    return plan_from_json(plan_to_json(plan)), model, graph


def on_ranks(plan: Plan, model: nn.Module, give: Callable[[], Any] = batch_of) -> list[list[Tensor]]:
    """Loss and gradients on every rank that holds its parameters whole."""

    def program(communicator: Communicator) -> list[Tensor]:
        module = module_on(plan, Sample(plan.graph, model, batch_of()), communicator)
        loss = module(*give())
        loss.backward()
        return [loss.detach(), *(p.grad for p in module.parameters())]

    return run_ranks(plan.mesh, program)


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("data-parallel+part=4", 1), ("data-parallel+part=2", 2), ("data-parallel+part=4", 2)]
)
def test_a_loss_over_all_pairs_is_that_of_the_whole_batch(strategy: str, ranks: int) -> None:
    plan, model, _ = made_for(strategy, ranks)
    wanted = model(*batch_of())
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    for loss, *found in on_ranks(plan, model):
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, list(gradients), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("strategy", "ranks", "rate"),
    [("fsdp+part=4", 2, 0.0), ("megatron:tp=2+part=4", 2, 0.0), ("megatron:tp=2,dp=2+part=2", 4, 0.3)],
)
def test_training_is_as_on_one_device(strategy: str, ranks: int, rate: float) -> None:
    plan, model, graph = made_for(strategy, ranks, rate)
    assert verify_in_process(Case(plan, graph, model, batch_of()), 2).passed
