"""Losses of many forms in micro-batches: those and gradients of the plain model on the whole batch are the judge."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.machine import parse_machine
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.search import make_plan
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample

Loss = Callable[["Head", Tensor, Tensor], Tensor]


class Head(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer, self.out, self.loss = nn.Linear(6, 8), nn.Linear(8, 5), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, x, y)

    def scores(self, x: Tensor) -> Tensor:
        made: Tensor = self.out(torch.tanh(self.layer(x)))
        return made

    def pooled(self, x: Tensor, y: Tensor) -> Tensor:
        """One token of every sample, as CLIP pools."""
        tokens = torch.tanh(self.layer(x)).unsqueeze(1) * torch.arange(1.0, 5.0, dtype=x.dtype).view(1, 4, 1)
        return self.out(tokens[torch.arange(x.shape[0], device=x.device), y.argmax(-1)])  # type: ignore[no-any-return]


def entropy(scores: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(scores, y[:, 0])


LOSSES: dict[str, Loss] = {
    "a constant more": lambda m, x, y: entropy(m.scores(x), y) + 5,
    "a constant less": lambda m, x, y: entropy(m.scores(x), y) - 0.25,
    "of a constant": lambda m, x, y: 1.5 - 2 * entropy(m.scores(x), y),
    "sum of means": lambda m, x, y: entropy(m.scores(x), y) + 0.1 * m.scores(x).square().mean(),
    "weighted, with a penalty": lambda m, x, y: (
        0.7 * entropy(m.scores(x), y) + 0.3 * m.scores(x).abs().mean() + 0.01 * m.out.weight.square().sum()
    ) / 2 + 1,
    "stacked": lambda m, x, y: torch.stack([entropy(m.scores(x), y), m.scores(x).mean()]).sum(),
    "mean of means": lambda m, x, y: torch.stack([entropy(m.scores(x), y), m.scores(x).mean()]).mean(),
    "a token by its place": lambda m, x, y: entropy(m.pooled(x, y), y),
    "layers skipped at a rate of 0": lambda m, x, y: x.sum() if torch.rand(()) < 0.0 else entropy(m.scores(x), y),
    "summed, by the size of the batch": lambda m, x, y: (
        functional.cross_entropy(m.scores(x), y[:, 0], reduction="sum") / x.shape[0] + 3.0
    ),
}


def batch_of() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6).double(), torch.randint(4, (8, 4))


def model_of(loss: Loss) -> Head:
    torch.manual_seed(0)
    return Head(loss).double().train()


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_in_micro_batches_is_that_of_the_batch(name: str) -> None:
    model = model_of(LOSSES[name])
    graph = capture(model, batch_of(), lambda loss: loss)
    plan = make_plan(graph, parse_machine("local:2"), "data-parallel+micro=2")
    batch = batch_of()
    wanted = model(*batch)
    gradients = torch.autograd.grad(wanted, list(model.parameters()))

    def program(communicator: Communicator) -> list[Tensor]:
        module = module_on(plan, Sample(graph, model, batch), communicator)
        loss = module(*batch)
        loss.backward()
        return [loss.detach(), *(p.grad for p in module.parameters())]

    for loss, *found in run_ranks(plan.mesh, program):
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found, list(gradients), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, x, y: entropy(m.scores(x), y).sqrt(),
        lambda m, x, y: entropy(m.scores(x), y) * m.scores(x).mean(),
        lambda m, x, y: entropy(m.scores(x) @ m.scores(x).T, y),
    ],
    ids=["a root", "a product", "all pairs"],
)
def test_a_loss_that_is_no_sum_over_samples_is_refused_and_part_of_it_runs(loss: Loss) -> None:
    model = model_of(loss)
    graph = capture(model, batch_of(), lambda loss: loss)
    with pytest.raises(StrategyError, match="part="):
        make_plan(graph, parse_machine("local:1"), "data-parallel+micro=2")
    plan = make_plan(graph, parse_machine("local:1"), "data-parallel+part=2")
    sample = Sample(graph, model, batch_of())
    (found,) = run_ranks(plan.mesh, lambda ranks: module_on(plan, sample, ranks)(*batch_of()).detach())
    torch.testing.assert_close(found, model(*batch_of()).detach(), rtol=1e-12, atol=1e-12)
