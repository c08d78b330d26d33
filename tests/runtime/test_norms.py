"""The norm of gradients on many ranks where pieces are uneven or missing."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.ir import Plan
from conjoin.runtime.communicator import Communicator
from conjoin.runtime.threads import run_ranks
from tests.runtime.hand_plans import by_hand, by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample


def norms(plan: Plan, sample: Sample, norm_type: float, max_norm: float) -> tuple[Tensor, list[tuple[Tensor, Any]]]:
    """On one device, and on every rank with what became of its gradients."""

    def program(communicator: Communicator) -> tuple[Tensor, Any]:
        step = module_on(plan, sample, communicator)
        step(*sample.inputs).backward()
        norm = step.clip_grad_norm_(max_norm, norm_type)
        return norm, {name: p.grad for name, p in step.named_parameters()}

    found = run_ranks(plan.mesh, program)
    model = sample.model
    functional.mse_loss(model(sample.inputs[0]), sample.inputs[1]).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type), found


def small() -> Sample:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return captured(model, (torch.randn(8, 4), torch.randn(8, 1)), functional.mse_loss)


STORED = {"0.weight": "x:S(0) y:S(0)", "0.bias": "x:S(0)", "2.weight": "y:S(1)"}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, inf])
def test_pieces_that_are_uneven(norm_type: float) -> None:
    sample = small()
    want, found = norms(by_hand(sample.graph, STORED, {}), sample, norm_type, 0.01)
    assert len({pieces["0.weight"].shape for _, pieces in found}) > 1
    for norm, _ in found:
        torch.testing.assert_close(norm, want, rtol=1e-9, atol=1e-12)
    whole = sample.model.get_parameter("0.bias").grad
    torch.testing.assert_close(torch.cat([found[0][1]["0.bias"], found[2][1]["0.bias"]]), whole)


def test_gradients_within_the_limit_are_left_alone() -> None:
    sample = small()
    want, found = norms(by_strategy(sample, "fsdp"), sample, 2.0, 1e6)
    whole = torch.cat([pieces["0.weight"].flatten() for _, pieces in found])
    assert whole.numel() >= 20 and found[0][0].item() == pytest.approx(want.item(), rel=1e-9)
    unclipped, _ = norms(by_strategy(sample, "fsdp"), Sample(sample.graph, small().model, sample.inputs), 2.0, 1e6)
    assert unclipped.item() == pytest.approx(want.item())


def test_no_gradients_have_no_norm() -> None:
    sample = small()
    plan = by_strategy(sample, "fsdp")
    assert run_ranks(plan.mesh, lambda c: module_on(plan, sample, c).clip_grad_norm_(1.0).item()) == [0.0] * 4
