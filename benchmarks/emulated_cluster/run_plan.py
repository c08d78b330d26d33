"""The step time and the peak memory of a plan, measured on an emulated cluster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.emulated_cluster.cluster import Cluster
from benchmarks.emulated_cluster.memory import LiveStorages, RankMemory, rank_memory
from benchmarks.emulated_cluster.switch import Traffic
from conjoin.errors import UsageError
from conjoin.ir import Graph, Plan, flatten_tree
from conjoin.machine import parse_machine
from conjoin.runtime import ParallelModule, load
from conjoin.search import make_plan

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}
_SEED = 0


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and for how long."""

    model: nn.Module
    batch: Any
    optimizer: str = "sgd"
    num_warmup: int = 3
    num_steps: int = 20
    watch_memory: bool = True
    """Whether two more steps are run, to see the memory."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(
                f"The optimizer {self.optimizer!r} was asked for. Measured are steps with {' or '.join(OPTIMIZERS)}. "
                f"Name one of these."
            )
        if not (0 <= self.num_warmup <= 10_000 and 1 <= self.num_steps <= 10_000):
            raise UsageError(
                f"{self.num_warmup} steps of warm-up and {self.num_steps} timed ones were asked for. At least one must "
                f"be timed, and 10000 of each are the most. Ask for numbers in between."
            )


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of a plan."""

    step_seconds: tuple[float, ...]
    """Of every timed step, that of its slowest rank."""
    losses: tuple[float, ...]
    """Of every step, warm-up included."""
    memory: tuple[RankMemory, ...]
    """Of every rank; none where nobody watched."""
    traffic: Traffic

    @property
    def seconds_per_step(self) -> float:
        """The median over the steps."""
        return statistics.median(self.step_seconds)

    @property
    def peak_bytes(self) -> int:
        """The peak of the rank that needs most."""
        return max(memory.peak for memory in self.memory)


def run_plan(cluster: Cluster, plan: Plan, training: Training, timeout: float = 300) -> Figures:
    """Train by a plan on a cluster: warm-up, then timed steps with a barrier before each, then two to see the memory.

    A step is forward, backward and update. It is timed on every rank from the barrier to its own end.
    """
    if plan.graph.loss is None:
        raise UsageError(
            f"The step time of the plan of {plan.model.name} was asked for. It has no loss, so there is nothing to "
            f"train. Capture the model with a loss and make the plan again."
        )
    answers = cluster.run(_measure, plan, training, timeout=timeout)
    slowest = tuple(max(seconds) for seconds in zip(*(answer[0] for answer in answers), strict=True))
    memory = tuple(answer[2] for answer in answers if answer[2] is not None)
    return Figures(slowest, answers[0][1], memory, cluster.traffic())


def losses_alone(graph: Graph, training: Training) -> tuple[float, ...]:
    """The losses of the same steps on one device, in this process."""
    plan = make_plan(graph, parse_machine("local:1"), "single")
    torch.manual_seed(_SEED)
    step = _Step(plan, training)
    return tuple(step().item() for _ in range(training.num_warmup + training.num_steps))


class _Step:
    """One training step of a plan on this rank, to be called again and again."""

    def __init__(self, plan: Plan, training: Training) -> None:
        self.module: ParallelModule = load(plan, training.model, device="cpu")
        self.optimizer = OPTIMIZERS[training.optimizer](self.module.parameters())
        assert plan.graph.loss is not None
        self._loss, self._batch = plan.graph.loss, training.batch

    def __call__(self) -> Tensor:
        self.optimizer.zero_grad()
        outputs = self.module(*self._batch) if isinstance(self._batch, tuple | list) else self.module(self._batch)
        loss: Tensor = flatten_tree(outputs)[0][self._loss]
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


_Measured = tuple[tuple[float, ...], tuple[float, ...], RankMemory | None]


def _measure(rank: int, plan: Plan, training: Training) -> _Measured:
    torch.manual_seed(_SEED)
    step = _Step(plan, training)
    losses = [step() for _ in range(training.num_warmup)]
    seconds = []
    for _ in range(training.num_steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    dist.barrier()  # who is done first leaves the cores to those who are not
    memory = _memory(plan, training) if training.watch_memory else None
    return tuple(seconds), tuple(loss.item() for loss in losses), memory


def _memory(plan: Plan, training: Training) -> RankMemory:
    """Everything once more from the start, counting storages; the second step is the one looked at."""
    batch = [x for x in flatten_tree(training.batch)[0] if isinstance(x, Tensor)]
    with LiveStorages((*training.model.parameters(), *training.model.buffers(), *batch)) as live:
        step = _Step(plan, training)
        step()
        live.start_anew()
        step()
    return rank_memory(step.module, step.optimizer, live.peak)
