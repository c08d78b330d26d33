"""All declared operators, found by the name they have in graphs."""

from __future__ import annotations

from collections import Counter
from functools import cache, lru_cache
from types import MappingProxyType

from conjoin.ops.declarations import (
    attention,
    contraction,
    convolution,
    creation,
    elementwise,
    joining,
    lookup,
    losses,
    movement,
    normalization,
    parallel,
    pooling,
    randomness,
    recurrent,
    reductions,
    resampling,
    scattering,
    views,
)
from conjoin.ops.notation import NotationError
from conjoin.ops.spec import Call, OpSpec, space_of

_FAMILIES = (
    contraction, convolution, pooling, normalization, attention, recurrent, lookup, scattering, elementwise, reductions,
    joining, movement, resampling, views, creation, randomness, losses, parallel,
)  # fmt: skip


@cache
def all_ops() -> tuple[OpSpec, ...]:
    """Every declaration, family by family."""
    return tuple(spec for family in _FAMILIES for spec in family.OPS)


@cache
def _by_name() -> MappingProxyType[str, OpSpec]:
    table = [(name, spec) for spec in all_ops() for name in spec.names]
    twice = [name for name, count in Counter(name for name, _ in table).items() if count > 1]
    assert not twice, f"declared twice: {', '.join(twice)}"
    return MappingProxyType(dict(table))


def find_spec(op: str) -> OpSpec | None:
    """The declaration of an operator, or None when it is opaque.

    >>> find_spec("linear").terms, find_spec("nonzero")
    ('input weight + bias', None)
    """
    return _by_name().get(op)


@lru_cache(maxsize=65536)
def spec_for(call: Call) -> OpSpec | None:
    """The declaration of an operator where it covers this call; None for an opaque one, or a form not declared."""
    spec = find_spec(call.op)
    try:
        return spec if spec is not None and space_of(spec, call) else None
    except (NotationError, ArithmeticError, AttributeError, ValueError, LookupError, TypeError, AssertionError):
        return None
