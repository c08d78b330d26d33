"""Prices that need no measurement, and plans of small models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from conjoin.cost import OperatorCost, Seconds, Source
from conjoin.ir import Graph, Plan
from conjoin.machine import parse_machine
from conjoin.ops import Call, TensorType, bytes_read, bytes_written, flops, spec_for
from conjoin.search import make_plan
from conjoin.sim import HostLink
from tests.zoo.graphs import captured


@dataclass
class RoundPrices:
    """A device of 1 Tflop/s and 100 GB/s, links of 1 GB/s, and a microsecond for everything."""

    host: float = 0.0
    known: dict[tuple[Call, tuple[int, ...]], OperatorCost] = field(default_factory=dict)

    def operator(self, call: Call, needs: tuple[int, ...], rank: int) -> OperatorCost:
        key = call, needs
        if key not in self.known:
            spec = spec_for(call)
            seconds = 1e-5
            if spec is not None:
                seconds = flops(spec, call) / 1e12 + (bytes_read(spec, call) + bytes_written(spec, call)) / 1e11 + 1e-6
            there, back = Seconds(seconds, Source.ESTIMATED), Seconds(seconds * len(needs), Source.ESTIMATED)
            self.known[key] = OperatorCost(there, back, self.host, self.host if needs else 0.0)
        return self.known[key]

    def collective(self, kind: str, axes: tuple[str, ...], sent: int) -> Seconds:
        return Seconds(1e-6 * len(axes) + sent / 1e9, Source.MEASURED)

    def launch(self) -> float:
        return 0.0

    def update(self, parameters: Sequence[TensorType], rank: int) -> Seconds:
        return Seconds(sum(parameter.bytes for parameter in parameters) / 2e10, Source.ESTIMATED)

    def slowed(self) -> int:
        return 0

    def host_link(self) -> HostLink:
        return HostLink("cpu", 2, lambda size: Seconds(size / 1e10, Source.ESTIMATED))

    def unlike_axes(self) -> tuple[str, ...]:
        return ()


@pytest.fixture
def prices() -> RoundPrices:
    return RoundPrices()


def tiny_graph(name: str, batch_size: int = 4) -> Graph:
    return captured(name, batch_size)


@pytest.fixture
def tiny_plan() -> Callable[..., Plan]:
    """Plans of tiny models of the zoo."""

    def make(name: str, machine: str, strategy: str, batch_size: int = 4) -> Plan:
        return make_plan(tiny_graph(name, batch_size), parse_machine(machine), strategy)

    return make
