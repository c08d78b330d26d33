"""What the simulator asks of costs: seconds of a call, of a collective, of an update, on a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from conjoin.cost import CostModel, OperatorCost, Seconds, collective_seconds
from conjoin.ir import Graph
from conjoin.machine import Machine
from conjoin.ops import Call, TensorType

SLOWED = {"cuda": 19}
"""By how many per cent devices of a kind compute more slowly while they communicate: kernels of collectives take some
of their processors and of their memory's rate. The mean over models, strategies and four kinds of GPUs in Lee et al.,
"Characterizing Compute-Communication Overlap in GPU-Accelerated Distributed Deep Learning" (arXiv 2507.03114). What
CPUs lose nobody tells."""

_IN_A_MODEL = 1.2
"""How much longer the host takes for a call among all the others of a model than for calls of one kind in a row, whose
code and data its caches hold: the median over the passes of eight models on an H200's host (2026-11-18), which range
from 0.8 to 1.7, as the speed of that host changed meanwhile."""
_COPIES = {"sgd": 0, "sgd-momentum": 1, "adam": 2, "adamw": 2}
OPTIMIZER_COPIES = {**_COPIES, **{f"{name}-fused": copies for name, copies in _COPIES.items()}}
"""How many tensors like each parameter an optimizer remembers."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """Between a device and the memory of its host."""

    kind: str
    """Of the device."""
    remembered: int
    """How many tensors like each parameter the optimizer remembers."""
    seconds: Callable[[int], Seconds]
    """Of a copy of so many bytes, in either direction."""
    launch: float = 0.0
    """Seconds of the host for each."""


class Prices(Protocol):
    """Seconds of everything that happens in a training step."""

    def operator(self, call: Call, needs: tuple[int, ...], rank: int) -> OperatorCost:
        """A call on local shapes, and its backward for the operands that need a gradient."""

    def collective(self, kind: str, axes: tuple[str, ...], sent: int) -> Seconds:
        """A collective of all groups along axes, where the busiest rank sends so many bytes."""

    def launch(self) -> float:
        """What a host takes to launch a collective, in seconds."""

    def slowed(self) -> int:
        """By how many per cent what is computed beside communication takes longer."""

    def update(self, parameters: Sequence[TensorType], rank: int) -> Seconds:
        """The optimizer's step on what a rank stores."""

    def host_link(self) -> HostLink:
        """What copies to the host and back take."""

    def unlike_axes(self) -> tuple[str, ...]:
        """The axes of the mesh along which devices are of different types."""


@dataclass(frozen=True)
class MachinePrices:
    """The prices on a machine, by its measurements and links."""

    machine: Machine
    costs: CostModel
    optimizer: str = "adam"

    @classmethod
    def of(cls, graph: Graph, machine: Machine, costs: CostModel, optimizer: str = "adam") -> MachinePrices:
        """Those of a graph, which may round products."""
        return cls(machine, costs.in_tf32() if graph.rounding.tf32 else costs, optimizer)

    def operator(self, call: Call, needs: tuple[int, ...], rank: int) -> OperatorCost:
        device = self.machine.device_type(rank)
        cost = self.costs.operator(call, needs, device)
        if device.kind == "cpu":
            return cost
        host = _IN_A_MODEL * cost.host_forward, _IN_A_MODEL * cost.host_backward
        return OperatorCost(cost.forward, cost.backward, *host)

    def collective(self, kind: str, axes: tuple[str, ...], sent: int) -> Seconds:
        return collective_seconds(self.machine, kind, axes, sent)

    def launch(self) -> float:
        return self.costs.launch(self.machine.device_type(0))

    def slowed(self) -> int:
        return max(SLOWED.get(device.kind, 0) for device in self.machine.device_types)

    def update(self, parameters: Sequence[TensorType], rank: int) -> Seconds:
        return self.costs.update(parameters, self.optimizer, self.machine.device_type(rank))

    def host_link(self) -> HostLink:
        device = self.machine.device_type(0)
        remembered, launch = OPTIMIZER_COPIES[self.optimizer], self.launch()
        return HostLink(device.kind, remembered, lambda size: self.costs.copy(size, device), launch)

    def unlike_axes(self) -> tuple[str, ...]:
        return self._unlike_axes

    @cached_property
    def _unlike_axes(self) -> tuple[str, ...]:
        mesh = self.machine.mesh
        return tuple(
            axis.name
            for axis in mesh.axes
            if any(len({self.machine.device_type(rank) for rank in group}) > 1 for group in mesh.groups((axis.name,)))
        )
