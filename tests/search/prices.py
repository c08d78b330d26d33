"""Prices by which it pays to split tiny models: slow devices, fast links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from conjoin.cost import OperatorCost, Seconds, Source
from conjoin.ops import Call, TensorType, bytes_read, bytes_written, flops, spec_for
from conjoin.sim import HostLink


@dataclass
class SlowDevices:
    """Devices of 1 Mflop/s and 10 MB/s, links of `link` bytes a second inside a node, a tenth of it between nodes."""

    link: float = 1e8
    latency: float = 1e-8
    known: dict[tuple[Call, tuple[int, ...]], OperatorCost] = field(default_factory=dict)

    def operator(self, call: Call, needs: tuple[int, ...], rank: int) -> OperatorCost:
        key = call, needs
        if key not in self.known:
            spec, seconds = spec_for(call), 1e-6
            if spec is not None:
                seconds = flops(spec, call) / 1e6 + (bytes_read(spec, call) + bytes_written(spec, call)) / 1e7
            there, back = Seconds(seconds, Source.ESTIMATED), Seconds(seconds * len(needs), Source.ESTIMATED)
            self.known[key] = OperatorCost(there, back, 0.0, 0.0)
        return self.known[key]

    def collective(self, kind: str, axes: tuple[str, ...], sent: int) -> Seconds:
        slow = 10 if any(axis.startswith("n") for axis in axes) else 1
        return Seconds(self.latency * len(axes) + slow * sent / self.link, Source.MEASURED)

    def launch(self) -> float:
        return 0.0

    def update(self, parameters: Sequence[TensorType], rank: int) -> Seconds:
        return Seconds(sum(parameter.bytes for parameter in parameters) / 1e7, Source.ESTIMATED)

    def slowed(self) -> int:
        return 0

    def host_link(self) -> HostLink:
        return HostLink("cpu", 2, lambda size: Seconds(size / 1e7, Source.ESTIMATED))

    def unlike_axes(self) -> tuple[str, ...]:
        return ()
