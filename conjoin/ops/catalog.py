"""All declared operators, found by the name they have in graphs."""

from __future__ import annotations

from collections import Counter
from functools import cache
from types import MappingProxyType

from conjoin.ops.aten import OPAQUE, is_custom
from conjoin.ops.call_cache import call_cache, forget_calls
from conjoin.ops.declarations import (
    attention,
    contraction,
    convolution,
    creation,
    elementwise,
    experts,
    graphs,
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
    spectral,
    views,
)
from conjoin.ops.notation import NotationError
from conjoin.ops.spec import Call, OpSpec, output_types
from conjoin.ops.tensor_type import TensorType
from conjoin.plugins import load_plugins

_FAMILIES = (
    contraction, convolution, pooling, normalization, attention, recurrent, experts, graphs, lookup, scattering,
    elementwise, reductions, joining, movement, resampling, spectral, views, creation, randomness, losses, parallel,
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
    found = _by_name().get(op)
    if found is None and op not in _OWN and is_custom(op):
        load_plugins(op)
    return found or (_OWN[op][0] if op in _OWN else None)


_OWN: dict[str, tuple[OpSpec, str]] = {}
"""What users declared of operators of their own, and in which module; by name, as torch keeps the operators."""


def declare(spec: OpSpec, module: str) -> None:
    """Let a user's operator be known by what a module declares; what was thought of it before is forgotten."""
    _OWN[spec.name] = spec, module
    forget_calls()


def declaring_module(op: str) -> str | None:
    """The module that declares an operator of a user's; None of an operator that no user declared."""
    return _OWN[op][1] if op in _OWN else None


def spec_for(call: Call) -> OpSpec | None:
    """The declaration of an operator where it covers this call; None for an opaque one, or a form not declared."""
    return _judge(call)[0]


def why_opaque(call: Call, types: tuple[TensorType, ...] = ()) -> str | None:
    """Why no declaration covers a call, or not one that gives these types; None where one does.

    >>> import torch
    >>> why_opaque(Call("nonzero", (TensorType((3,), torch.float32),)))
    'nobody declared it'
    """
    declared = Call(call.op.removeprefix(OPAQUE), call.args)
    spec, reason = _judge(declared)
    derived = output_types(spec, declared) if spec is not None else ()
    if spec is not None and types and derived != types:
        reason = f"its declaration gives {', '.join(map(str, derived))} where torch gives {', '.join(map(str, types))}"
    return reason or None


@call_cache()
def _judge(call: Call) -> tuple[OpSpec | None, str]:
    """The declaration that covers a call, or why there is none."""
    spec = find_spec(call.op)
    if spec is None:
        return None, "nobody declared it" + (" by conjoin.register_operator" if is_custom(call.op) else "")
    try:
        output_types(spec, call)
    except NotationError as error:
        return None, f"its declaration does not cover this form: {error}"
    except Exception as error:  # on a strange call a declaration may fail in any way; it is told, never swallowed
        return None, f"its declaration cannot read this form: {type(error).__name__}: {error}"
    return spec, ""
