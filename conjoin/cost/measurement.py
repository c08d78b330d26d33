"""What measuring a call gives: seconds, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import fmean

from conjoin.cost.keys import MAX_KEY_LENGTH

MAX_SECONDS = 1e6
MAX_REASON_LENGTH = 300


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians of one call on one device.

    On a CUDA device the seconds are those of the device, and the host's are what it takes to enqueue the call; on a CPU
    host and device are one, and the host's seconds are 0.
    """

    key: str
    forward: float
    backward: float
    host_forward: float = 0.0
    host_backward: float = 0.0
    spread: float = 0.0
    """Between the quartiles of the forward seconds, relative to their median: how far to trust the rest."""

    def __post_init__(self) -> None:
        _check_key(self.key)
        for number in (self.forward, self.backward, self.host_forward, self.host_backward, self.spread):
            if type(number) is not float or not isfinite(number) or not 0 <= number <= MAX_SECONDS:
                raise ValueError(f"{str(number)[:40]} is not a number of seconds")


@dataclass(frozen=True, slots=True)
class Absence:
    """A call that could not be measured, and why: it does not fit the memory, or cannot run alone."""

    key: str
    reason: str

    def __post_init__(self) -> None:
        _check_key(self.key)
        if type(self.reason) is not str or not 1 <= len(self.reason) <= MAX_REASON_LENGTH:
            raise ValueError("an absence has a reason of some words")


Outcome = Measurement | Absence


_FIELDS = ("forward", "backward", "host_forward", "host_backward", "spread")


def mean_outcomes(ranks: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """The mean over ranks that measured the same calls; a call that failed on one of them has failed."""
    found: list[Outcome] = []
    for same in zip(*ranks, strict=True):
        failed = next((outcome for outcome in same if not isinstance(outcome, Measurement)), None)
        means = (fmean(getattr(outcome, field) for outcome in same) for field in _FIELDS) if failed is None else ()
        found.append(failed or Measurement(same[0].key, *means))
    return found


def _check_key(key: object) -> None:
    if type(key) is not str or not 1 <= len(key) <= MAX_KEY_LENGTH or not key.isprintable():
        raise ValueError("a key is one line of text")
