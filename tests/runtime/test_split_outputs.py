"""Outputs beside the loss that lie in pieces are whole to whoever gave the whole batch, as of the plain model."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.frontends import capture
from conjoin.ir import Plan
from conjoin.machine import parse_machine
from conjoin.runtime.program.split_outputs import SplitOutput
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.search import make_plan
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample


class Scores(nn.Module):
    """Returns its loss, and scores beside it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        scores = self.last(torch.tanh(self.first(x)))
        return {"loss": functional.cross_entropy(scores, y), "scores": scores}


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()
Y = X[:, :4].argmax(1)


def plan_by(strategy: str) -> tuple[Plan, Sample]:
    model = Scores().double().train()
    graph = capture(model, (X, Y))
    plan = make_plan(graph, parse_machine("local:2"), strategy)
    assert isinstance(plan, Plan)
    return plan, Sample(graph, model, (X, Y))


def train(module: nn.Module) -> list[float]:
    """A penalty on scores outside of the model, and how often they are right."""
    optimizer, found = torch.optim.SGD(module.parameters(), lr=0.5), []
    for _ in range(3):
        made = module(X, Y)
        loss = made["loss"] + 0.1 * made["scores"].logsumexp(-1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        right = (made["scores"].argmax(-1) == Y).double().mean()
        found += [loss.item(), right.item(), torch.stack([made["scores"], 2 * made["scores"]]).sum().item()]
        assert made["scores"].shape == (8, 4) and len(made["scores"]) == 8
    return found


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
def test_scores_beside_the_loss_train_and_tell_as_on_one_device(strategy: str) -> None:
    plan, sample = plan_by(strategy)
    wanted = train(Scores().double())
    for found in run_ranks(plan.mesh, lambda ranks: train(module_on(plan, sample, ranks))):
        assert found == pytest.approx(wanted, rel=1e-12)


def test_scores_are_copied_and_saved_as_wholes_and_of_parts_they_are_parts() -> None:
    plan, sample = plan_by("data-parallel")

    def program(ranks: Communicator) -> Any:
        module = module_on(plan, sample, ranks)
        before = ranks.bytes_sent  # type: ignore[attr-defined]
        made = module(X, Y)["scores"]
        assert isinstance(made, SplitOutput) and made.dtype is torch.float64 and made.shape == (8, 4)
        assert ranks.bytes_sent < before + 4 * 4 * 8, "nothing but the loss is sent until somebody looks"  # type: ignore[attr-defined]
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(made), buffer)
        buffer.seek(0)
        rows = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        assert module(X[rows], Y[rows])["scores"].shape == (4, 4)
        return torch.load(buffer)

    wanted = sample.model(X, Y)["scores"]
    for found in run_ranks(plan.mesh, program):
        torch.testing.assert_close(found, wanted.detach())
