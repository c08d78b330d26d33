"""What index notation leaves open: what is done along a whole dim, or with a window that is not summed.

A notation says which dims an operator passes on (`d0 j0! d2, d0 j1! d2 -> d0 k! d2`); here is only what happens along
the others.
"""

from __future__ import annotations

from conjoin.rules.definitions.calls import Devices
from conjoin.rules.definitions.dims import NotCovered
from conjoin.rules.definitions.reading import Element, Position, ReadNotation
from conjoin.rules.definitions.sums import ALWAYS, Function, Largest, Sum, access, below, between, choose, of
from conjoin.rules.patterns import Input


def quotient(reading: ReadNotation) -> Element:
    """Linear in the first operand; the second one's inverse is the factor."""

    def element(places: Position, devices: Devices) -> Sum:
        return reading.at(0, places, devices) * of(Function("one over", (reading.at(1, places, devices),)))

    return element


def concatenation(reading: ReadNotation) -> Element:
    """[k < n] x[k] + [k >= n] y[k - n]."""
    dims, operands = reading.call.dims, reading.said.notation.operands
    a, b, k = (reading.along(tensor) for tensor in (*operands, reading.output))
    reading.dims[k], limit = dims.join_divided(reading.dims[a], reading.dims[b])

    def element(places: Position, devices: Devices) -> Sum:
        slow, *rest = places[k]
        digit, *more = dims.digits(limit)
        if more and len(more) != len(rest):
            raise NotCovered("a concatenation of divided dims")
        size = dims.size(digit)
        one = reading.at(0, {**places, a: places[k]}, devices)
        other = reading.at(1, {**places, b: (slow - size, *rest)}, devices)
        return choose(below(slow, size), one, other)

    return element


def piece(reading: ReadNotation) -> Element:
    """x[k], or x[k + n] for the second part."""
    k, j = reading.along(reading.said.notation.operands[0]), reading.along(reading.output)
    dims, whole = reading.call.dims, reading.dims[k]
    is_joined = whole.find().sum is not None and whole.find() not in dims.cut
    parts = dims.split(whole)
    if is_joined and isinstance(reading.call.expr.args[0], Input):  # by what it is put together with, not by itself
        dims.assumed.append(f"first part of {whole.words} = {parts[0].find().words}")
    part = int(reading.call.param("part"))
    reading.dims[j] = parts[part]

    def element(places: Position, devices: Devices) -> Sum:
        slow, *rest = places[j]
        first = reading.call.dims.digits(parts[0])[0]
        moved = slow + reading.call.dims.size(first) if part else slow
        return reading.at(0, {**places, k: (moved, *rest)}, devices)

    return element


def padding(reading: ReadNotation) -> Element:
    """[0 <= k - p < n] x[k - p], along every dim that grows, with as much before it as after it."""
    dims, call = reading.call.dims, reading.call
    inner, outer = reading.said.whole(reading.said.notation.operands[0]), reading.said.whole(reading.output)
    target = call.named[f"kernel {call.param('kernel')}"]
    large, *small = (dims.odd(dim) for dim in (target, *(reading.dims[name] for name in inner)))
    dims.not_larger += [(half, large) for half in small]
    dims.needed += [f"{reading.dims[name].find().words} <= {target.find().words}" for name in inner]
    reading.dims.update(dict.fromkeys(outer, target))

    def element(places: Position, devices: Devices) -> Sum:
        moved, inside = dict(places), ALWAYS
        for name, grown, half in zip(inner, outer, small, strict=True):
            position = places[grown][0] - (dims.size(large) - dims.size(half))
            moved[name] = (position,)
            inside |= between(0, position, dims.size(reading.dims[name]))
        return reading.at(0, moved, devices).under(inside)

    return element


def normalisation(reading: ReadNotation) -> Element:
    """exp(x[k]) over Σ_k exp(x[k])."""
    k = reading.along(reading.output)

    def element(places: Position, devices: Devices) -> Sum:
        def exponent(at: Position) -> Sum:
            return of(Function("exp", (reading.at(0, at, devices),)))

        more, bound, guard = reading.every((k,))
        total = exponent({**places, **more}).over(bound, guard)
        return exponent(places) * of(Function("one over", (total,)))

    return element


def mean_over_edges(reading: ReadNotation) -> Element:
    """Σ_u,e x[u] [source[e] = u] [target[e] = v] over how many edges have the target v, or over 1 where none has."""
    source, target = reading.said.notation.operands[1:]
    (edge,), from_vertex, vertex = source.indices(), source.addresses or "", target.addresses or ""

    def is_row(operand: int, vertex: str, places: Position, devices: Devices) -> Sum:
        row = access("#", (reading.row(vertex, places),))
        return of(Function("is row", (reading.at(operand, places, devices), row)))

    def element(places: Position, devices: Devices) -> Sum:
        more, bound, guard = reading.every((from_vertex, edge))
        here = {**places, **more}
        ends = is_row(1, from_vertex, here, devices) * is_row(2, vertex, here, devices)
        total = (reading.at(0, here, devices) * ends).over(bound, guard)
        more, bound, guard = reading.every((edge,))
        count = is_row(2, vertex, {**places, **more}, devices).over(bound, guard)
        return total * of(Function("one over", (of(Function("at least one", (count,))),)))

    return element


def maximum(reading: ReadNotation) -> Element:
    """The largest of each window; what lies beyond the operand does not count."""
    names = tuple(window.kernel for window in reading.said.windows)

    def element(places: Position, devices: Devices) -> Sum:
        more, bound, guard = reading.every(names)
        here = {**places, **more}
        return of(Largest(bound, guard | reading.inside(0, here), reading.at(0, here, devices)))

    return element
