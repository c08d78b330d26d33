"""The five things a layout can say about one mesh axis, and their duals (DESIGN: one algebra)."""

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


@dataclass(frozen=True, slots=True)
class At:
    """Only the devices at one place of the axis hold the value; the others have nothing of it and do nothing for it."""

    place: int

    def __str__(self) -> str:
        return f"At({self.place})"


Placement = Invariant | Split | Copies | Partial | At


def dual(placement: Placement) -> Placement:
    """The placement of the gradient of a tensor placed so.

    >>> str(dual(Copies())), str(dual(Partial())), str(dual(Split(1)))
    ('P', 'B', 'S(1)')
    """
    match placement:
        case Invariant() | Split() | At():
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
    word, _, digits = text.removesuffix(")").partition("(")
    if text == f"{word}({digits})" and digits.isascii() and digits.isdigit():
        if word == "S" and len(digits) <= 2:
            return Split(int(digits))
        if word == "At" and len(digits) <= 6:
            return At(int(digits))
    raise ValueError(f"{text!r} is not a placement: expected I, B, P, S(dim) or At(place)")
