"""How far predictions are expected to be off, from where their seconds come and how far those were off before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from conjoin.cost import Source, shipped_profiles
from conjoin.machine import Machine

WITHIN = {Source.MEASURED: 0.13, Source.INTERPOLATED: 0.16, Source.ESTIMATED: 0.35}
"""By which part a step may be off. Measured operator by operator: nine of ten of 19 steps of models on an H200 were
within 13 % (median 6.2). The others are rougher. Interpolated: nine of ten of 52 steps of public
models that no profile knows were within 11 % (median 3.6). Estimated from data sheets: of 71 published steps on V100,
A100 and H100, with one figure fitted to each kind, all are within 27 %; what nobody published may be further off."""
ALIKE = 0.10
"""Plans for one machine are off alike: on emulated clusters the order of pairs that are further apart was right."""


@dataclass(frozen=True, slots=True)
class Published:
    """How far steps on a GPU that others published were predicted off, all prices estimated."""

    gpu: str
    num_steps: int
    median_error: float
    worst_error: float


PUBLISHED = (Published("H100", 16, 0.083, 0.23), Published("A100", 32, 0.035, 0.26), Published("V100", 23, 0.075, 0.17))
"""As `benchmarks/published.py` found them on 2026-11-18."""


def published_for(machine: Machine) -> tuple[Published, ...]:
    """What is known of the GPUs of a machine.

    >>> [found.gpu for found in published_for(Machine.preset("dgx-h100"))]
    ['H100']
    """
    names = [device.name for device in machine.device_types]
    return tuple(found for found in PUBLISHED if any(name.startswith(found.gpu) for name in names))


def is_all_estimated(sources: Sequence[tuple[Source, float]], machine: Machine) -> bool:
    """Whether no second of a step rests on a measurement, of these calls or of others on such a device."""
    firm = any(seconds for source, seconds in sources if source is not Source.ESTIMATED)
    measured = {profile.device for profile in shipped_profiles()}
    return not firm and not any(device.efficiency or device.name in measured for device in machine.device_types)


def expected_error(sources: Sequence[tuple[Source, float]]) -> float:
    """The part by which a step may be off whose seconds come from these sources.

    >>> expected_error([(Source.MEASURED, 3.0), (Source.ESTIMATED, 1.0)])
    0.185
    """
    total = sum(seconds for _, seconds in sources)
    return sum(WITHIN[source] * seconds for source, seconds in sources) / total if total else 0.0
