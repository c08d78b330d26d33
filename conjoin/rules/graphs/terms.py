"""What a rule meets in a graph: values, numbers written in calls, and results inside of a call; and how each reads.

One call may be several rule operators at once: `linear` with a bias is bias(linear(x, w), b), and a `cat` of four
tensors is concat(concat(concat(a, b), c), d). The inner results have no value in the graph; they are `Virtual` terms.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from conjoin.ir import Node, Value
from conjoin.ops import TensorType, signature

Shape = tuple[int, ...]
Params = tuple[tuple[str, Any], ...]
"""Parameters of a rule operator with concrete values; a tuple lists words for one and the same thing: ("same", 1)."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A number written in a call, as a factor or (`inverse`) as a divisor."""

    number: float
    inverse: bool = False

    @property
    def type(self) -> TensorType:
        return TensorType((), torch.float64)

    @property
    def factor(self) -> float:
        return 1 / self.number if self.inverse else self.number


@dataclass(frozen=True, slots=True)
class Virtual:
    """The result of a rule operator inside of a call, or a tensor as a call broadcasts it (`broadcast`)."""

    op: str
    params: Params
    args: tuple[Term, ...]
    type: TensorType
    _hash: int = field(init=False, repr=False, compare=False)
    """Found once: terms nest as deeply as a `cat` has operands, and are looked up again and again."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.op, self.params, self.args, self.type)))

    def __hash__(self) -> int:
        return self._hash


Term = Value | Literal | Virtual


@dataclass(frozen=True, slots=True)
class Reading:
    """A term seen as a rule operator applied to terms."""

    op: str
    params: Params
    args: tuple[Term, ...]
    also: tuple[Node, ...] = ()
    """Further nodes that are part of it, beside the one that makes the value."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a call that does what a rule operator does is not in a form that rules cover."""

    op: str
    reason: str


def argument(node: Node, name: str) -> Any:
    """What a call is given for a parameter; None where it has none of that name."""
    place = signature(node.op).position(name)
    return None if place < 0 else node.args[place]


def shape_of(term: Term) -> Shape:
    return term.type.shape


def rank_of(term: Term) -> int:
    return len(term.type.shape)


def with_shape(term: Term, shape: Shape) -> TensorType:
    """The type of a term that is like another but for its shape; how it lies on the mesh is found when it is made."""
    return TensorType(shape, term.type.dtype)


def broadcast(term: Term, shape: Shape) -> Term:
    """A term as a call sees it that broadcasts it to a shape."""
    return term if shape_of(term) == shape else Virtual("broadcast", (), (term,), with_shape(term, shape))
