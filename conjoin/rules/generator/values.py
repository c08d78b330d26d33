"""Distinct values of an enumeration in columns: one smallest expression each, as an operator and ids of operands.

An expression is a *graph* here: operands that are the same value are one node. The operators of a value's graph are its
`nodes`; two parts of one split are one operator, as in TASO.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from itertools import combinations

import numpy as np
import numpy.typing as npt

from conjoin.rules.generator.arithmetic import Array
from conjoin.rules.generator.fingerprints import Hashes, mix
from conjoin.rules.generator.shapes import Types

Ints = npt.NDArray[np.int32]
MOST_NODES = 6
"""Operators a stored graph may have."""
_MOST_PAIRS = 1 << 20
"""Looked at together, for the memory's sake."""


@dataclass(frozen=True, slots=True)
class Nodes:
    """Applications: which operator on which values."""

    hashes: Hashes
    choice: npt.NDArray[np.int16]
    left: Ints
    right: Ints
    """-1 where there is one operand."""

    @staticmethod
    def none() -> Nodes:
        ids = np.zeros(0, np.int32)
        return Nodes(np.zeros(0, np.uint64), np.zeros(0, np.int16), ids, ids)

    @staticmethod
    def joined(parts: list[Nodes]) -> Nodes:
        columns = [np.concatenate([getattr(p, f.name) for p in (Nodes.none(), *parts)]) for f in fields(Nodes)]
        return Nodes(*columns)

    def __len__(self) -> int:
        return len(self.hashes)

    def __getitem__(self, picked: Array) -> Nodes:
        return Nodes(self.hashes[picked], self.choice[picked], self.left[picked], self.right[picked])


@dataclass(slots=True)
class Values:
    """All distinct values found, by id; the first are the inputs and the constants (no choice: -1)."""

    nodes: Nodes = field(default_factory=Nodes.none)
    level: npt.NDArray[np.int8] = field(default_factory=lambda: np.zeros(0, np.int8))
    """How many operators the smallest graph has."""
    type: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    row: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    """The place among the values of its type."""
    mask: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros(0, np.uint32))
    """A bit for each input that is used."""
    graph: Ints = field(default_factory=lambda: np.zeros((0, MOST_NODES), np.int32))
    """The operators of the smallest graph, each named by a value it makes; -1 fills up."""
    types: list[Types] = field(default_factory=list)
    content: list[list[Array]] = field(default_factory=list)
    """The residues of the values of each type, at each choice of sizes."""

    def __len__(self) -> int:
        return len(self.level)

    def add(self, new: Nodes, level: int, types: Ints, contents: list[tuple[int, list[Array]]]) -> None:
        """Append values; contents come type by type, in the order of the ids."""
        rows = np.zeros(len(new), np.int32)
        for of, content in contents:
            picked = np.flatnonzero(types == of)
            rows[picked] = np.arange(len(picked)) + len(self.content[of][0])
            both = zip(self.content[of], content, strict=True)
            self.content[of] = [np.concatenate((known, made.astype(np.int32))) for known, made in both]
        self.append(new, level, types, rows)

    def append(self, new: Nodes, level: int, types: Ints, rows: Ints) -> None:
        mask = self.masks(new) if level else np.zeros(len(new), np.uint32)
        graph = self._graphs(new) if level else np.full((len(new), MOST_NODES), -1, np.int32)
        self.nodes = Nodes.joined([self.nodes, new])
        self.level = np.concatenate((self.level, np.full(len(new), level, np.int8)))
        self.type, self.row = np.concatenate((self.type, types)), np.concatenate((self.row, rows))
        self.mask, self.graph = np.concatenate((self.mask, mask)), np.concatenate((self.graph, graph))

    def masks(self, nodes: Nodes) -> npt.NDArray[np.uint32]:
        """The inputs that applications use."""
        second = np.where(nodes.right >= 0, self.mask[nodes.right], 0)
        return (self.mask[nodes.left] | second).astype(np.uint32)

    def _graphs(self, new: Nodes) -> Ints:
        """The operators below each new value and, last named, its own."""
        second = np.where(new.right[:, None] >= 0, self.graph[new.right], -1)
        own = np.arange(len(self), len(self) + len(new), dtype=np.int32)
        merged = np.sort(np.concatenate((self.graph[new.left], second, own[:, None]), 1), 1)
        merged[:, 1:][merged[:, 1:] == merged[:, :-1]] = -1
        return np.sort(merged, 1)[:, -MOST_NODES:]

    def share(self, ids: Ints, name: Ints) -> None:
        """Let values be made by one operator: the other part of a split."""
        rows = self.graph[ids]
        self.graph[ids] = np.sort(np.where(rows == ids[:, None], name[:, None], rows), 1)


def num_common(one: Ints, other: Ints) -> npt.NDArray[np.int64]:
    """How many operators two graphs share, row by row."""
    same = (one[:, :, None] == other[:, None, :]) & (one[:, :, None] >= 0)
    return np.asarray(same.sum((1, 2)))


def sharing_pairs(values: Values, one: Ints, other: Ints, common: int) -> Iterator[tuple[Ints, Ints]]:
    """All pairs of two lists of values whose graphs share exactly so many operators."""
    left_keys, left_ids = _subsets(values, one, common)
    right_keys, right_ids = _subsets(values, other, common)
    order = np.argsort(right_keys, kind="stable")
    right_keys, right_ids = right_keys[order], right_ids[order]
    first, last = (np.searchsorted(right_keys, left_keys, side) for side in ("left", "right"))
    counts = last - first
    ends = np.cumsum(counts)
    start = 0
    while start < len(left_ids):
        before = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, before + _MOST_PAIRS)), start + 1)
        many = counts[start:stop]
        lefts = np.repeat(left_ids[start:stop], many)
        offsets = np.arange(len(lefts)) - np.repeat(np.cumsum(many) - many, many)
        rights = right_ids[np.repeat(first[start:stop], many) + offsets]
        exact = num_common(values.graph[lefts], values.graph[rights]) == common
        yield lefts[exact], rights[exact]
        start = stop


def _subsets(values: Values, ids: Ints, size: int) -> tuple[Hashes, Ints]:
    """A key for each subset of so many operators of each graph."""
    if not len(ids):
        return np.zeros(0, np.uint64), ids
    level = int(values.level[ids[0]])
    graphs = np.sort(values.graph[ids], 1)[:, MOST_NODES - level :].astype(np.uint64)
    keys = [np.zeros(0, np.uint64)]
    for columns in combinations(range(level), size):
        key = np.zeros(len(ids), np.uint64)
        for column in columns:
            key = mix(key * np.uint64(3) + graphs[:, column])
        keys.append(key)
    return np.concatenate(keys), np.tile(ids, len(keys) - 1)
