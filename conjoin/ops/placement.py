"""The four things a layout can say about one mesh axis, and their duals (DESIGN: one algebra)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never


@dataclass(frozen=True, slots=True)
class Invariant:
    """All devices along the axis hold the same one value and do the same work."""

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True, slots=True)
class Split:
    """The devices along the axis hold the pieces of the value along `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Copies:
    """Each device holds a copy and uses it for a different part of the work."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each device holds a partial sum; the total is the value."""

    def __str__(self) -> str:
        return "P"


Placement = Invariant | Split | Copies | Partial


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a tensor placed so.

    >>> str(dual(Copies())), str(dual(Partial())), str(dual(Split(1)))
    ('P', 'B', 'S(1)')
    """
    match placement:
        case Invariant() | Split():
            return placement
        case Copies():
            return Partial()
        case Partial():
            return Copies()
        case _:
            assert_never(placement)


def parse_placement(text: str) -> Placement:
    """Read what `str` of a placement wrote.

    >>> parse_placement("S(2)")
    Split(dim=2)
    """
    letters: dict[str, Placement] = {"I": Invariant(), "B": Copies(), "P": Partial()}
    if text in letters:
        return letters[text]
    digits = text.removeprefix("S(").removesuffix(")")
    if text == f"S({digits})" and digits.isascii() and digits.isdigit() and len(digits) <= 2:
        return Split(int(digits))
    raise ValueError(f"{text!r} is not a placement: expected I, B, P or S(dim)")
