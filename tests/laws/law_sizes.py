"""Compare both sides of a rule at given sizes by symbolic execution, as TASO checks its laws (section 2.4).

Every element of both sides becomes a polynomial of elements of the inputs; functions such as relu are not interpreted.
Two polynomials are equal when they have the same monomials with the same coefficients: nothing is rounded, and nothing
is shared with the proofs for all sizes but the definitions of the operators.

A polynomial of many elements is kept as arrays, one row for each monomial of each element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from conjoin.rules.definitions.affine import Affine, symbol
from conjoin.rules.definitions.calls import positions
from conjoin.rules.definitions.dims import Dim
from conjoin.rules.definitions.proof import Frame
from conjoin.rules.definitions.sums import Access, Atom, Factor, Function, Guard, Largest, Size, Sum, Term
from conjoin.rules.parameters import names_in
from conjoin.rules.patterns import Input, Rule

_Numbers = npt.NDArray[np.int64]
Cases = dict[str, _Numbers]
"""For every unknown size and parameter its value in each case; "" is 0 in all of them."""
Shapes = dict[str, tuple[int, ...]]
_BITS, _MOST_INDICES = 6, 8
"""An element of an input is one number: its indices are packed, each below 64."""
_INVENTED = 1 << 62
"""Marks what is no element of an input: values of functions."""
_BATCH = 200
"""Sizes compared at once; a few hundred MB at most."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Monomials of one degree: numerator / denominator times the product of `factors`, added to an element."""

    element: _Numbers
    factors: _Numbers
    numerators: _Numbers
    denominators: _Numbers


@dataclass(frozen=True, slots=True)
class _Places:
    """Values of indices, one row for each choice of them."""

    sizes: Mapping[str, _Numbers]
    """Each size in every case."""
    case: _Numbers
    """Which case a row belongs to."""
    element: _Numbers
    """Which element of the result a row belongs to."""
    indices: Mapping[str, _Numbers]

    def number(self, expr: Affine) -> _Numbers:
        """The value of an expression in every row."""
        total = _in_cases(Affine(tuple(t for t in expr.terms if self.sizes.keys() >= set(t[0]))), self.sizes)[self.case]
        for monomial, c in expr.terms:
            if not self.sizes.keys() >= set(monomial):
                part = np.full(len(self.case), c)
                for name in monomial:
                    part = part * (self.indices[name] if name in self.indices else self.sizes[name][self.case])
                total = total + part
        return total

    def where(self, kept: npt.NDArray[np.bool_]) -> _Places:
        """Some of the rows."""
        if kept.all():
            return self
        indices = {name: values[kept] for name, values in self.indices.items()}
        return replace(self, case=self.case[kept], element=self.element[kept], indices=indices)

    def numbered(self) -> _Places:
        """Every row as an element of its own."""
        return replace(self, element=np.arange(len(self.case)))

    def expanded(self, bound: tuple[str, ...], guard: Guard) -> _Places:
        """Every choice of more indices under a guard."""
        pending, now = set(guard), self
        for name in (None, *bound):
            if name is not None:
                now = now._with_index(name, guard)
            known = now.sizes.keys() | now.indices.keys()
            for atom in [atom for atom in pending if atom.expr.symbols <= known]:
                pending.remove(atom)
                found = now.number(atom.expr)
                now = now.where(found == 0 if atom.exact else found >= 0)
        assert not pending, pending
        return now

    def _with_index(self, name: str, guard: Guard) -> _Places:
        low, high = self._range(name, guard)
        widths = np.maximum(high - low, 0)[self.case]
        starts = np.repeat(np.cumsum(widths) - widths, widths)
        indices = {n: np.repeat(values, widths) for n, values in self.indices.items()}
        case = np.repeat(self.case, widths)
        indices[name] = np.arange(len(case)) - starts + low[case]
        return replace(self, case=case, element=np.repeat(self.element, widths), indices=indices)

    def _range(self, name: str, guard: Guard) -> tuple[_Numbers, _Numbers]:
        """Where an index runs in every case, from the conditions about it and sizes alone."""
        lows, highs = [], []
        for atom in guard:
            c = atom.expr.coefficient(name)
            if c in (1, -1) and atom.expr.symbols <= self.sizes.keys() | {name}:
                rest = _in_cases(atom.expr - symbol(name) * c, self.sizes)
                if atom.exact or c == 1:
                    lows.append(-rest * c)
                if atom.exact or c == -1:
                    highs.append(1 - rest * c)
        return np.max(lows, axis=0), np.min(highs, axis=0)


