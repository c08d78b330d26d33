"""How every rule operator stands in a graph: in which calls it is found, and which calls are made for it.

One row for each operator, family by family. A reader looks at one call and gives the ways in which its result is that
operator, or why it is in a form that rules do not cover; a maker is given parameters, operands and the shape of the
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from conjoin.ir import Node, Value
from conjoin.rules.graphs import arithmetic_bindings, part_bindings, product_bindings, window_bindings
from conjoin.rules.graphs.binding import Binding, Maker, Reader, Seen, scalar
from conjoin.rules.graphs.terms import Miss, Reading, Shape, Term, Virtual

BINDINGS: tuple[Binding, ...] = (
    *arithmetic_bindings.BINDINGS,
    *product_bindings.BINDINGS,
    *window_bindings.BINDINGS,
    *part_bindings.BINDINGS,
)
BINDING_OF: Mapping[str, Binding] = {binding.op: binding for binding in BINDINGS}


def _readers() -> Mapping[str, tuple[Reader, ...]]:
    found: dict[str, list[Reader]] = {}
    for binding in BINDINGS:
        for name, read in binding.reads.items():
            found.setdefault(name, []).append(read)
    return {name: tuple(reads) for name, reads in found.items()}


_READERS = _readers()


@dataclass(frozen=True, slots=True)
class Readings:
    """Every way to see a term as a rule operator, by operator; and why it is none."""

    by_op: Mapping[str, tuple[Reading, ...]]
    misses: Mapping[str, str]


@lru_cache(maxsize=1 << 16)
def readings_of(term: Term) -> Readings:
    """Every way to read a term."""
    found: dict[str, list[Reading]] = {}
    misses: dict[str, str] = {}
    for seen in _seen(term):
        if isinstance(seen, Miss):
            misses.setdefault(seen.op, seen.reason)
        else:
            found.setdefault(seen.op, []).append(seen)
    return Readings({op: tuple(readings) for op, readings in found.items()}, misses)


def _seen(term: Term) -> Iterator[Seen]:
    if isinstance(term, Virtual):
        unfold = part_bindings.UNFOLD.get(term.op)
        if unfold is not None:
            yield from unfold(term)
        elif term.op in BINDING_OF:
            yield Reading(term.op, term.params, term.args)
    elif isinstance(term, Value) and isinstance(term.owner, Node):
        for read in _READERS.get(term.owner.op, ()):
            yield from read(term.owner, term.index)


def make(maker: Maker, op: str, params: Mapping[str, Any], args: tuple[Term, ...], shape: Shape) -> Term:
    """Emit the calls for a rule operator, or for a term inside of a call."""
    if op == "broadcast":
        return maker.call("expand", maker.value(args[0]), shape)
    if op == "column":
        return maker.call("reshape", maker.value(args[0]), shape)
    if op == "range":
        return maker.call("slice.Tensor", maker.value(args[0]), params["axis"], params["start"], params["stop"], 1)
    binding = BINDING_OF[op]
    given = {name: scalar(value) for name, value in params.items()}
    return binding.make(maker, args, **given, **({"shape": shape} if binding.takes_shape else {}))
