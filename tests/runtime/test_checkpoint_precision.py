"""Checkpoints go on across precisions and strategies: parameters and optimizer state are in float32 in all of them.

The judge is one device: the plain model under torch's own autocast, with torch's own optimizer and GradScaler.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.api import capture
from conjoin.frontends import Precision
from conjoin.ir import Plan
from conjoin.machine import parse_machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.state.checkpoint import save_checkpoint
from conjoin.runtime.state.checkpoint_loading import load_checkpoint
from conjoin.runtime.state.pieces import full_state_dict
from conjoin.search import make_plan
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample

STEPS = 3


@cache
def sample(precision: str) -> Sample:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).train()
    batch = torch.randn(8, 16), torch.randn(8, 16)
    return Sample(capture(model, batch, nn.functional.mse_loss, precision=precision), model, batch)


def plan_of(precision: str, strategy: str) -> Plan:
    return make_plan(sample(precision).graph, parse_machine("local:2"), strategy)


def opened(precision: str, strategy: str, communicator: Communicator) -> tuple[ParallelModule, Any, Any]:
    module = module_on(plan_of(precision, strategy), sample(precision), communicator)
    return module, torch.optim.AdamW(module.parameters(), lr=1e-2), scaler_for(precision)


def scaler_for(precision: str) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled=precision.startswith("fp16"))


def train(call: Any, optimizer: Any, scaler: Any) -> list[float]:
    losses = []
    for _ in range(STEPS):
        loss = call()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_one_device(precisions: tuple[str, str]) -> tuple[list[float], dict[str, Tensor]]:
    """The plain model, in one precision and then in the other."""
    found = sample(precisions[0])
    model, (x, wanted) = copy.deepcopy(found.model), found.inputs
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for precision in precisions:
        call = Precision.parse(precision).running(lambda: nn.functional.mse_loss(model(x), wanted))
        losses += train(call, optimizer, scaler_for(precision))
    return losses, model.state_dict()


WAYS = [
    (("bf16-mixed", "fsdp"), ("float32", "data-parallel")),
    (("float32", "data-parallel"), ("bf16-mixed", "fsdp")),
    (("bf16-mixed,reduce=bf16", "zero1"), ("bf16-mixed", "megatron:tp=2")),
    (("fp16-mixed", "fsdp"), ("bf16-mixed", "data-parallel")),
    (("float32", "megatron:tp=2"), ("fp16-mixed", "zero1")),
]


@pytest.mark.parametrize(("first", "second"), WAYS)
def test_training_goes_on_in_another_precision(
    first: tuple[str, str], second: tuple[str, str], tmp_path: Path
) -> None:
    def program(communicator: Communicator) -> tuple[list[float], dict[str, Tensor]]:
        inputs, path = sample(first[0]).inputs, tmp_path / "checkpoint"
        module, optimizer, scaler = opened(*first, communicator)
        losses = train(lambda: module(*inputs), optimizer, scaler)
        save_checkpoint(path, module, optimizer, extra={"scaler": scaler.state_dict()})
        module, optimizer, scaler = opened(*second, communicator)
        load_checkpoint(path, module, optimizer)
        return losses + train(lambda: module(*inputs), optimizer, scaler), full_state_dict(module, everywhere=True)

    ranks = run_processes(plan_of(*first).mesh, program, tmp_path)
    losses, weights = on_one_device((first[0], second[0]))
    for mine, whole in ranks:
        assert mine == pytest.approx(losses, rel=2e-2)
        assert losses[-1] < losses[0]
        for name, start in sample(first[0]).model.state_dict().items():
            moved = (weights[name] - start).norm()
            assert (whole[name] - weights[name]).norm() < 0.1 * moved and whole[name].dtype == torch.float32, name


def test_a_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    def program(communicator: Communicator) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
        inputs = sample("fp16-mixed").inputs
        module, optimizer, scaler = opened("fp16-mixed", "fsdp", communicator)
        train(lambda: module(*inputs), optimizer, scaler)
        kept = scaler.state_dict()
        save_checkpoint(tmp_path / "checkpoint", module, optimizer, extra={"scaler": kept})
        module, optimizer, scaler = opened("fp16-mixed", "data-parallel", communicator)
        scaler.load_state_dict(load_checkpoint(tmp_path / "checkpoint", module, optimizer)["scaler"])
        loaded = scaler.state_dict()
        return train(lambda: module(*inputs), optimizer, scaler), kept, loaded

    losses, _ = on_one_device(("fp16-mixed", "fp16-mixed"))
    for mine, kept, loaded in run_processes(plan_of("fp16-mixed", "fsdp").mesh, program, tmp_path):
        assert kept == loaded and kept["scale"] == 2.0**9 and kept["_growth_tracker"] == 1
        assert mine == pytest.approx(losses[STEPS:], rel=2e-2)
