"""From counted layouts to layouts of named axes.

Every variable has as many *positions* as there are axes, each with the rule or placement that its value gives it, and a
permutation says which axis stands at which position. Axes that split one dim nest in the order of their positions.

Variables are named one after the other along the heaviest links: the next one lines its axes up with a neighbour that
has names, as the link does best (`_line_up`). On a graph without cycles this reaches the counted sum. Where cycles
close, a variable cannot suit all its neighbours at once: axes change places, two at a time, as long as the sum over
the links of a variable falls (`_improve`), until nothing changes any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from conjoin.ir import LeafKind, choose
from conjoin.ops import Layout, Split, make_layout
from conjoin.search.exact.counted.alignments import Alignments, dual_placements
from conjoin.search.exact.counted.layouts import Digits, counted, placements_of
from conjoin.search.exact.counted.problem import CountedProblem, End, Link
from conjoin.search.exact.counted.space import placements_on
from conjoin.search.exact.elimination import Solution
from conjoin.search.exact.layout_codes import Codes, P, S, placement_of
from conjoin.search.exact.problem import given_layout, result_layouts
from conjoin.search.exact.reshard_seconds import Array, Bits, Nesting, common_first
from conjoin.search.exact.storage import Storages
from conjoin.sim import Layouts

_ROUNDS = 8
_ROUNDING = 1e-9

Order = tuple[int, ...]
"""The axis at every position."""


@dataclass(frozen=True, slots=True)
class Named:
    """A solution with names."""

    layouts: Layouts
    regathered: frozenset[str]
    total: float
    """The sum with these names: no less than the counted one."""


def name_axes(problem: CountedProblem, solution: Solution) -> Named:
    """Give the axes of a counted solution names."""
    naming = _Naming(problem, solution)
    naming.run()
    return naming.named()


class _Naming:
    """A solution that is given names."""

    def __init__(self, problem: CountedProblem, solution: Solution) -> None:
        self.problem, self.space, self.values = problem, problem.space, solution.values
        self.num_axes = problem.space.num_axes
        self.orders: dict[int, Order] = {}
        self.links: dict[int, list[int]] = {v: [] for v in range(len(problem.sizes))}
        for number, link in enumerate(problem.links):
            for variable in {link.source.variable, link.target.variable}:
                self.links[variable].append(number)
        self.placements = [
            tuple(self._placements(end, len(link.type.shape)) for end in (link.source, link.target))
            for link in problem.links
        ]
        linking = problem.factors[len(problem.factors) - len(problem.links) :]
        self.least = [float(f.table.values[tuple(self.values[v] for v in f.variables)]) for f in linking]
        self._known: dict[tuple[object, ...], float] = {}

    def run(self) -> None:
        """Name every variable, then look at all again until nothing changes."""
        for variable in range(len(self.problem.sizes)):
            if variable not in self.orders:
                self.orders[variable] = tuple(range(self.num_axes))
                self._spread()
        for _ in range(_ROUNDS):
            if not any([self._improve(variable) for variable in self.orders]):
                return

    def _spread(self) -> None:
        """From what has names to all that is connected with it, along the heaviest links first."""
        while waiting := [n for n, link in enumerate(self.problem.links) if self._is_open(link)]:
            number = max(waiting, key=lambda n: self.problem.links[n].type.bytes)
            link = self.problem.links[number]
            end = link.target if link.source.variable in self.orders else link.source
            self.orders[end.variable] = self._line_up(number, end is link.target)
            self._improve(end.variable)

    def _is_open(self, link: Link) -> bool:
        return (link.source.variable in self.orders) != (link.target.variable in self.orders)

    def _placements(self, end: End, rank: int) -> Digits:
        """[position]: the placement at one end of a link."""
        value = self.values[end.variable]
        if end.operand < 0 and end.output < 0:
            return placements_of(int(self.problem.codes[end.variable][value]), rank, self.num_axes)
        choices = self.problem.choices[end.variable]
        if end.operand >= 0:
            by_rule = placements_on([rule.operands for rule in choices.rules], end.operand)
        else:
            by_rule = placements_on([rule.outputs for rule in choices.rules], end.output)
        found: Digits = by_rule[choices.picks[value]]
        return found

    def _line_up(self, number: int, to_target: bool) -> Order:
        """The order in which one end of a link suits the other, which has names: by the link's best alignment."""
        link, (source, target) = self.problem.links[number], self.placements[number]
        aligned = self.space.aligned(len(link.type.shape), counted(source[None]), counted(target[None]))
        best = aligned.which[int(self._seconds(link, target, aligned).argmin())]
        cells = [
            (int(aligned.before[cell, best]), int(aligned.after[cell, best]), int(count))
            for cell, count in enumerate(aligned.counts[:, best])
        ]
        if to_target:
            return _matched(self.orders[link.source.variable], source.tolist(), target.tolist(), cells)
        turned = [(q, p, count) for p, q, count in cells]
        return _matched(self.orders[link.target.variable], target.tolist(), source.tolist(), turned)

    def _seconds(self, link: Link, target: Digits, aligned: Alignments) -> Array:
        """Of every alignment of a link's ends."""
        if link.trained is None:
            return self.space.seconds(aligned, link.type, link.back)
        variable = link.source.variable
        all_of_them = self.problem.storages(self._root(variable))
        at = slice(self.values[variable], self.values[variable] + 1)
        stored = Storages(
            all_of_them.codes[at], all_of_them.regathered[at], all_of_them.seconds[at]
        )
        use, held = (link.type, link.trained, link.back), self.space.held(link.type, counted(target[None]))
        return self.space.reading_seconds(aligned, use, self.problem.objective, stored, held)

    def _root(self, variable: int) -> int:
        return next(root for root, v in self.problem.variable.items() if v == variable)

    def _improve(self, variable: int) -> bool:
        """Let two axes change places as long as that helps; whether it did."""
        links = [n for n in self.links[variable] if self._has_names(self.problem.links[n])]
        now, changed = sum(self._price(n) for n in links), False
        floor = sum(self.least[n] for n in links)
        while now > floor * (1 + _ROUNDING):
            before = self.orders[variable]
            tried = [_swapped(before, a, b) for a, b in combinations(range(self.num_axes), 2)]
            totals = sum((self._prices(n, variable, tried) for n in links), np.zeros(len(tried)))
            best = int(totals.argmin()) if len(tried) else 0
            if not len(tried) or totals[best] >= now * (1 - _ROUNDING):
                break
            self.orders[variable], now, changed = tried[best], float(totals[best]), True
        return changed

    def _has_names(self, link: Link) -> bool:
        return link.source.variable in self.orders and link.target.variable in self.orders

    def _price(self, number: int) -> float:
        """Seconds of a link with the names that its ends have."""
        link = self.problem.links[number]
        source, target = (self.orders[end.variable] for end in (link.source, link.target))
        ends = self.placements[number]
        stored = self.values[link.source.variable] if link.trained is not None else -1
        key = link.type, link.back, link.trained, ends[0].tobytes(), ends[1].tobytes(), source, target, stored
        if key not in self._known:
            self._known[key] = float(self._prices(number, link.source.variable, [source])[0])
        return self._known[key]

    def _prices(self, number: int, variable: int, orders: Sequence[Order]) -> Array:
        """Seconds of a link with each of some orders of one of its ends."""
        link, ends = self.problem.links[number], self.placements[number]
        orders_of = [
            np.array(orders if end.variable == variable else [self.orders[end.variable]] * len(orders), np.int64)
            for end in (link.source, link.target)
        ]
        positions = [np.argsort(order, axis=1).T for order in orders_of]
        before, after = (end[position] for end, position in zip(ends, positions, strict=True))
        nestings: tuple[Nesting, Nesting] = (common_first, common_first)
        if link.trained is None:  # parameters nest as their readers like it
            there = _Orders(positions[0], positions[1], before, after)
            back = _Orders(positions[1], positions[0], dual_placements(after), dual_placements(before))
            nestings = there.common, back.common
        ones, each = np.ones_like(before), np.arange(len(orders))
        rank, size = len(link.type.shape), self.space.size
        pairs, share = np.zeros(len(orders), np.intp), np.ones(len(orders))
        aligned = Alignments(rank, size, before, after, ones, each, share, pairs, (1, 1), nestings)
        return self._seconds(link, ends[1], aligned)

    def named(self) -> Named:
        """The layouts with these names, and their sum."""
        problem, skeleton, names = self.problem, self.problem.skeleton, self.space.mesh.names
        choices = []
        for position, found in enumerate(problem.choices):
            picks = zip(self.orders[position], found.picks[self.values[position]], strict=True)
            choices.append(choose({names[axis]: found.rules[int(pick)] for axis, pick in picks}))
        leaves: dict[int, Layout] = {}
        regathered: set[str] = set()
        for number, root in enumerate(skeleton.roots):
            if root.leaf is None:
                continue
            wanted = [choices[position].operands[operand] for position, operand in skeleton.readers[number]]
            if number not in problem.variable:
                leaves[number] = given_layout(wanted) if root.leaf.kind is LeafKind.INPUT else ()
                continue
            leaves[number] = self._stored(number, wanted)
            if problem.storages(number).regathered[self.values[problem.variable[number]]]:
                regathered.add(root.leaf.name)
        own = problem.factors[: len(problem.factors) - len(problem.links)]
        total = sum(float(factor.table.values[self.values[factor.variables[0]]]) for factor in own)
        total += sum(self._price(number) for number in range(len(problem.links)))
        layouts = Layouts(leaves, tuple(choices), result_layouts(skeleton, choices))
        return Named(layouts, frozenset(regathered), total)

    def _stored(self, root: int, wanted: Sequence[Layout]) -> Layout:
        """The layout of a parameter: what its first reader splits too nests as it does there."""
        variable, names = self.problem.variable[root], self.space.mesh.names
        rank = len(self.problem.skeleton.roots[root].type.shape)
        placements = placements_of(int(self.problem.codes[variable][self.values[variable]]), rank, self.num_axes)
        first = [axis for layout in wanted[:1] for axis, placement in layout if isinstance(placement, Split)]
        entries = [
            (names[axis], placement_of(int(p))) for axis, p in zip(self.orders[variable], placements, strict=True)
        ]
        return make_layout(sorted(entries, key=lambda e: first.index(e[0]) if e[0] in first else len(first)))


