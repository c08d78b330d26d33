"""A training step on axes that are all alike: variables and tables over counted layouts.

The variables are those of `exact/problem.py`: operators, parameters, and a hub for every tensor that several read.
A *link* is a tensor between two of them. Every link lines its axes up by itself, so the least sum is a bound from below
for whatever names the axes are given; on a graph without cycles some names reach it (`named_layouts.py`).

With the sum of a solution that is known, choices are left out that cannot be in a better one: those that take longer
than the least of their operator by more than that sum is above the least of all operators and parameters.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import inf

from conjoin.ops import TensorType
from conjoin.search.exact.choices import Choices
from conjoin.search.exact.counted.alignments import TooMany
from conjoin.search.exact.counted.layouts import codes_in
from conjoin.search.exact.counted.space import CountedSpace
from conjoin.search.exact.elimination import Solution, solve
from conjoin.search.exact.kinds import is_stored, kinds_of
from conjoin.search.exact.layout_codes import Codes
from conjoin.search.exact.reshard_seconds import Array
from conjoin.search.exact.space import Objective
from conjoin.search.exact.storage import Storages
from conjoin.search.exact.tables import Factor
from conjoin.sim import Skeleton

MAX_CHOICES = 480
"""Of an operator, beyond which tables of two of them take too long."""
MAX_ENTRIES = 1 << 25
"""Of the largest sum of tables that is gone through."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class End:
    """One end of a link: a tensor that an operator reads or makes, or all that a hub or a parameter is."""

    variable: int
    operand: int = -1
    output: int = -1


@dataclass(frozen=True, slots=True)
class Link:
    """A tensor between two variables."""

    source: End
    target: End
    type: TensorType
    back: bool
    """Whether a gradient comes back."""
    trained: bool | None = None
    """Of a parameter on its way to a reader; None for what operators make."""


class CountedProblem:
    """The variables and tables of a training step, for one objective."""

    def __init__(
        self,
        skeleton: Skeleton,
        space: CountedSpace,
        objective: Objective,
        upper: float = inf,
    ) -> None:
        """`upper` is the sum of some solution, or infinite; TooMany where there is too much to go through."""
        self.skeleton, self.space, self.objective = skeleton, space, objective
        self.num_operators, roots = len(skeleton.operators), skeleton.roots
        self.stored = [i for i, root in enumerate(roots) if root.leaf is not None and is_stored(root.leaf.kind)]
        self.hubs = [i for i, root in enumerate(roots) if root.maker >= 0 and len(skeleton.readers[i]) > 1]
        self.variable = {root: self.num_operators + n for n, root in enumerate([*self.stored, *self.hubs])}
        again = objective.recompute(skeleton)  # of which nothing is
        held = None if again is None else [modes[:1] for modes in again.held]
        kinds, storages = kinds_of(skeleton, held), [self.storages(root) for root in self.stored]
        least = sum(space.least(kind.task) for kind in kinds) + sum(float(s.seconds.min()) for s in storages)
        self.slack = upper - least + _ROUNDING * abs(upper) if upper < inf else inf
        self.choices: list[Choices] = [space.choices(kind, objective, self.slack) for kind in kinds]
        if max(map(len, self.choices), default=0) > MAX_CHOICES:
            raise TooMany
        self.names: list[Hashable] = [(kind, objective, self.slack) for kind in kinds]
        self.codes: dict[int, Codes] = {}
        """Of hubs and parameters."""
        self.sizes = [len(found) for found in self.choices]
        self.factors = [self._unary(position, found.seconds) for position, found in enumerate(self.choices)]
        self.links: list[Link] = []
        for root, found in zip(self.stored, storages, strict=True):
            self._store(root, found)
        for root in self.hubs:
            self._share(root)
        for root in range(len(roots)):
            if root not in self.variable and roots[root].maker >= 0 and skeleton.readers[root]:
                self._link(self._made(root), *self._read(root, 0), roots[root].type)
        self.factors += [self._factor(link) for link in self.links]

    def solve(self) -> Solution:
        """The least sum."""
        return solve(self.sizes, self.factors, self.space.tables, MAX_ENTRIES)

    def storages(self, root: int) -> Storages:
        """The ways to store a parameter."""
        leaf = self.skeleton.roots[root].leaf
        assert leaf is not None
        return self.space.storages(self.skeleton.roots[root].type, leaf.trainable, self.objective)

    def codes_at(self, end: End) -> Codes:
        """The layout of an end of a link for every value of its variable."""
        if end.operand >= 0:
            return self.choices[end.variable].operands[end.operand]
        return self.choices[end.variable].outputs[end.output] if end.output >= 0 else self.codes[end.variable]

    def _unary(self, variable: int, seconds: Array) -> Factor:
        return Factor((variable,), self.space.tables.named(("unary", self.names[variable]), seconds))

    def _made(self, root: int) -> End:
        maker = self.skeleton.roots[root].maker
        return End(maker, output=self.skeleton.operators[maker].makes.index(root))

    def _read(self, root: int, reader: int) -> tuple[End, bool]:
        position, operand = self.skeleton.readers[root][reader]
        return End(position, operand), operand in self.skeleton.operators[position].needs

    def _link(self, source: End, target: End, back: bool, type: TensorType, trained: bool | None = None) -> None:
        self.links.append(Link(source, target, type, back, trained))

    def _store(self, root: int, storages: Storages) -> None:
        type, leaf, variable = self.skeleton.roots[root].type, self.skeleton.roots[root].leaf, self.variable[root]
        assert leaf is not None
        self.codes[variable] = storages.codes
        self.sizes.append(len(storages.codes))
        self.names.append(("storing", type, leaf.trainable, self.objective))
        self.factors.append(self._unary(variable, storages.seconds))
        for reader in range(len(self.skeleton.readers[root])):
            self._link(End(variable), *self._read(root, reader), type, leaf.trainable)

    def _share(self, root: int) -> None:
        """The hub of a tensor: brought there once, and from there to everyone who reads it."""
        made, type, variable = self._made(root), self.skeleton.roots[root].type, self.variable[root]
        readers = [self._read(root, reader) for reader in range(len(self.skeleton.readers[root]))]
        codes = codes_in([self.codes_at(end) for end in (made, *(end for end, _ in readers))])
        self.codes[variable] = codes
        self.sizes.append(len(codes))
        self.names.append(("hub", type, codes.tobytes()))
        self._link(made, End(variable), any(back for _, back in readers), type)
        for end, back in readers:
            self._link(End(variable), end, back, type)

    def _factor(self, link: Link) -> Factor:
        source, target = link.source, link.target
        ends = [(self.names[end.variable], end.operand, end.output) for end in (source, target)]
        name = "link", *ends, link.type, link.back, link.trained
        table = self.space.tables.find(name)
        values = table.values if table is not None else self._values(link)
        return Factor((source.variable, target.variable), self.space.tables.named(name, values))

    def _values(self, link: Link) -> Array:
        columns = self.codes_at(link.target)
        if link.trained is not None:
            return self.space.reading((link.type, link.trained, link.back), self.objective, columns)
        return self.space.edge(link.type, link.back, self.codes_at(link.source), columns)
