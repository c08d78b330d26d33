"""Numbers with a unit: the name and size of the unit in files, the base unit in memory, and what is believable.

Files say `gigabytes_per_second = 25.0`; in memory it is 25e9 bytes per second. Between the two only the decimal point
moves, in decimal arithmetic, so that what is written is read back bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal, localcontext
from math import isfinite

from conjoin.errors import UsageError
from conjoin.machine.limits import shown


@dataclass(frozen=True, slots=True)
class Quantity:
    """What a number measures: the words for its unit, the power of ten of that unit, the bounds in that unit."""

    unit: str
    power: int
    low: float
    high: float

    def check(self, what: str, value: object) -> None:
        """Refuse a number in base units that no machine has."""
        good = isfinite(value) if type(value) is float else type(value) is int and value.bit_length() < 200
        if not good or not self.low <= float(self._shifted(value)) <= self.high:
            self._refuse(what, self._shifted(value) if good else value)

    def read(self, what: str, value: object) -> float:
        """A number of a file, in base units; `what` is the path of its key."""
        if type(value) not in (int, Decimal) or not _is_between(value, self.low, self.high):
            self._refuse(what, value)
        return float(_scaled(Decimal(value), self.power))  # type: ignore[arg-type]

    def text(self, value: float) -> str:
        """A number in base units as a file has it.

        >>> GIGABYTES_PER_SECOND.text(12.5e9), MICROSECONDS.text(5e-06)
        ('12.5', '5.0')
        """
        digits = f"{self._shifted(value):f}"
        return digits if "." in digits else f"{digits}.0"

    def _shifted(self, value: object) -> Decimal:
        return _scaled(Decimal(repr(value)), -self.power).normalize()

    def _refuse(self, what: str, value: object) -> None:
        raise UsageError(
            f"The {what} is {_shown_number(value)}. It must be a number from {self.low:g} to {self.high:g} "
            f"{self.unit}. Correct it, or look for a wrong unit."
        )


def _scaled(value: Decimal, power: int) -> Decimal:
    with localcontext() as context:
        context.prec = 60  # a float has up to 17 digits, a file may have more
        return value.scaleb(power)


def _is_between(value: object, low: float, high: float) -> bool:
    if isinstance(value, Decimal) and not value.is_finite():
        return False
    return low <= value <= high  # type: ignore[operator]


def _shown_number(value: object) -> str:
    if isinstance(value, float | Decimal):
        return f"{value:g}" if isinstance(value, float) or not value.is_finite() else f"{value:.6g}"
    return shown(value)


# The bounds are a thousandfold beyond anything built, on both sides: they catch wrong units, not bold designs.
GIGABYTES = Quantity("gigabytes", 9, 1e-3, 1e6)
GIGABYTES_PER_SECOND = Quantity("gigabytes per second", 9, 1e-6, 1e6)
TERAFLOPS = Quantity("teraflops", 12, 1e-6, 1e6)
MICROSECONDS = Quantity("microseconds", -6, 0.0, 1e9)
SECONDS_PER_GIGABYTE = Quantity("seconds per gigabyte", -9, 0.0, 1e9)
FRACTION = Quantity("(a part of the peak rate)", 0, 1e-6, 10.0)
FACTOR = Quantity("times as long", 0, 1e-3, 1e3)
R_SQUARED = Quantity("(a share of the variation)", 0, -1e6, 1.0)
