"""What a row of the table of bindings is made of, and what its makers are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from conjoin.ir import Node, Value
from conjoin.rules.graphs.terms import Miss, Reading, Term, Virtual

Seen = Reading | Miss
"""What a reader finds."""
Reader = Callable[[Node, int], Iterable[Seen]]
"""Of a node, and which of its outputs is looked at."""


class Refused(Exception):
    """Why a rule cannot be applied at a match."""


class Maker(Protocol):
    """Emits calls."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the constants that are made."""

    def call(self, op: str, *args: Any, output: int = 0) -> Value:
        """An output of a call of an operator of graphs."""

    def said(self, op: str, attribute: str) -> Any:
        """What the calls that are replaced say of something that rules have no word for, where all say the same."""

    def value(self, term: Term) -> Value:
        """A term as a value; what is inside of another call is computed on its own."""


@dataclass(frozen=True, slots=True)
class Binding:
    """One rule operator in graphs."""

    op: str
    reads: Mapping[str, Reader]
    """For every operator of graphs in which it is found a reader."""
    make: Callable[..., Term]
    """Called with a maker, the operands, the parameters by name, and the shape of the result where asked for."""
    takes_shape: bool = False


def make_call(op: str, maker: Maker, args: tuple[Term, ...]) -> Term:
    """The maker of an operator that is one call on its operands."""
    return maker.call(op, *map(maker.value, args))


def operands(maker: Maker, args: tuple[Term, ...]) -> tuple[Value, ...]:
    """Operands that torch broadcasts by itself, as long as one of them has the shape of the result."""
    smaller = tuple(_before_broadcast(arg) for arg in args)
    whole = any(one is other for one, other in zip(smaller, args, strict=True))
    return tuple(map(maker.value, smaller if whole else args))


def _before_broadcast(term: Term) -> Term:
    return term.args[0] if isinstance(term, Virtual) and term.op == "broadcast" else term


def in_range(factor: float, dtype: torch.dtype) -> float:
    """A number that a dtype can hold; a call that is given a number may compute with others too."""
    least, most = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    if factor != 0 and not least <= abs(factor) <= most:
        raise Refused(f"{factor:g} is no number that {str(dtype).removeprefix('torch.')} can hold")
    return factor


def scalar(value: Any) -> Any:
    """The first of several words for one thing; the axes of a mesh are no such words."""
    return value[0] if isinstance(value, Words) else value


class Words(tuple[Any, ...]):
    """Several ways to say one parameter: a padding of 1 is `same` for a kernel of 3."""

    __slots__ = ()
