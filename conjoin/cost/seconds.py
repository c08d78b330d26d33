"""Seconds that say where they come from: measured, interpolated between measurements, or estimated."""

from dataclasses import dataclass
from enum import Enum


class Source(Enum):
    """Where a number comes from, the firmest first."""

    MEASURED = "measured"
    INTERPOLATED = "interpolated"
    ESTIMATED = "estimated"


_WEAKNESS = {source: weakness for weakness, source in enumerate(Source)}


@dataclass(frozen=True, slots=True)
class Seconds:
    """A time and its source; a sum is as weak as its weakest part.

    >>> Seconds(1.0, Source.MEASURED) + Seconds(0.5, Source.ESTIMATED)
    Seconds(value=1.5, source=<Source.ESTIMATED: 'estimated'>)
    """

    value: float
    source: Source

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.value + other.value, weakest(self.source, other.source))

    def __mul__(self, factor: float) -> "Seconds":
        """As many times as long; that is an estimate, unless it is once."""
        return self if factor == 1 else Seconds(self.value * factor, weakest(self.source, Source.ESTIMATED))


def weakest(*sources: Source) -> Source:
    """The least firm of these sources; of none, MEASURED: nothing takes no time.

    >>> weakest(Source.INTERPOLATED, Source.MEASURED)
    <Source.INTERPOLATED: 'interpolated'>
    """
    return max(sources, key=_WEAKNESS.__getitem__, default=Source.MEASURED)


NO_SECONDS = Seconds(0.0, Source.MEASURED)
