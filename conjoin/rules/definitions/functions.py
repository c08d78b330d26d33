"""What proofs know of some functions beside their names: `square` is a product, `relu` twice is `relu`.

    square(x)               x x
    relu(relu(x))           relu(x)
    max_r relu(x[r])        relu(max_r x[r])
    max_r max_q x[r, q]     max_r,q x[r, q]

A maximum is never over nothing: a window that is padded by less than the kernel reads at least one element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from conjoin.rules.definitions.calls import Devices
from conjoin.rules.definitions.reading import Element, Position, ReadNotation
from conjoin.rules.definitions.sums import Factor, Function, Largest, Sum, of


def _squared(reading: ReadNotation) -> Element:
    def element(places: Position, devices: Devices) -> Sum:
        return reading.at(0, places, devices) * reading.at(0, places, devices)

    return element


KNOWN: Mapping[str, Callable[[ReadNotation], Element]] = {"square": _squared}
"""Functions that are made of sums and products."""
_IDEMPOTENT = "relu"
INTERPRETED = frozenset({*KNOWN, _IDEMPOTENT})
"""All functions of which something is known: what is proven of them need not hold for others."""


def known_better(factor: Factor) -> Factor:
    """The same with what is known of functions put in; operands are simplified before."""
    match factor:
        case Function(name, (arg,)) if name == _IDEMPOTENT:
            inner = _alone(arg)
            return inner if isinstance(inner, Function) and inner.name == name else factor
        case Largest(bound, guard, arg):
            inner = _alone(arg)
            if isinstance(inner, Function) and inner.name == _IDEMPOTENT:
                return Function(inner.name, (of(known_better(Largest(bound, guard, inner.args[0]))),))
            if isinstance(inner, Largest):
                return known_better(Largest((*bound, *inner.bound), guard | inner.guard, inner.arg))
    return factor


def _alone(value: Sum) -> Factor | None:
    """The factor that a sum is, if it is nothing else."""
    if len(value.terms) != 1:
        return None
    (term,) = value.terms
    plain = term.coefficient == 1 and not term.bound and not term.guard and len(term.factors) == 1
    return term.factors[0] if plain else None