@dataclass(frozen=True, slots=True, eq=False)
class _Orders:
    """Where axes stand, [axis, ...], in what comes before and after, and their placements there."""

    before: Digits
    after: Digits
    source: Digits
    target: Digits

    def common(self, source: Codes, wanted: Codes, rank: int) -> Bits:
        """[axis, ...]: the beginning that the axes of a dim have in common; what is padded comes last."""
        padded = (self.source >= S) & (self.target == P)
        later = np.where(padded, self.before + len(self.before), self.after)
        found = np.zeros(source.shape, bool)
        for dim in range(S, S + rank):
            before, after = source == dim, wanted == dim
            here, there = _ranks(before, self.before), _ranks(after, later)
            same = before & after & (here == there)
            end = np.where(before & ~same, here, len(self.before)).min(axis=0)
            found |= same & (here < end)
        return found


def _ranks(splitting: Bits, positions: Digits) -> Digits:
    """[axis, ...]: how many axes that split the dim stand before this one."""
    found: Digits = ((positions[:, None] > positions[None]) & splitting[None]).sum(axis=1)
    return found


def _swapped(order: Order, a: int, b: int) -> Order:
    found = list(order)
    found[a], found[b] = found[b], found[a]
    return tuple(found)


def _matched(order: Order, here: Sequence[int], there: Sequence[int], cells: Sequence[tuple[int, int, int]]) -> Order:
    """An order for placements `there`, given one for placements `here` and how many change from each to each.

    All others keep theirs; what keeps splitting a dim does so from the outermost on, in the same order.

    >>> _matched((2, 0, 1), (3, 3, 0), (1, 3, 3), [(3, 1, 1), (0, 3, 1)])
    (0, 2, 1)
    """
    axes: dict[int, list[int]] = {}
    for axis, placement in zip(order, here, strict=True):
        axes.setdefault(placement, []).append(axis)
    positions: dict[int, list[int]] = {}
    for position, placement in enumerate(there):
        positions.setdefault(placement, []).append(position)
    leaving = Counter[int]()
    for p, _, count in cells:
        leaving[p] += count
    kept = [(p, p, len(found) - leaving[p]) for p, found in axes.items()]
    found = [0] * len(order)
    for p, q, count in (*kept, *cells):
        for _ in range(count):
            found[positions[q].pop(0)] = axes[p].pop(0)
    return tuple(found)
