"""What a GPU that nobody measured takes from the nearest one that somebody did.

Shares of the device's own rates that calls reach, as curves over size, and the times of the host. Two things do not
carry over. Convolutions and recurrent layers: their kernels are written for each architecture, so another one takes
round figures. And how long a device keeps up what a kernel reaches alone in milliseconds: that is limited by its power,
and what people reached with it depends on the age of their libraries. It is a figure for each device that published
training steps give, `SUSTAINED`; no figure belongs to a row or a source of them (`benchmarks/published.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

from conjoin.cost.fitting import Fit
from conjoin.cost.work import CONVOLUTION, RECURRENT
from conjoin.machine import DeviceType, architecture_of, nearest_device

T = TypeVar("T")
SUSTAINED = {"H100-SXM5-80GB": 0.64, "A100-SXM4-40GB": 0.92, "A100-SXM4-80GB": 0.92}
"""Of what calls bound by flops reach on their own, by the nearest device's shares."""
_OF_AN_ARCHITECTURE = (CONVOLUTION, RECURRENT, "conv", "lstm", "gru", "rnn")
"""How the names of their classes begin."""


def borrowed_fit(device: DeviceType, fits: dict[str, Fit]) -> Fit | None:
    """The fit of the nearest device, as far as it carries over."""
    name = nearest_device(device, fits)
    if name is None or architecture_of(name) == architecture_of(device.name):
        return None if name is None else fits[name]
    fit = fits[name]
    return replace(fit, efficiency=_general(fit.efficiency), curves=_general(fit.curves))


def _general(named: Iterable[tuple[str, T]]) -> tuple[tuple[str, T], ...]:
    return tuple(pair for pair in named if not pair[0].startswith(_OF_AN_ARCHITECTURE))
