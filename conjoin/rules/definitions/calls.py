"""What a definition is given and gives: an application with its operands, and a tensor whose elements are sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from conjoin.rules.definitions.affine import Affine, number, symbol
from conjoin.rules.definitions.dims import Dim, Dims
from conjoin.rules.definitions.sums import Guard, Sum, between, fresh
from conjoin.rules.patterns import Apply, Parameter

Digits = tuple[Affine, ...]
Index = tuple[Digits, ...]
"""A position: for each dim the digits it is made of."""
Devices = Mapping[str, Affine]
"""Which device along each mesh axis on which a tensor has values of its own."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """What is known of a tensor in a proof."""

    dims: tuple[Dim, ...]
    at: Callable[[Index, Devices], Sum]
    """The element at a position on a device; asked when all dims are known."""


@dataclass(frozen=True, slots=True)
class Call:
    """One application of an operator, ready to be defined."""

    dims: Dims
    expr: Apply
    """With all its parameters, those at their defaults too."""
    args: tuple[Tensor, ...]
    result: tuple[Dim, ...]
    """Dims of the result by its rank; for operators that make them up (constants)."""
    named: Mapping[str, Dim]
    """Sizes that go by a name: `m`, the devices along a mesh axis; `kernel k`; `groups g`."""

    def param(self, name: str) -> Parameter:
        return self.expr.param(name)

    def number(self, name: str) -> Affine:
        """A parameter as a whole number, known or not."""
        value = self.param(name)
        return number(value) if isinstance(value, int) else symbol(str(value))

    def over(self, dim: Dim, make: Callable[[Digits], Sum]) -> Sum:
        """A sum over all positions in a dim."""
        position, guard = positions(self.dims, dim)
        return make(position).over(bound_in(position), guard)


def positions(dims: Dims, dim: Dim, hint: str = "k") -> tuple[Digits, Guard]:
    """New indices for the positions in a dim, and where they run; a digit that can only be 0 needs none."""
    digits = [(digit, dims.size(digit)) for digit in dims.digits(dim)]
    found = tuple(number(0) if size == number(1) else symbol(fresh(hint)) for _, size in digits)
    guards = [between(0, index, size) for index, (_, size) in zip(found, digits, strict=True) if index.symbols]
    return found, frozenset().union(*guards)


def bound_in(position: Digits) -> tuple[str, ...]:
    """The indices of a new position."""
    return tuple(name for index in position for name in index.symbols)


Define = Callable[[Call], Tensor]
