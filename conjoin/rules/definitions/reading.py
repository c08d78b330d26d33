"""Definitions read off declarations: an operator's index notation, with dims of unknown sizes for its indices.

    "... m k, ... k n -> ... m n", terms "self other"      Σ_k self[i, k] other[k, j]
    "n (g c) y*s+r*1-p …, (g o) c r q -> n (g o) y x"      Σ_c,r,q [0 <= s*y + r - p < H] input[g c, …] weight[g o, …]
    "v d, ...@v -> ... d", terms "weight"                  Σ_v weight[v, j] [indices[i] = v]

An operator that is not linear, and sums over nothing, is a function of its operands' elements. What is done along
whole indices (`k!`) the notation leaves open: see `left_open.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import mul

from conjoin.ops import Access, Factors, Window
from conjoin.rules.definitions.affine import Affine, number
from conjoin.rules.definitions.calls import Call, Define, Devices, Digits, Index, Tensor, bound_in, positions
from conjoin.rules.definitions.declarations import MARKS, Declared, NotSaid, Part, Said, ask
from conjoin.rules.definitions.dims import Dim, IllFormed, NotCovered
from conjoin.rules.definitions.sums import ALWAYS, ZERO, Function, Guard, Sum, access, average, between, of

Position = Mapping[str, Digits]
"""A position: for each index of a notation its digits."""
Element = Callable[[Position, Devices], Sum]
"""What the result is at a position."""


class ReadNotation:
    """A notation read with the dims of a call: which dim each index is, and the elements it names."""

    def __init__(self, call: Call, said: Said) -> None:
        self.call, self.said = call, said
        self.dims: dict[str, Dim] = {}
        self._made_of: dict[Factors, Dim] = {}
        """Dims that operands have, by the indices they are made of."""
        self._offsets: dict[Window, Callable[[], Affine]] = {}
        for name, size in said.sizes.items():
            for parameter in ("groups", "kernel", "parts", "vertices"):
                if size == MARKS[parameter]:
                    self.dims[name] = self._named(parameter)
        for operand, arg in zip(said.notation.operands, call.args, strict=True):
            for expr, dim in zip(operand.dims, arg.dims, strict=True):
                if isinstance(expr, Factors):
                    self._bind(expr, dim)
        for window, dim in self._read_through():  # all kernels have their dims now
            self.dims[window.out] = self._windows(window, dim)

    def _read_through(self) -> Iterable[tuple[Window, Dim]]:
        """The windows, and the dims that are read through them."""
        for operand, arg in zip(self.said.notation.operands, self.call.args, strict=True):
            for expr, dim in zip(operand.dims, arg.dims, strict=True):
                if isinstance(expr, Window):
                    yield expr, dim

    def _named(self, name: str) -> Dim:
        value = self.call.param(name)
        if value != "?":
            return self.call.named[f"{name} {value}"]
        channels, own = (arg.dims[1].find().words for arg in self.call.args)
        return self.call.dims.new(f"{name}({channels}, {own})")

    def _bind(self, expr: Factors, dim: Dim) -> None:
        if not expr.names:
            raise NotSaid("a dim that is repeated")
        self._made_of.setdefault(expr, dim)
        *slow, fast = expr.names
        for name in slow:
            dim = self.call.dims.divide(dim, self._dim(name))
        if fast in self.dims:
            self.call.dims.unify(self.dims[fast], dim)
        else:
            self.dims[fast] = dim

    def _windows(self, window: Window, whole: Dim) -> Dim:
        """How many windows there are along a dim; where they begin is kept."""
        dims, kernel, stride = self.call.dims, self._dim(window.kernel), self._number(window.stride, "stride")
        size = whole.find().words
        if window.dilation != 1:
            raise NotSaid(f"windows of a kernel dilated by {window.dilation}")
        if window.padding == MARKS["pad"] and self.call.param("pad") == "same":
            half = dims.odd(kernel)
            self._offsets[window] = lambda: dims.size(half)
            if stride == number(1):
                return whole
            return dims.new(f"windows({size}, 1, {stride}, 0)", window=(whole, None, stride, number(0)))
        padding = self._number(window.padding, "pad")
        self._offsets[window] = lambda: padding
        if self.call.param("kernel") != "" and padding != number(0):  # torch pads pools by half a window at most
            dims.needed.append(f"2 * {padding} <= {kernel.find().words}")
        words = f"windows({size}, {kernel.find().words}, {stride}, {padding})"
        return dims.new(words, window=(whole, kernel, stride, padding))

    def _number(self, value: int, name: str) -> Affine:
        """A number of the notation, or the parameter that it stands for."""
        if value != MARKS[name]:
            return number(value)
        return number(0) if self.call.param(name) == "valid" else self.call.number(name)

    @property
    def output(self) -> Access:
        """How the result is indexed; of several the one that the parameter `part` says."""
        outputs = self.said.notation.outputs
        if len(outputs) == 1:
            return outputs[0]
        part = self.call.param("part")
        if part not in range(len(outputs)):
            raise IllFormed(f"a {self.call.expr.op} has parts 0 to {len(outputs) - 1}, not {part}")
        return outputs[int(part)]

    @property
    def result(self) -> tuple[Dim, ...]:
        """The dims of the result."""
        found = []
        for expr in self.output.dims:
            assert isinstance(expr, Factors), "an output is not read through a window"
            found.append(self._made_of[expr] if expr in self._made_of else self._dim(*expr.names))
        return tuple(found)

    def _dim(self, *names: str) -> Dim:
        """The dim that an index is, or that is made of several."""
        if not names or any(name not in self.dims for name in names):
            raise NotSaid(f"the size of {' '.join(names)} follows from nothing")
        *slow, dim = (self.dims[name] for name in names)
        for digit in reversed(slow):
            dim = self.call.dims.times(digit, dim)
        return dim

    def along(self, tensor: Access) -> str:
        """The one index of a tensor along which it is left open what is done."""
        names = self.said.whole(tensor)
        if len(names) != 1:
            raise NotSaid(f"{self.call.expr.op} works along one dim, and its declaration leaves {len(names)} open")
        return names[0]

    def places(self, index: Index) -> Position:
        """The digits of every index of the result at a position."""
        found: dict[str, Digits] = {}
        for expr, digits in zip(self.output.dims, index, strict=True):
            assert isinstance(expr, Factors)
            *slow, fast = expr.names
            for name in slow:
                width = len(self.call.dims.digits(self.dims[name]))
                found[name], digits = digits[:width], digits[width:]
            found[fast] = digits
        return found

    def every(self, names: Iterable[str]) -> tuple[Position, tuple[str, ...], Guard]:
        """All positions of some indices: new digits, the names in them, and where these run."""
        found = {name: positions(self.call.dims, self.dims[name]) for name in names}
        bound = tuple(name for digits, _ in found.values() for name in bound_in(digits))
        guard = ALWAYS.union(*(where for _, where in found.values()))
        return {name: digits for name, (digits, _) in found.items()}, bound, guard

    def at(self, operand: int, places: Position, devices: Devices) -> Sum:
        """An element of an operand."""
        index: list[Digits] = []
        for expr in self.said.notation.operands[operand].dims:
            if isinstance(expr, Window):
                index.append((self._position(expr, places),))
            else:
                assert isinstance(expr, Factors)
                index.append(tuple(digit for name in expr.names for digit in places[name]))
        self._check_digits(operand, index)
        return self.call.args[operand].at(tuple(index), devices)

    def _check_digits(self, operand: int, index: list[Digits]) -> None:
        """A dim may have been divided further after it was joined with another one."""
        for dim, digits in zip(self.call.args[operand].dims, index, strict=True):
            if len(self.call.dims.digits(dim)) != len(digits):
                raise NotCovered("a dim that is a part of another is divided in another way")

    def inside(self, operand: int, places: Position) -> Guard:
        """Where windows do not read beyond an operand."""
        dims = zip(self.said.notation.operands[operand].dims, self.call.args[operand].dims, strict=True)
        windows = [(expr, dim) for expr, dim in dims if isinstance(expr, Window)]
        if any(len(self.call.dims.digits(dim)) > 1 for _, dim in windows):
            raise NotCovered("a divided dim is read through a window")
        sizes = ((self._position(expr, places), self.call.dims.size(dim)) for expr, dim in windows)
        return ALWAYS.union(*(between(0, position, size) for position, size in sizes))

    def _position(self, window: Window, places: Position) -> Affine:
        stride = self._number(window.stride, "stride")
        return stride * places[window.out][0] + places[window.kernel][0] - self._offsets[window]()

    def row(self, name: str, places: Position) -> Affine:
        """The position along an index as one number."""
        total = number(0)
        for dim, digit in zip(self.call.dims.digits(self.dims[name]), places[name], strict=True):
            total = total * self.call.dims.size(dim) + digit
        return total


Open = Callable[[ReadNotation], Element]
"""What is done where a notation leaves it open."""


def derived(declared: Declared, left_open: Open | None = None) -> Define:
    """A definition from what is declared; where that leaves something open, from what is said here besides."""

    def define(call: Call) -> Tensor:
        reading = ReadNotation(call, ask(declared, call))
        element = _element(reading, declared.name) if left_open is None else left_open(reading)
        return Tensor(reading.result, lambda index, devices: element(reading.places(index), devices))

    return define


def _element(reading: ReadNotation, name: str) -> Element:
    said = reading.said
    operands = range(len(said.notation.operands))
    if not said.parts:
        if said.notation.summed() or any(said.whole(operand) for operand in said.notation.operands):
            raise NotSaid(f"the notation of {name} leaves open what is done along its dims")
        return lambda places, devices: of(Function(name, tuple(reading.at(i, places, devices) for i in operands)))
    spoken = {i for part in said.parts for i in part.operands}
    if any(i not in spoken and not said.notation.operands[i].addresses for i in operands):
        raise NotSaid(f"the terms of {name} leave open what some of its operands are for")
    return lambda places, devices: sum((_term(reading, part, places, devices) for part in said.parts), ZERO)


def _term(reading: ReadNotation, part: Part, places: Position, devices: Devices) -> Sum:
    """One product, summed over what the result does not have."""
    more, bound, guard = reading.every(part.summed)
    here = {**places, **more}
    factors = [reading.at(i, here, devices) for i in part.operands]
    for i, operand in enumerate(reading.said.notation.operands):
        if operand.addresses is not None:  # 1 where it is the number of the row
            row = access("#", (reading.row(operand.addresses, here),))
            factors.append(of(Function("is row", (reading.at(i, here, devices), row))))
    inside = ALWAYS.union(*(reading.inside(i, here) for i in part.operands))
    total = reduce(mul, factors).under(inside).over(bound, guard).scaled(part.weight)
    if not part.averages:
        return total
    return total * average(reduce(mul, (reading.call.dims.size(reading.dims[name]) for name in part.summed)))