@dataclass(slots=True)
class SmallSizes:
    """A rule, ready to be compared at sizes."""

    rule: Rule
    frame: Frame = field(init=False)
    sides: list[tuple[Sum, Sum, Guard]] = field(init=False)

    def __post_init__(self) -> None:
        self.frame = Frame(self.rule)
        self.frame.build()
        self.sides = [self._output(i) for i in range(len(self.rule.left))]

    def _output(self, number: int) -> tuple[Sum, Sum, Guard]:
        """Both sides of an output at an unknown position, and where positions run."""
        left, right = self.frame.tensors[self.rule.left[number]], self.frame.tensors[self.rule.right[number]]
        found = [positions(self.frame.dims, dim, "o") for dim in left.dims]
        index = tuple(digits for digits, _ in found)
        where = frozenset[Atom]().union(*(guard for _, guard in found))
        devices = {axis: symbol(f"at_{axis}") for axis in self.frame.devices[self.rule.left[number]]}
        for axis, device in devices.items():
            where |= {Atom(device), Atom(self.frame.dims.size(self.frame.named[axis]) - device - 1)}
        return left.at(index, devices), right.at(index, devices), where

    def all(self, most: int) -> Cases:
        """All sizes of inputs and values of parameters up to one, smaller ones first."""
        dims = {dim.find() for dim in self.frame.dims.every}
        halves = {dim.half.find() for dim in dims if dim.half is not None}
        ranges = {dim.name: range(0 if dim in halves else 1, most + 1) for dim in dims if dim.is_plain}
        for name, kind in names_in(*self.rule.outputs).items():
            if kind in ("stride", "pad"):
                ranges[name] = range(int(kind == "stride"), most + int(kind == "stride"))
        bounds = [self.frame.dims.size(dim) for dim in (*self._made_up(), *self.frame.named.values())]
        cases = self._fitting(_choices(ranges, bounds, most))
        order = np.argsort(np.sum([cases[name] for name in ranges], axis=0), kind="stable")
        return {name: values[order] for name, values in cases.items()}

    def _made_up(self) -> list[Dim]:
        """The dims of inputs and constants."""
        made = (t for e, t in self.frame.tensors.items() if isinstance(e, Input) or not e.args)
        return [dim for tensor in made for dim in tensor.dims]

    def _fitting(self, cases: Cases) -> Cases:
        """The cases in which shapes fit together, with their numbers of windows."""
        dims = self.frame.dims
        for dim in dims.every:
            if dim.parent is None and dim.window is not None:
                whole, kernel, stride, padding = dim.window
                length = _in_cases(dims.size(whole) + 2 * padding, cases)
                length -= 1 if kernel is None else _in_cases(dims.size(kernel), cases)
                cases = {**cases, dim.name: length // _in_cases(stride, cases) + 1}
                cases = _chosen(cases, length >= 0)
        for one, other in dims.equations:
            cases = _chosen(cases, _in_cases(dims.size(one) - dims.size(other), cases) == 0)
        for small, large in dims.not_larger:
            cases = _chosen(cases, _in_cases(dims.size(large) - dims.size(small), cases) >= 0)
        return cases

    def shapes(self, cases: Cases, number: int) -> Shapes:
        """A case as a reader wants it: the shapes of inputs and constants on one device, and parameters."""
        sizes = {name: int(values[number]) for name, values in cases.items()}
        size = self.frame.dims.size
        made = [(e, t) for e, t in self.frame.tensors.items() if isinstance(e, Input) or not e.args]
        found = {str(e): tuple(size(dim).value(sizes) for dim in t.dims) for e, t in made}
        found |= {name: (size(dim).value(sizes),) for name, dim in self.frame.named.items()}
        return found | {name: (sizes[name],) for name in names_in(*self.rule.outputs) if name in sizes}

    def different(self, cases: Cases) -> int | None:
        """The first case in which an element of one side is not the same polynomial as on the other."""
        for start in range(0, _count(cases), _BATCH):
            part = {name: values[start : start + _BATCH] for name, values in cases.items()}
            found = [self._different(*side, part) for side in self.sides]
            if any(number is not None for number in found):
                return start + min(number for number in found if number is not None)
        return None

    def _different(self, left: Sum, right: Sum, where: Guard, cases: Cases) -> int | None:
        unknown = {name for atom in where for name in atom.expr.symbols} - cases.keys()
        start = _Places(cases, np.arange(_count(cases)), np.arange(_count(cases)), {})
        places = start.expanded(tuple(sorted(unknown)), where).numbered()
        run = _Run()
        blocks = [*run.blocks(left, places), *run.blocks(right.scaled(-1), places)]
        wrong = [int(places.case[element].min()) for element, _, _ in _collected(blocks) if len(element)]
        return min(wrong, default=None)


def _choices(ranges: Mapping[str, range], bounds: Sequence[Affine], most: int) -> Cases:
    """All values in ranges for which no bound is more than the most."""
    cases: Cases = {"": np.zeros(1, np.int64)}
    pending = [bound for bound in bounds if bound.symbols <= ranges.keys()]
    for name in sorted(ranges):
        values, count = np.array(ranges[name]), _count(cases)
        cases = {known: np.repeat(column, len(values)) for known, column in cases.items()}
        cases[name] = np.tile(values, count)
        for bound in [bound for bound in pending if bound.symbols <= cases.keys()]:
            pending.remove(bound)
            cases = _chosen(cases, _in_cases(bound, cases) <= most)
    return cases


def _count(cases: Cases) -> int:
    return len(cases[""])


def _chosen(cases: Cases, kept: npt.NDArray[np.bool_]) -> Cases:
    return {name: values[kept] for name, values in cases.items()}


def _in_cases(expr: Affine, cases: Mapping[str, _Numbers]) -> _Numbers:
    """The value of an expression of sizes alone in every case."""
    total = np.zeros(len(cases[""]), np.int64)
    for monomial, c in expr.terms:
        part = np.full(len(total), c)
        for name in monomial:
            part *= cases[name]
        total += part
    return total


@dataclass(slots=True)
class _Run:
    """One comparison; values that are no elements of inputs get numbers as they are met."""

    invented: dict[object, int] = field(default_factory=dict)
    tensors: dict[str, int] = field(default_factory=dict)

    def blocks(self, value: Sum, places: _Places) -> list[_Block]:
        """The monomials of a sum in all places, each an element."""
        return [self._block(term, places) for term in value.terms]

    def _block(self, term: Term, places: _Places) -> _Block:
        inner = places.expanded(term.bound, term.guard)
        rows = inner.numbered()
        columns = [self._factor(factor, rows) for factor in term.factors if not isinstance(factor, Size)]
        factors = np.sort(np.stack(columns, 1), axis=1) if columns else np.empty((len(inner.case), 0), np.int64)
        numerators = np.full(len(inner.case), term.coefficient.numerator)
        denominators = np.full(len(inner.case), term.coefficient.denominator)
        for factor in term.factors:
            if isinstance(factor, Size) and factor.inverse:
                denominators *= inner.number(factor.size)
            elif isinstance(factor, Size):
                numerators *= inner.number(factor.size)
        return _Block(inner.element, factors, numerators, denominators)

    def _factor(self, factor: Factor, places: _Places) -> _Numbers:
        """A number for a factor in every place."""
        match factor:
            case Access(tensor, indices):
                return self._access(tensor, indices, places)
            case Function(name, args):
                rows = np.stack([self._identify(arg, places) for arg in args], 1)
                return np.array([self._invent((name, row.tobytes())) for row in rows], np.int64)
            case Largest(bound, guard, arg):
                inner = places.expanded(bound, guard)
                pairs = np.unique(np.stack([inner.element, self._identify(arg, inner.numbered())], 1), axis=0)
                ends = np.searchsorted(pairs[:, 0], np.arange(len(places.case) + 1))
                sets = [pairs[ends[i] : ends[i + 1], 1].tobytes() for i in range(len(places.case))]
                return np.array([self._invent(("largest", found)) for found in sets], np.int64)
            case _:
                raise AssertionError(f"{factor} is a number")

    def _access(self, tensor: str, indices: tuple[Affine | Access, ...], places: _Places) -> _Numbers:
        packed = np.full(len(places.case), self.tensors.setdefault(tensor, len(self.tensors)) + 1)
        for index in indices:
            assert isinstance(index, Affine)
            values = places.number(index)
            assert not len(values) or 0 <= values.min() <= values.max() < 2**_BITS
            packed = (packed << _BITS) + values
        assert len(indices) <= _MOST_INDICES
        return packed << _BITS * (_MOST_INDICES - len(indices))

    def _invent(self, value: object) -> int:
        return _INVENTED | self.invented.setdefault(value, len(self.invented))

    def _identify(self, value: Sum, places: _Places) -> _Numbers:
        """A number for each element, the same for the same polynomials."""
        count = len(places.case)
        parts: list[list[bytes]] = [[] for _ in range(count)]
        for element, factors, coefficients in _collected(self.blocks(value, places)):
            rows = np.column_stack([np.full(len(element), factors.shape[1]), factors, coefficients])
            ends = np.searchsorted(element, np.arange(count + 1))
            for i in np.unique(element):
                parts[i].append(rows[ends[i] : ends[i + 1]].tobytes())
        return np.array([self._invent(("sum", *part)) for part in parts], np.int64)


def _collected(blocks: Sequence[_Block]) -> Iterator[tuple[_Numbers, _Numbers, _Numbers]]:
    """By degree: elements, factors and coefficients (numerator and denominator) that are not 0, sorted."""
    for degree in sorted({block.factors.shape[1] for block in blocks}):
        alike = [block for block in blocks if block.factors.shape[1] == degree and len(block.element)]
        if not alike:
            continue
        denominators = np.concatenate([b.denominators for b in alike])
        common = np.lcm.reduce(np.unique(denominators))
        numbers = np.concatenate([b.numerators for b in alike]) * (common // denominators)
        table = np.concatenate([np.column_stack([b.element, b.factors]) for b in alike])
        order = np.lexsort(table.T[::-1])
        table, numbers = table[order], numbers[order]
        starts = np.flatnonzero(np.concatenate([[True], (table[1:] != table[:-1]).any(axis=1)]))
        totals = np.add.reduceat(numbers, starts)
        kept = totals != 0
        shared = np.gcd(totals[kept], common)
        yield (
            table[starts[kept], 0],
            table[starts[kept], 1:],
            np.column_stack([totals[kept] // shared, common // shared]),
        )
