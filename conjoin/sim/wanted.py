"""What must be measured so that nothing in the simulation of some plans is estimated: their calls and updates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from conjoin.cost import NO_SECONDS, OperatorCost, Outcome, Seconds, measure, measure_update
from conjoin.ir import Pipeline, Plan
from conjoin.ops import Call, TensorType
from conjoin.sim.pipelines import stage_simulation
from conjoin.sim.prices import HostLink
from conjoin.sim.simulation import simulate


@dataclass(slots=True)
class Wanted:
    """Prices of nothing, which note what is asked for, each once and in the order of the first asking."""

    calls: dict[tuple[Call, tuple[int, ...]], None] = field(default_factory=dict)
    """Calls on local shapes, with the operands that need a gradient."""
    updates: dict[tuple[TensorType, ...], None] = field(default_factory=dict)
    """The parameters of one optimizer step."""

    def operator(self, call: Call, needs: tuple[int, ...], rank: int) -> OperatorCost:
        self.calls[call, needs] = None
        return OperatorCost(NO_SECONDS, NO_SECONDS, 0.0, 0.0)

    def collective(self, kind: str, axes: tuple[str, ...], sent: int) -> Seconds:
        return NO_SECONDS

    def launch(self) -> float:
        return 0.0

    def update(self, parameters: Sequence[TensorType], rank: int) -> Seconds:
        self.updates[tuple(parameters)] = None
        return NO_SECONDS

    def slowed(self) -> int:
        return 0

    def host_link(self) -> HostLink:
        return HostLink("cpu", 0, lambda _: NO_SECONDS)

    def unlike_axes(self) -> tuple[str, ...]:
        return ()


def wanted_by(plans: Iterable[Plan | Pipeline]) -> Wanted:
    """Every distinct call and update of the plans, and of the stages of pipelines."""
    wanted = Wanted()
    for plan in plans:
        if isinstance(plan, Pipeline):
            for stage in plan.stages:
                stage_simulation(stage.plan, wanted)
        else:
            simulate(plan, wanted)
    return wanted


class Ranks(Protocol):
    """All ranks that measure."""

    def together(self) -> None:
        """Return when all have come here."""

    def largest(self, *values: float) -> list[float]:
        """The largest of the ranks' values, for each of them."""


def measure_wanted(
    wanted: Wanted, optimizer: str, device: torch.device, ranks: Ranks, seconds_each: float = 0.05
) -> list[Outcome]:
    """What the slowest rank takes while all measure the same, none of them ahead."""
    found: list[Outcome] = [
        measure(call, needs, device, seconds=seconds_each, barrier=ranks.together, slowest=ranks.largest)
        for call, needs in wanted.calls
    ]
    for parameters in wanted.updates:
        for dtype, types in _by_dtype(parameters).items():
            ranks.together()
            mine = measure_update(optimizer, dtype, len(types), sum(t.num_elements for t in types), device)
            found.append(replace(mine, forward=ranks.largest(mine.forward)[0]))
    return found


def _by_dtype(types: Sequence[TensorType]) -> dict[torch.dtype, list[TensorType]]:
    groups: dict[torch.dtype, list[TensorType]] = defaultdict(list)
    for type in types:
        groups[type.dtype].append(type)
    return groups
