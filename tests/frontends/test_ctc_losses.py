"""CTC losses, as speech models are trained by: the plain model is the judge."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture, run_plainly
from conjoin.machine import parse_machine
from conjoin.runtime.verification.plain_model import PlainModel
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_plan

SAMPLES, STEPS, CLASSES = 4, 9, 5


class Recogniser(nn.Module):
    def __init__(self, loss: nn.CTCLoss, lengths: Any) -> None:
        super().__init__()
        self.layer, self.loss, self.lengths = nn.Linear(6, CLASSES), loss, lengths

    def forward(self, x: Tensor, targets: Tensor, num_targets: Tensor) -> Tensor:
        scores = self.layer(x).log_softmax(-1).transpose(0, 1)
        loss: Tensor = self.loss(scores, targets, self.lengths(x), num_targets)
        return loss.mean()


CASES = {
    "mean": (nn.CTCLoss(), lambda x: torch.full((SAMPLES,), STEPS), (SAMPLES, 3)),
    "sum": (nn.CTCLoss(4, "sum"), lambda x: torch.full((SAMPLES,), STEPS - 1), (SAMPLES, 3)),
    "by sample": (nn.CTCLoss(reduction="none", zero_infinity=True), lambda x: torch.full((SAMPLES,), 3), (SAMPLES, 3)),
    "targets one after the other": (nn.CTCLoss(), lambda x: torch.full((SAMPLES,), STEPS), (3 * SAMPLES,)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_loss_over_alignments_trains_as_on_one_device(name: str) -> None:
    loss, lengths, shape = CASES[name]
    torch.manual_seed(2)
    model = Recogniser(loss, lengths).double()
    least = 3 if len(shape) == 1 else 1
    batch = (
        torch.randn(SAMPLES, STEPS, 6, dtype=torch.float64), torch.randint(1, 4, shape),
        torch.randint(least, 4, (SAMPLES,)),
    )  # fmt: skip
    graph = capture(model, batch)
    plan = make_plan(graph, parse_machine("local:2"), "data-parallel")
    split = [node for node in plan.graph.nodes if node.op == "ctc_loss.Tensor" and node.inputs[0].type.layout]
    assert bool(split) == (len(shape) == 2)
    assert verify_in_process(Case(plan, graph, model, batch, PlainModel(model, None, run_plainly)), 2).passed


class Dropping(Recogniser):
    """After a write, what numbers are drawn for is followed to the loss a second time."""

    def forward(self, x: Tensor, targets: Tensor, num_targets: Tensor) -> Tensor:
        hidden = nn.functional.dropout(x.sin().mul_(2), 0.3)
        return super().forward(hidden, targets, num_targets)


def test_a_loss_over_alignments_is_captured_behind_a_write_and_a_draw() -> None:
    model = Dropping(nn.CTCLoss(), lambda x: torch.full((SAMPLES,), STEPS))
    graph = capture(model, (torch.randn(SAMPLES, STEPS, 6), torch.ones(SAMPLES, 3).long(), torch.ones(SAMPLES).long()))
    assert "ctc_loss.Tensor" in [node.op for node in graph.nodes]
