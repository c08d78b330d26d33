"""What the tables say of given layouts: the sum that elimination would minimise, for a plan that came from anywhere."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from conjoin.ir import Choice, Segment
from conjoin.ops import placement_on
from conjoin.search.exact.choices import Choices
from conjoin.search.exact.kinds import Kind, is_shared, is_stored, kinds_of
from conjoin.search.exact.layout_codes import code_on
from conjoin.search.exact.recompute import Held, Recompute
from conjoin.search.exact.shared_parameters import MANY
from conjoin.search.exact.space import Objective, Space
from conjoin.search.exact.units import Units
from conjoin.sim import Layouts, Skeleton


class _NotThere(Exception):
    """The tables do not have these layouts."""


def sum_of(
    skeleton: Skeleton,
    space: Space,
    objective: Objective,
    layouts: Layouts,
    regathered: Collection[str] = (),
    segments: Sequence[Segment] = (),
) -> float | None:
    """The sum of all tables at some layouts; None where the units cannot tell them, or the tables leave them out."""
    try:
        held = _held(objective.recompute(skeleton), segments)
        return _Sum(skeleton, space, objective, layouts, regathered, held).total()
    except _NotThere:
        return None


def _held(recompute: Recompute | None, segments: Sequence[Segment]) -> list[tuple[Held, ...]] | None:
    """What operators hold where some segments are run again."""
    if recompute is None:
        return None
    modes = [recompute.mode_of(block, frozenset(segments)) for block in range(len(recompute.blocks))]
    told = sum(len(recompute.modes[block][mode]) for block, mode in enumerate(modes) if mode is not None)
    if None in modes or told != len(segments):
        raise _NotThere
    chosen = ((held, recompute.block_of.get(place)) for place, held in enumerate(recompute.held))
    return [held if block is None else (held[modes[block] or 0],) for held, block in chosen]


@dataclass
class _Sum:
    """A sum under way."""

    skeleton: Skeleton
    space: Space
    objective: Objective
    layouts: Layouts
    regathered: Collection[str]
    held: Sequence[tuple[Held, ...]] | None
    _read: dict[tuple[int, int], int] = field(default_factory=dict)
    """The layout in which an operator reads an operand, by its number."""
    _made: dict[int, int] = field(default_factory=dict)

    def total(self) -> float:
        """Operators, then what is stored, then what is passed on."""
        kinds = kinds_of(self.skeleton, self.held, is_stage=self.objective.is_stage)
        seconds = sum(self._operator(position, kind) for position, kind in enumerate(kinds))
        for number, root in enumerate(self.skeleton.roots):
            if root.maker >= 0:
                seconds += self._passing(number)
            elif root.leaf is not None and is_stored(root.leaf.kind):
                seconds += self._storing(number)
        return seconds

    def _operator(self, position: int, kind: Kind) -> float:
        found = self._choice(kind, self.layouts.choices[position])
        for operand, codes in enumerate(found.operands):
            self._read[position, operand] = int(codes[0])
        for root, codes in zip(self.skeleton.operators[position].makes, found.outputs, strict=True):
            self._made[root] = int(codes[0])
        return float(found.seconds[0] + self.space.alone(kind, found, self.objective)[0])

    def _choice(self, kind: Kind, choice: Choice) -> Choices:
        """A choice as the tables have it; rules that seldom pay are looked at last."""
        for every_rule in (False, True):
            choices = self.space.choices(kind.task, every_rule)
            row = _row(choices, choice, self.space.units)
            if row is not None:
                return choices.only(np.array([row]))
        raise _NotThere

    def _passing(self, root: int) -> float:
        """Reshards of what an operator makes; where several read it, by way of the layout that suits them best."""
        readers, type, made = self.skeleton.readers[root], self.skeleton.roots[root].type, self._made[root]
        backs = [operand in self.skeleton.operators[position].needs for position, operand in readers]
        wanted = [self._read[reader] for reader in readers]
        again = [self._is_again(position) for position, _ in readers]
        if len(readers) < 2:
            each = zip(wanted, backs, again, strict=True)
            return sum(float(self.space.between(type, back, more)[made, code]) for code, back, more in each)
        ways = np.unique([made, *wanted])
        sums = self.space.between(type, any(backs), self._is_again(self.skeleton.roots[root].maker))[made, ways].copy()
        for code, back, more in zip(wanted, backs, again, strict=True):
            sums += self.space.between(type, back, more)[ways, code]
        return float(sums.min())

    def _is_again(self, position: int) -> bool:
        return self.held is not None and self.held[position][0].again

    def _storing(self, root: int) -> float:
        leaf, type, objective = self.skeleton.roots[root].leaf, self.skeleton.roots[root].type, self.objective
        assert leaf is not None
        code = code_on(self.layouts.leaves.get(root, ()), len(type.shape), self.space.units)
        if code is None:
            raise _NotThere
        found = self.space.storages(type, leaf.trainable, objective, code)
        rows = np.flatnonzero(found.regathered == (leaf.name in self.regathered))
        if not len(rows):
            raise _NotThere
        row, readers = int(rows[0]), self.skeleton.readers[root]
        backs = [operand in self.skeleton.operators[position].needs for position, operand in readers]
        used = [self._read[reader] for reader in readers]
        each = [
            float(self.space.reading(type, leaf.trainable, back, objective, code)[row, use])
            for use, back in zip(used, backs, strict=True)
        ]
        ways = [sum(each)] if len(readers) <= MANY else []
        for use in set(used) if is_shared(self.skeleton, root) else ():
            if len(set(used)) == 1 or self._is_source(root, code, row, use):
                once = float(self.space.reading(type, leaf.trainable, any(backs), objective, code)[row, use])
                ways.append(once + sum(other for other, wanted in zip(each, used, strict=True) if wanted != use))
        if not ways:
            raise _NotThere
        return float(found.seconds[row]) + min(ways)

    def _is_source(self, root: int, code: int, row: int, use: int) -> bool:
        """Whether the tables bring a parameter to a layout of use from this storage."""
        leaf, type, objective = self.skeleton.roots[root].leaf, self.skeleton.roots[root].type, self.objective
        assert leaf is not None
        every, mine = (self.space.storages(type, leaf.trainable, objective, only) for only in (None, code))
        tried = self.space.sources(type, leaf.trainable, objective)
        sources = {int(source[use]) for source in tried[: 2 if len(self.skeleton.readers[root]) <= MANY else 1]}
        return any(every.codes[s] == code and every.regathered[s] == mine.regathered[row] for s in sources)


def _row(choices: Choices, choice: Choice, units: Units) -> int | None:
    """Which of the choices follows a given one on every axis of every unit; None where none does."""
    mask = np.ones(len(choices), bool)
    for column, unit in enumerate(units):
        mask &= np.isin(choices.picks[:, column], _rules(choices, choice, unit.axes))
    rows = np.flatnonzero(mask)
    return int(rows[choices.seconds[rows].argmin()]) if len(rows) else None


def _rules(choices: Choices, choice: Choice, axes: tuple[str, ...]) -> list[int]:
    """The rules that a choice follows on all of some axes."""
    found = list(range(len(choices.rules)))
    for axis in axes:
        operands = tuple(placement_on(layout, axis) for layout in choice.operands)
        outputs = tuple(placement_on(layout, axis) for layout in choice.outputs)
        found = [i for i in found if (choices.rules[i].operands, choices.rules[i].outputs) == (operands, outputs)]
    return found
