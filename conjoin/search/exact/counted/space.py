"""Choices, storages and reshards on axes that are all alike, counted: see `layouts.py` and `alignments.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from conjoin.machine import Mesh
from conjoin.ops import Placement, ShardingRule, TensorType
from conjoin.search.exact.choices import (
    Choices,
    OperatorSeconds,
    Task,
    compatible,
    fitting,
    owning,
    rules_of,
    split_ways,
    windowed_indices,
)
from conjoin.search.exact.counted.alignments import Alignments, TooMany, align
from conjoin.search.exact.counted.layouts import Digits, ascending, counted, counts_of, num_ascending
from conjoin.search.exact.kinds import Kind
from conjoin.search.exact.layout_codes import WHOLE, Codes, S, code_of
from conjoin.search.exact.reshard_seconds import Array, Curves
from conjoin.search.exact.space import Objective
from conjoin.search.exact.storage import Carried, Storages, in_bundle, latency_share, pieces_of
from conjoin.search.exact.tables import Tables
from conjoin.search.exact.units import make_unit

MAX_PICKS = 50_000
"""Picks of rules of one operator, the order of axes aside."""
FEW_AXES = 3

Use = tuple[TensorType, bool, bool]
"""How a parameter is read: its type, whether it is trained, and whether it gets a gradient from there."""


def axes_are_alike(mesh: Mesh) -> bool:
    """Whether all axes have the same size and lie all between nodes or all inside them.

    >>> axes_are_alike(Mesh.of_nodes(8, 1)), axes_are_alike(Mesh.of_nodes(2, 2)), axes_are_alike(Mesh.of_nodes(1, 6))
    (True, False, False)
    """
    return len({(axis.size, axis.between_nodes) for axis in mesh.axes}) == 1


@dataclass(frozen=True, slots=True, eq=False)
class _Legal:
    """The legal picks of rules of a task, and the ways in which they split its indices."""

    rules: tuple[ShardingRule, ...]
    picks: Digits
    """[choice, axis], ascending."""
    indices: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    """Ways to split the indices, each once."""
    position: NDArray[np.intp]
    """[choice]: which of them."""
    further: tuple[tuple[int, ...], ...]
    """[row]: the rows in which one more axis splits an index."""

    def ways(self, row: int) -> tuple[tuple[str, int], ...]:
        return tuple((i, n) for i, n in zip(self.indices, self.rows[row], strict=True) if n > 1)


@dataclass
class CountedSpace:
    """All tables on a mesh whose axes are all alike; the same for every objective but for what it weighs."""

    mesh: Mesh
    operators: OperatorSeconds
    few_axes: int = FEW_AXES
    """Up to so many every alignment is gone through."""
    tables: Tables = field(default_factory=Tables)
    _legal: dict[Task, _Legal] = field(default_factory=dict)
    _least: dict[Task, float] = field(default_factory=dict)
    _choices: dict[tuple[Kind, Objective, float], Choices] = field(default_factory=dict)
    _storages: dict[tuple[TensorType, bool, Objective], Storages] = field(default_factory=dict)
    _aligned: dict[tuple[int, bytes, bytes], Alignments] = field(default_factory=dict)

    @property
    def num_axes(self) -> int:
        return len(self.mesh.axes)

    @property
    def size(self) -> int:
        """Of every axis."""
        return self.mesh.axes[0].size

    @property
    def degrees(self) -> tuple[int, ...]:
        """Of every axis."""
        return (self.size,) * self.num_axes

    @cached_property
    def curves(self) -> Curves:
        """Of groups known by how many axes they have: the first ones stand for all others."""
        return Curves([self.mesh.names[:n] for n in range(self.num_axes + 1)], self.operators.prices)

    def least(self, task: Task) -> float:
        """The least seconds of computing: of what cannot be split further, as splitting never takes longer."""
        if task not in self._least:
            legal = self.legal(task)
            ends = [row for row, further in enumerate(legal.further) if not further]
            self._least[task] = min(self.operators.seconds(task, legal.ways(row)) for row in ends)
        return self._least[task]

    def choices(self, kind: Kind, objective: Objective, slack: float = inf) -> Choices:
        """The choices of an operator that take no more than the least and some slack.

        Their seconds count all that depends on them alone.
        """
        key = kind, objective, slack
        if key not in self._choices:
            limit = self.least(kind.task) + max(slack, 0.0)
            found = self._priced(kind.task, limit)
            seconds = found.seconds + self._alone(kind, found, objective)
            kept = np.flatnonzero(seconds <= max(limit, float(seconds.min(initial=inf))))
            part = found.only(kept)
            self._choices[key] = Choices(part.rules, part.picks, seconds[kept], part.operands, part.outputs)
        return self._choices[key]

    def legal(self, task: Task) -> _Legal:
        """The legal picks of a task; TooMany where they are."""
        if task not in self._legal:
            self._legal[task] = self._find_legal(task)
        return self._legal[task]

    def _find_legal(self, task: Task) -> _Legal:
        rules = rules_of(task)
        if num_ascending(len(rules), self.num_axes) > MAX_PICKS:
            raise TooMany
        units = tuple(make_unit(self.mesh, (axis,)) for axis in self.mesh.names)
        picks = ascending(tuple(range(len(rules))), self.num_axes)
        picks = picks[compatible(rules, picks)]
        indices, ways = split_ways(rules, picks, units)
        fits = fitting(task, indices, ways) & owning(task, rules, picks, units)
        distinct, inverse = np.unique(ways[fits], axis=0, return_inverse=True)
        rows = tuple(tuple(map(int, row)) for row in distinct)
        number = {row: i for i, row in enumerate(rows)}
        further = tuple(tuple(number[more] for more in self._split_further(row) if more in number) for row in rows)
        return _Legal(rules, picks[fits], tuple(indices), rows, inverse.reshape(-1), further)

    def _split_further(self, row: tuple[int, ...]) -> list[tuple[int, ...]]:
        return [(*row[:i], row[i] * self.size, *row[i + 1 :]) for i in range(len(row))]

    def _priced(self, task: Task, limit: float) -> Choices:
        """The choices that compute no longer than a limit; what is too slow split further is not even priced."""
        legal = self.legal(task)
        seconds = np.zeros(len(legal.rows))
        for row in sorted(range(len(legal.rows)), key=lambda row: -prod(legal.rows[row])):
            slow = any(seconds[more] == inf for more in legal.further[row])
            found = inf if slow else self.operators.seconds(task, legal.ways(row))
            seconds[row] = found if found <= limit else inf
        kept = np.flatnonzero(seconds[legal.position] < inf)
        picks, position = legal.picks[kept], legal.position[kept]
        total = seconds[position] + self._exchanging(task, legal, picks, position)
        operands, outputs = ([rule.operands for rule in legal.rules], [rule.outputs for rule in legal.rules])
        return Choices(
            legal.rules,
            picks,
            total,
            tuple(counted(placements_on(operands, i)[picks]) for i in range(len(task.call.tensors))),
            tuple(counted(placements_on(outputs, i)[picks]) for i in range(len(task.types))),
        )

    def _exchanging(self, task: Task, legal: _Legal, picks: Digits, position: NDArray[np.intp]) -> Array:
        """Seconds of the halos that neighbours exchange, forward and, where a gradient flows, backward."""
        windowed, prices = windowed_indices(task), self.operators.prices
        num_axes = np.array([rule.index in windowed for rule in legal.rules])[picks].sum(axis=1)
        seconds = np.zeros(len(picks))
        for choice in np.flatnonzero(num_axes):
            halo = self.operators.halo_bytes(task, legal.ways(int(position[choice])))
            if halo:
                price = prices.collective("exchange", self.mesh.names[: num_axes[choice]], halo)
                seconds[choice] = price.value * (2 if task.needs else 1)
        return seconds

    def _alone(self, kind: Kind, choices: Choices, objective: Objective) -> Array:
        """Bringing out results, and the memory of what is held for the backward pass."""
        seconds = np.zeros(len(choices))
        whole = counted(np.full((1, self.num_axes), WHOLE))
        for i in kind.results:
            seconds += self.edge(kind.task.types[i], False, choices.outputs[i], whole)[:, 0]
        if not objective.seconds_per_byte or not kind.held:
            return seconds
        task, held = kind.task, kind.held[0]
        for type, codes in (*((task.call.tensors[i], choices.operands[i]) for i in held.operands),
                            *((task.types[i], choices.outputs[i]) for i in held.outputs)):  # fmt: skip
            seconds += objective.seconds_per_byte * self.held(type, codes)
        if held.extra:
            part = self.held(task.types[0], choices.outputs[0]) / max(task.types[0].bytes, 1)
            seconds += objective.seconds_per_byte * held.extra * part
        return seconds

    def held(self, type: TensorType, codes: Codes) -> Array:
        """Bytes that a device has of a tensor in some layouts."""
        split = counts_of(codes, len(type.shape), self.num_axes)[:, S:].sum(axis=1)
        found: Array = type.bytes / float(self.size) ** split
        return found

    def storages(self, type: TensorType, trained: bool, objective: Objective) -> Storages:
        """Every way to store a parameter."""
        key = type, trained, objective
        if key not in self._storages:
            self._storages[key] = self._find_storages(type, trained, objective)
        return self._storages[key]

    def _find_storages(self, type: TensorType, trained: bool, objective: Objective) -> Storages:
        rank, degrees = len(type.shape), np.full(self.num_axes, self.size)
        digits = ascending((WHOLE, *range(S, S + rank)), self.num_axes)
        legal, share = pieces_of(type, digits, degrees)
        digits, held = digits[legal], type.bytes * share[legal]
        seconds = held * objective.storing_seconds(trained)
        seconds = seconds + (held * objective.update_seconds if trained else 0.0)
        twice = np.flatnonzero(held < type.bytes) if objective.seconds_per_byte else np.zeros(0, np.intp)
        rows = np.concatenate([np.arange(len(digits)), twice])
        return Storages(counted(digits)[rows], np.arange(len(rows)) >= len(digits), seconds[rows])

    def edge(self, type: TensorType, back: bool, rows: Codes, columns: Codes) -> Array:
        """[row, column]: seconds of the reshards of an activation between some layouts, axes lined up at best."""
        some, row = np.unique(rows, return_inverse=True)
        others, column = np.unique(columns, return_inverse=True)
        aligned = self.aligned(len(type.shape), some, others)
        return aligned.least(self.seconds(aligned, type, back))[row.reshape(-1, 1), column.reshape(1, -1)]

    def seconds(self, aligned: Alignments, type: TensorType, back: bool, share: float = 1.0) -> Array:
        """Of every alignment."""
        found = self.curves.seconds(aligned.forward, type.bytes, share)
        return found + self.curves.seconds(aligned.backward, type.bytes, share) if back else found

    def aligned(self, rank: int, rows: Codes, columns: Codes) -> Alignments:
        """The alignments of some layouts, found once."""
        key, every = (rank, rows.tobytes(), columns.tobytes()), self.num_axes <= self.few_axes
        if key not in self._aligned:
            self._aligned[key] = align(rows, columns, rank, self.num_axes, self.size, every=every)
        return self._aligned[key]

    def reading(self, use: Use, objective: Objective, columns: Codes) -> Array:
        """[storage, column]: seconds in which a parameter comes to a reader in some layouts, and its gradient back."""
        type, trained, _ = use
        storages = self.storages(type, trained, objective)
        others, column = np.unique(columns, return_inverse=True)
        aligned = self.aligned(len(type.shape), storages.codes, others)
        found = aligned.least(self.reading_seconds(aligned, use, objective, storages, self.held(type, others)))
        return found[:, column.reshape(-1)]

    def reading_seconds(
        self, aligned: Alignments, use: Use, objective: Objective, storages: Storages, held: Array
    ) -> Array:
        """The same for every alignment of storages with layouts of which a device holds so many bytes."""
        type, _, back = use
        carried = Carried(
            self.seconds(aligned, type, back),
            self.seconds(aligned, type, back, latency_share(type)),
            self.seconds(aligned, type, False),
            in_bundle(aligned.before.T, aligned.after.T)[aligned.which],
            held[aligned.pairs % aligned.shape[1]],
            storages.regathered[aligned.rows],
        )
        return carried.seconds(objective.overlap, objective.seconds_per_byte)


def placements_on(rules: Sequence[Sequence[Placement]], tensor: int) -> Digits:
    """[rule]: the placement of a tensor, as a number."""
    return np.array([code_of(placements[tensor]) for placements in rules], np.int64)
