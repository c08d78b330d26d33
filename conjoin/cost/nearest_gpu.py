"""What a GPU that nobody measured takes from the nearest one that somebody did.

Shares of the device's own rates that calls reach, as curves over size, and the times of the host. Two things do not
carry over. Convolutions, recurrent layers and batch norms: their kernels are written for each architecture, or bound by
how many run at once and not by memory, so another architecture takes round figures; but none of these calls outruns the
measured GPU by more than the device's rates exceed that one's. And how long a device keeps up what a kernel reaches
alone in milliseconds: that is limited by its power, and what people reached with it depends on the age of their
libraries. It is a figure for each architecture, `SUSTAINED`: published training steps give those of Hopper and Ampere,
newer ones take Hopper's; no figure belongs to a row or a source of them (`benchmarks/published.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from conjoin.cost.medians import Fit
from conjoin.cost.work import CONVOLUTION, RECURRENT, is_composed
from conjoin.machine import PRESET_DEVICES, DeviceType, architecture_of, nearest_device, preset_name
from conjoin.ops import find_spec

SUSTAINED = {"Hopper": 0.60, "Blackwell": 0.60, "CDNA 3": 0.60, "Ampere": 0.89, "Ada": 0.89}
"""Of what calls bound by flops in half precision reach on their own, by the nearest device's shares."""
_OF_AN_ARCHITECTURE = (CONVOLUTION, RECURRENT)


@dataclass(frozen=True, slots=True)
class Basis:
    """What estimates for a device rest on."""

    fit: Fit | None = None
    of: DeviceType | None = None
    """Whose fit it is, where it is another device's."""
    is_foreign: bool = False
    """Whether the fit is of another architecture."""
    sustained: float = 1.0
    """What is kept up of what calls bound by flops reach alone."""

    def kept_up(self, dtype: str) -> float:
        """What is kept up of the rate of a dtype; all of float32 and wider, of which nothing is published."""
        return 1.0 if dtype in ("float32", "float64") else self.sustained

    def carries_over(self, op: str, family: str) -> bool:
        """Whether the fit says something of calls of an operator."""
        spec = find_spec(op)
        by_blocks = spec is not None and spec.blocks is not None
        return not self.is_foreign or not (family in _OF_AN_ARCHITECTURE or is_composed(op) or by_blocks)


def borrow(device: DeviceType, fits: Mapping[str, Fit]) -> Basis:
    """The fit of the nearest device, as far as it carries over."""
    name = nearest_device(device, fits)
    if name is None:
        return Basis()
    architecture = architecture_of(preset_name(device))
    is_foreign = architecture_of(name) != architecture
    return Basis(fits[name], PRESET_DEVICES[name], is_foreign, SUSTAINED.get(architecture, 1.0))
