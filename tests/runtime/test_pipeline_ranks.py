"""Pipelines on processes of their own, over Gloo: a loop as people write it, from a plan file to a checkpoint."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.frontends import capture
from conjoin.machine import Machine
from conjoin.runtime import launch
from conjoin.search import make_pipeline, make_plan
from tests.runtime.test_pipelines import Tied, over_words

WORDS = 24
CLIP = 0.2


def model_of() -> nn.Module:
    torch.manual_seed(5)
    return Tied(WORDS).double().train()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + step)
    return torch.randint(WORDS, (8, 5)), torch.randint(WORDS, (8, 5))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@dataclass
class Seen:
    """What one rank saw."""

    losses: list[float]
    norms: list[float]
    """Of the gradients of every step, then of those in evaluation mode."""
    names: list[str]
    refused: str
    evaluated: float
    state: dict[str, Tensor]


def train_by_pipeline(rank: int, plan: str, checkpoint: str) -> Seen:
    model = model_of()
    step = conjoin.load(plan, model, loss=over_words)
    optimizer = optimizer_of(step)
    losses, norms, refused = [], [], ""
    for number in range(2):
        optimizer.zero_grad()
        loss = step(*batch_of(number))
        loss.backward()
        try:
            torch.nn.utils.clip_grad_norm_(step.parameters(), CLIP)
        except conjoin.UsageError as error:
            refused = str(error)
        norms.append(step.clip_grad_norm_(CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        evaluated = step(*batch_of(7)).item()
    step.eval()
    step.zero_grad()
    step(*batch_of(7)).backward()
    norms.append(step.clip_grad_norm_(CLIP).item())
    step.zero_grad()
    step.train()
    conjoin.save_checkpoint(checkpoint, step, optimizer, {"steps": 2})
    state = conjoin.full_state_dict(step, everywhere=True)
    return Seen(losses, norms, [name for name, _ in step.named_parameters()], refused, evaluated, state)


def go_on(rank: int, plan: str, checkpoint: str) -> tuple[float, dict[str, Tensor]]:
    step = conjoin.load(plan, model_of())
    optimizer = optimizer_of(step)
    conjoin.load_checkpoint(checkpoint, step, optimizer)
    loss = step(*batch_of(2))
    loss.backward()
    step.clip_grad_norm_(CLIP)
    optimizer.step()
    return loss.item(), conjoin.full_state_dict(step, everywhere=True)


def train_plainly(num_steps: int) -> tuple[list[float], list[float], nn.Module]:
    model = copy.deepcopy(model_of())
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for number in range(num_steps):
        optimizer.zero_grad()
        x, y = batch_of(number)
        loss = over_words(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, model


def assert_same(state: dict[str, Tensor], model: nn.Module) -> None:
    wanted = model.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-11)


def test_a_loop_on_a_pipeline_goes_on_by_another_plan(tmp_path: Path) -> None:
    graph = capture(model_of(), batch_of(0), over_words)
    pipeline = tmp_path / "pipeline.json"
    make_pipeline(graph, Machine("here", 1, 4, "cpu"), "pipeline:pp=2,tp=2,micro=4,schedule=eager-1f1b").save(pipeline)
    seen = launch(4, train_by_pipeline, str(pipeline), str(tmp_path / "saved"))
    losses, norms, model = train_plainly(2)
    x, y = batch_of(7)
    value = over_words(model(x), y)
    model.zero_grad()
    value.backward()  # type: ignore[no-untyped-call]
    norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
    for rank in seen:
        assert rank.losses == pytest.approx(losses, rel=1e-11) and rank.norms == pytest.approx(norms, rel=1e-11)
        assert "Call clip_grad_norm_ of" in rank.refused, "torch's own call would clip by the norm of a stage"
        assert_same(rank.state, model)
    assert set(seen[0].names).isdisjoint(seen[2].names) and seen[0].names == seen[1].names
    assert seen[0].evaluated == pytest.approx(value.item(), rel=1e-11)

    others = {
        "fsdp.json": make_plan(graph, Machine("pair", 1, 2, "cpu"), "fsdp"),
        "three.json": make_pipeline(graph, Machine("three", 1, 3, "cpu"), "pipeline:pp=3,micro=2,schedule=zero-bubble"),
    }
    losses, _, model = train_plainly(3)
    for name, plan in others.items():
        plan.save(tmp_path / name)
        for loss, state in launch(plan.mesh.size, go_on, str(tmp_path / name), str(tmp_path / "saved")):
            assert loss == pytest.approx(losses[2], rel=1e-11)
            assert_same(state, model)
