"""A small model with all that checkpoints meet, its plans, and ranks that are processes or threads."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import parse_machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.pieces import Piece
from conjoin.runtime.state.storage import Store
from conjoin.search import make_plan
from tests.waiting import HUNG_SECONDS

STEPS = 2
"""Before the checkpoint, and again after it."""
TOLERANCE = 1e-9


class Net(nn.Module):
    """Tied weights, statistics, buffers saved and not saved, a frozen parameter, sizes that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)
        self.down = nn.Linear(10, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.rand(6), requires_grad=False)
        self.register_buffer("kept", torch.rand(6))
        self.register_buffer("derived", torch.full((6,), 2.0), persistent=False)

    def forward(self, i: Tensor) -> Tensor:
        x = self.norm(self.up(self.embed(i) * self.kept)).relu()
        y: Tensor = self.head(self.down(x) * self.derived + self.frozen)
        return y


BATCH = (torch.arange(8) % 11, torch.arange(8) * 3 % 11)


_generator = threading.Lock()


def make_model(seed: int) -> Net:
    with _generator:  # which ranks that are threads share
        torch.manual_seed(seed)
        return Net().double().train()


@cache
def graph() -> Graph:
    return capture(make_model(0), BATCH, cross_entropy)


@cache
def plan_for(strategy: str, num_ranks: int) -> Plan:
    return make_plan(graph(), parse_machine(f"local:{num_ranks}"), strategy)


def part_of(plan: Plan, communicator: Communicator, seed: int) -> ParallelModule:
    """A rank's module of a model that begins with the random values of a seed."""
    store = Store(plan, communicator.rank, torch.device("cpu"))
    store.fill(make_model(seed))
    return ParallelModule(plan, store, communicator)


def adam(parameters: Iterator[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, betas=(0.8, 0.95), amsgrad=True)


def train(step: Callable[..., Tensor], optimizer: Optimizer, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = step(BATCH) if isinstance(step, ParallelModule) else cross_entropy(step(BATCH[0]), BATCH[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def uninterrupted() -> list[float]:
    """The losses of training a plain model without a break."""
    model = make_model(0)
    return train(model, adam(model.parameters()), 2 * STEPS)


def assert_goes_on(losses: list[float]) -> None:
    assert losses == pytest.approx(uninterrupted()[STEPS:], rel=TOLERANCE, abs=TOLERANCE)


def _run_rank(rank: int, num_ranks: int, folder: Path, program: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_ranks}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=HUNG_SECONDS),
    )
    (folder / f"{rank}.json").write_text(json.dumps(program()))
    dist.destroy_process_group()


def in_processes(num_ranks: int, folder: Path, program: Callable[[], Any]) -> list[Any]:
    """What a program returns on each of some processes that are joined by Gloo."""
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("fork")
    arguments = [(rank, num_ranks, folder, program) for rank in range(num_ranks)]
    ranks = [context.Process(target=_run_rank, args=each, daemon=True) for each in arguments]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + HUNG_SECONDS
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in ranks] == [0] * num_ranks
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def on_threads(strategy: str, num_ranks: int, program: Callable[[ParallelModule], Any], seed: int = 0) -> list[Any]:
    plan = plan_for(strategy, num_ranks)
    return run_ranks(plan.mesh, lambda communicator: program(part_of(plan, communicator, seed)))


def alone(seed: int = 0) -> ParallelModule:
    """The module on one rank that needs no others."""
    return on_threads("data-parallel", 1, lambda step: step, seed)[0]


def joined(values: list[Any]) -> Any:
    """A whole tensor out of the pieces of all ranks, or what they all have."""
    if not any(isinstance(value, Piece) for value in values):
        return values[0]
    whole = torch.full(next(v.shape for v in values if isinstance(v, Piece)), torch.nan, dtype=torch.float64)
    for value in values:
        region = value.region if isinstance(value, Piece) else tuple((0, size) for size in value.shape)
        whole[tuple(slice(*span) for span in region)] = value.local if isinstance(value, Piece) else value
    assert not whole.isnan().any()
    return whole
