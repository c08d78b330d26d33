"""A problem with a stack of equal blocks: its tables are made for few of them, and the others are a min-plus power.

Variables and tables are those of the short graph (`fold.py`), in which blocks 0 and 1 of the stack are left, and the
last two. With S_b for what of block b the next one sees, and G for what all blocks see of before the stack, the tables
of a block from S_b-1 on are contracted to

    T[S_b-1, S_b, G] = min over the rest of the block of the sum of its tables

once, and the whole problem is the short one with as many of them one after the other as there are blocks between.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

from conjoin.ir import Leaf, Segment
from conjoin.search.exact.elimination import Contracted, Solution, contract, solve
from conjoin.search.exact.elimination_order import find_order
from conjoin.search.exact.problem import Problem, StoredAs, lay_out
from conjoin.search.exact.space import Objective, Space
from conjoin.search.exact.tables import Factor
from conjoin.search.fold import FIRST, LAST, Fold, fold
from conjoin.sim import Layouts, Skeleton

_BEFORE, _AFTER = FIRST - 1, FIRST
"""The blocks of the short graph on the two sides of what it leaves out."""
_OUTSIDE = -1


class Uneven(Exception):
    """The blocks of a stack do not have the same tables, or see more of each other than the one before."""


class StackProblem:
    """The variables and tables of a training step with a stack of equal blocks."""

    def __init__(self, skeleton: Skeleton, fold: Fold, space: Space, objective: Objective) -> None:
        """Uneven where blocks are not told by one of them."""
        self.skeleton, self._fold = skeleton, fold
        self._every = objective.recompute(skeleton)
        left = None if self._every is None else _blocks_left(fold, self._every.blocks)
        self.short = Problem(fold.skeleton, space, replace(objective, blocks=left))
        self._length = fold.stretch.length
        self._block = self._find_blocks()
        self._next = self._find_next()
        inner: list[Factor] = []
        self._rest: list[Factor] = []
        crossing: set[int] = set()
        for factor in self.short.factors:
            blocks = {self._block[v] for v in factor.variables}
            if _AFTER in blocks and blocks <= {_AFTER, _BEFORE, _OUTSIDE}:
                inner.append(factor)
            elif len(blocks - {_OUTSIDE}) > 1 and blocks not in ({0, 1}, {_AFTER, FIRST + LAST - 1}):
                raise Uneven
            else:
                self._rest.append(factor)
            if blocks == {_AFTER, FIRST + LAST - 1}:
                crossing |= {v for v in factor.variables if self._block[v] == _AFTER}
        self._seen = sorted({v for f in inner for v in f.variables if self._block[v] == _BEFORE})
        ends = [self._next[v] for v in self._seen]
        around = {v for f in inner for v in f.variables if self._block[v] == _OUTSIDE}
        if not crossing <= set(ends):
            raise Uneven
        self._check_alike(inner)
        found = contract(self.short.sizes, inner, {*self._seen, *ends, *around}, space.tables)
        if found is None:
            raise Uneven
        self._segment: Contracted = found
        self._ends, self._around = ends, sorted(around)
        self._sizes, self._factors = self._find_whole()
        scopes = [factor.variables for factor in self._factors]
        if not all(1 <= len(scope) <= 2 for scope in scopes) and find_order(self._sizes, scopes).num_wide:
            raise Uneven  # what is large is first made smaller, which is done for tables of two variables

    def _find_blocks(self) -> list[int]:
        """For every variable of the short problem the block it belongs to."""
        skeleton, stretch, count = self.short.skeleton, self._fold.stretch, FIRST + LAST

        def block_at(place: int) -> int:
            block = (place - stretch.start) // self._length
            return block if place >= stretch.start and block < count else _OUTSIDE

        blocks = [block_at(place) for place in range(self.short.num_operators)]
        for root in self.short.stored:
            readers = {block_at(place) for place, _ in skeleton.readers[root]}
            if len(readers) > 1 and readers != {_OUTSIDE}:
                raise Uneven
            blocks.append(readers.pop() if readers else _OUTSIDE)
        blocks += [block_at(skeleton.roots[root].maker) for root in (*self.short.hubs, *self.short.arrivals)]
        if self.short.recompute is not None:
            blocks += [block_at(segment[0]) for segment in self.short.recompute.blocks]
        return blocks

    @cached_property
    def _modes(self) -> dict[int, int]:
        """By the first operator of a block that may be run again, the variable of what of it is."""
        recompute = self.short.recompute
        return {recompute.blocks[i][0]: variable for i, variable in self.short.modes.items()} if recompute else {}

    def _find_next(self) -> dict[int, int]:
        """For every variable of the block before what is left out that of the block after it."""
        skeleton, variable = self.short.skeleton, self.short.variable
        found = {v: v + self._length for v in range(self.short.num_operators) if self._block[v] == _BEFORE}
        numbers = {leaf: i for i, leaf in enumerate(skeleton.graph.leaves)}
        for after, before in self._fold.middle[1]:
            if numbers[before] in variable:
                found[variable[numbers[before]]] = variable[numbers[after]]
        for place, variable_of in self._modes.items():
            if self._block[variable_of] == _BEFORE:
                if place + self._length not in self._modes:
                    raise Uneven
                found[variable_of] = self._modes[place + self._length]
        for root in self.short.hubs:
            maker = skeleton.roots[root].maker
            if self._block[maker] == _BEFORE:
                output = skeleton.operators[maker].makes.index(root)
                found[variable[root]] = variable[skeleton.operators[maker + self._length].makes[output]]
        return found

    def _check_alike(self, inner: Sequence[Factor]) -> None:
        """Uneven where the blocks on the two sides do not have the same tables."""
        mine: dict[Hashable, int] = {}
        for factor in self.short.factors:
            blocks = {self._block[v] for v in factor.variables}
            if blocks <= {_BEFORE, _OUTSIDE} and _BEFORE in blocks:
                key = tuple(self._next.get(v, v) for v in factor.variables), factor.table.number
                mine[key] = mine.get(key, 0) + 1
        for factor in inner:
            if all(self._block[v] != _BEFORE for v in factor.variables):
                key = factor.variables, factor.table.number
                mine[key] = mine.get(key, 0) - 1
        if any(mine.values()):
            raise Uneven

    @cached_property
    def _copies(self) -> list[list[int]]:
        """What blocks 1 and on show to the next one, as variables: first those of the short problem."""
        num_between = self._fold.stretch.count - FIRST - LAST
        size, width = len(self.short.sizes), len(self._seen)
        between = [[size + i * width + k for k in range(width)] for i in range(num_between)]
        return [self._seen, *between, self._ends]

    def _find_whole(self) -> tuple[list[int], list[Factor]]:
        """Variables and tables of the whole problem: those of the short one, then what the other blocks show."""
        copies = self._copies
        sizes = [*self.short.sizes, *(self.short.sizes[v] for _ in copies[1:-1] for v in self._seen)]
        factors = list(self._rest)
        for one, other in pairwise(copies):
            names = dict(zip((*self._seen, *self._ends), (*one, *other), strict=True))
            factors += [
                Factor(tuple(names.get(v, v) for v in factor.variables), factor.table)
                for factor in self._segment.factors
            ]
        return sizes, factors

    def solve(self) -> Solution:
        """The least sum; values are of the variables of the short problem, then of what the other blocks show."""
        return solve(self._sizes, self._factors, self.short.space.tables)

    def layouts(self, solution: Solution) -> tuple[Layouts, frozenset[str]]:
        """The layouts of a solution, and the parameters that are gathered again for the backward pass."""
        stretch, fold, short = self._fold.stretch, self._fold, self.short
        blocks = self._values_by_block(solution)
        choices = []
        for place in range(len(self.skeleton.operators)):
            block = (place - stretch.start) // self._length if place >= stretch.start else _OUTSIDE
            if block in blocks:
                at = stretch.seam + (place - stretch.start) % self._length
                choices.append(short.choice(at, blocks[block][at]))
            else:
                at = fold.place(place)
                choices.append(short.choice(at, solution.values[at]))
        stored: dict[int, StoredAs] = {}
        numbers = {leaf: i for i, leaf in enumerate(short.skeleton.graph.leaves)}
        owners = self._owned
        for root, leaf in enumerate(self.skeleton.graph.leaves):
            one, block = owners.get(leaf, (leaf, _OUTSIDE))
            number = numbers[one]
            if number in short.variable:
                values: Mapping[int, int] | Sequence[int] = blocks.get(block, solution.values)
                stored[root] = short.stored_as(number, values[short.variable[number]])
        places = {leaf: i for i, leaf in enumerate(self.skeleton.graph.leaves)}
        given = {places[short.skeleton.graph.leaves[i]]: x for i, x in short.arriving(solution.values).items()}
        return lay_out(self.skeleton, short.space.units, choices, stored, given, short.objective.is_stage)

    def segments(self, solution: Solution) -> tuple[Segment, ...]:
        """What a solution runs again in the backward pass."""
        every = self._every
        if every is None:
            return ()
        stretch, blocks, found = self._fold.stretch, self._values_by_block(solution), list[Segment]()
        for (first, _), modes in zip(every.blocks, every.modes, strict=True):
            block = (first - stretch.start) // self._length if first >= stretch.start else _OUTSIDE
            if block in blocks:
                value = blocks[block][self._modes[stretch.seam + (first - stretch.start) % self._length]]
            else:
                value = solution.values[self._modes[self._fold.place(first)]]
            found += modes[value]
        return tuple(found)

    @cached_property
    def _owned(self) -> dict[Leaf, tuple[Leaf, int]]:
        """For leaves of the blocks that one stands for: that of the block after what is left out, and their block."""
        found: dict[Leaf, tuple[Leaf, int]] = {}
        last = self._fold.stretch.count - LAST
        for leaf, _ in self._fold.middle[1]:
            one = leaf
            for block in range(last, FIRST - 2, -1):
                found[one] = leaf, block
                one = self._fold.leaf_before.get(one, one)
        return found

    def _values_by_block(self, solution: Solution) -> dict[int, dict[int, int]]:
        """For blocks 1 to the last but one the values of the variables, named as those of the block after the cut."""
        back = {after: before for before, after in self._next.items()}
        found = {_BEFORE: {after: solution.values[before] for after, before in back.items()}}
        made: dict[tuple[int, ...], dict[int, int]] = {}
        names = (*self._seen, *self._ends, *self._around)
        for i, (one, other) in enumerate(pairwise(self._copies)):
            key = tuple(solution.values[v] for v in (*one, *other, *self._around))
            if key not in made:
                made[key] = self._segment.restore(dict(zip(names, key, strict=True)))
            found[_BEFORE + 1 + i] = made[key]
        return found


def _blocks_left(fold: Fold, blocks: Sequence[Segment]) -> tuple[Segment, ...]:
    """The blocks of the short graph: what one that begins before the seam has behind it, the one behind it has too."""
    seam, dropped = fold.stretch.seam, fold.stretch.num_dropped
    before = [Segment(first, last) for first, last in blocks if first < seam]
    after = [Segment(first - dropped, last - dropped) for first, last in blocks if first >= seam + dropped]
    return (*before, *after)


def folded_problem(skeleton: Skeleton, space: Space, objective: Objective) -> Problem | StackProblem:
    """The tables of a training step, with blocks that are equal worked out once where it has a stack of them."""
    found = fold(skeleton.graph)
    if found is not None and len(skeleton.operators) == len(skeleton.graph.nodes):
        with suppress(Uneven):
            return StackProblem(skeleton, found, space, objective)
    return Problem(skeleton, space, objective)
