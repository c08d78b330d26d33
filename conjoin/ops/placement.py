"""The six things a layout can say about one mesh axis, and their duals (docs/architecture.md: one algebra).

Of every placement there is one object: layouts are compared and looked up all the time, and what is the same object is
found to be equal at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any, Self, assert_never

_ONCE: dict[tuple[type, tuple[int, ...]], Any] = {}
"""Placements by kind and number."""


class _Once:
    """The same object for the same arguments, also where it is copied or comes from another process."""

    __slots__ = ()

    def __new__(cls, *args: int, **named: int) -> Self:
        found: Self | None = _ONCE.get((cls, (*args, *named.values())))
        return cls._made(*args, **named) if found is None else found

    @classmethod
    def _made(cls, *args: int, **named: int) -> Self:
        """One that was not there yet, with a plain number: `Split(True)` is `Split(1)`, and says so."""
        given = dict(zip(cls.__match_args__, args, strict=False)) | named  # type: ignore[attr-defined]
        if tuple(given) != cls.__match_args__ or len(args) + len(named) != len(given):  # type: ignore[attr-defined]
            raise TypeError(f"{cls.__name__} takes {cls.__match_args__}, not {args} and {named}")  # type: ignore[attr-defined]
        made = object.__new__(cls)
        for name, number in given.items():
            object.__setattr__(made, name, int(index(number)))
        found: Self = _ONCE.setdefault((cls, tuple(int(index(number)) for number in given.values())), made)
        return found

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Invariant(_Once):
    """All devices along the axis hold the same one value and do the same work."""

    def __reduce__(self) -> tuple[type[Invariant], tuple[()]]:
        return Invariant, ()

    def __str__(self) -> str:
        return "I"


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Split(_Once):
    """The devices along the axis hold the pieces of the value along `dim`."""

    dim: int

    def __reduce__(self) -> tuple[type[Split], tuple[int]]:
        return Split, (self.dim,)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Copies(_Once):
    """Each device holds a copy and uses it for a different part of the work."""

    def __reduce__(self) -> tuple[type[Copies], tuple[()]]:
        return Copies, ()

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Partial(_Once):
    """Each device holds a partial sum; the total is the value."""

    def __reduce__(self) -> tuple[type[Partial], tuple[()]]:
        return Partial, ()

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Greatest(_Once):
    """Each device holds the greatest of a part; the greatest of all is the value, which has no gradient."""

    def __reduce__(self) -> tuple[type[Greatest], tuple[()]]:
        return Greatest, ()

    def __str__(self) -> str:
        return "P(max)"


@dataclass(frozen=True, slots=True, eq=False, init=False)
class At(_Once):
    """Only the devices at one place of the axis hold the value; the others have nothing of it and do nothing for it."""

    place: int

    def __reduce__(self) -> tuple[type[At], tuple[int]]:
        return At, (self.place,)

    def __str__(self) -> str:
        return f"At({self.place})"


Placement = Invariant | Split | Copies | Partial | Greatest | At


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
        case Greatest():
            return Invariant()  # there is none to place
        case _:
            assert_never(placement)


def parse_placement(text: str) -> Placement:
    """Read what `str` of a placement wrote.

    >>> parse_placement("S(2)")
    Split(dim=2)
    """
    letters: dict[str, Placement] = {"I": Invariant(), "B": Copies(), "P": Partial(), "P(max)": Greatest()}
    if text in letters:
        return letters[text]
    word, _, digits = text.removesuffix(")").partition("(")
    if text == f"{word}({digits})" and digits.isascii() and digits.isdigit():
        if word == "S" and len(digits) <= 2:
            return Split(int(digits))
        if word == "At" and len(digits) <= 6:
            return At(int(digits))
    raise ValueError(f"{text!r} is not a placement: expected I, B, P, P(max), S(dim) or At(place)")
