"""Communities of a graph: vertices move to the community of neighbours that gains most; communities become vertices.

The gain is modularity's (Newman 2004): edges into a community, less those that chance would put there,

    gain(v, C) = w(v, C) − vol(v) · vol(C without v) / vol(all),

found for a block of vertices at a time (`_moved`) by one sort of (vertex, label of neighbour). Blocks see the moves of
the blocks before them, and of those that would gain in one block a random half moves, so that two do not change places
for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from conjoin.gnn.adjacency import Adjacency, Floats, Ints

BLOCK_EDGES = 1 << 20
SAMPLED_DEGREE = 24
"""Of denser graphs about as many edges of each vertex are looked at, drawn evenly: it then still sees its community."""
ROUNDS = 12
SETTLED = 1 / 200
"""Rounds end when fewer than this share of the vertices move."""


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """An undirected graph with weights, of vertices or of communities; edges inside a community are left out."""

    indptr: Ints
    indices: Ints
    weights: Floats | None
    volumes: Floats
    """Of each vertex: the weight of its edges, with those inside."""

    @property
    def size(self) -> int:
        """How many vertices there are."""
        return len(self.indptr) - 1


def first_level(adjacency: Adjacency, seed: int = 0) -> Level:
    """Return the graph with every edge in both directions, or a sample of them where there are many."""
    sources, targets = adjacency.indices.astype(np.int64), adjacency.targets()
    apart = sources != targets
    if 2 * len(sources) > SAMPLED_DEGREE * adjacency.num_vertices:
        share = SAMPLED_DEGREE * adjacency.num_vertices / (2 * len(sources))
        apart &= np.random.default_rng(seed).random(len(sources), np.float32) < share
    sources, targets = sources[apart], targets[apart]
    size = adjacency.num_vertices
    keys = np.concatenate([targets * size + sources, sources * size + targets])
    keys.sort()
    indptr = np.searchsorted(keys, np.arange(size + 1) * size)
    return Level(indptr, keys % size, None, np.maximum(np.diff(indptr), 1.0))


def find_communities(level: Level, seed: int = 0) -> Ints:
    """Return a community for each vertex, numbered from 0 without gaps."""
    random = np.random.default_rng(seed)
    labels = np.arange(level.size)
    volumes = level.volumes.copy()
    bounds = _blocks(level.indptr)
    for _ in range(ROUNDS):
        moved = 0
        for first, last in pairwise(bounds):
            vertices, chosen = _moved(level, labels, volumes, first, last)
            taken = random.random(len(vertices)) < 0.5
            vertices, chosen = vertices[taken], chosen[taken]
            np.subtract.at(volumes, labels[vertices], level.volumes[vertices])
            np.add.at(volumes, chosen, level.volumes[vertices])
            labels[vertices] = chosen
            moved += len(vertices)
        if moved <= level.size * SETTLED:
            break
    return np.unique(labels, return_inverse=True)[1].astype(np.int64)


def contracted(level: Level, labels: Ints) -> Level:
    """Return the graph whose vertices are the communities of another."""
    size = int(labels.max()) + 1
    sources, targets = labels[level.indices], labels[np.repeat(np.arange(level.size), np.diff(level.indptr))]
    weights = np.ones(len(sources)) if level.weights is None else level.weights
    apart = sources != targets
    pairs, place = np.unique(targets[apart] * size + sources[apart], return_inverse=True)
    indptr = np.searchsorted(pairs, np.arange(size + 1) * size)
    summed = np.bincount(place, weights[apart], minlength=len(pairs))
    volumes = np.bincount(labels, level.volumes, minlength=size)
    return Level(indptr, pairs % size, np.asarray(summed, np.float64), np.asarray(volumes, np.float64))


def _blocks(indptr: Ints) -> list[int]:
    """Ranges of vertices with about as many edges each, at least eight where there are enough vertices."""
    size = len(indptr) - 1
    count = min(size, max(8, int(indptr[-1]) // BLOCK_EDGES))
    cuts = np.searchsorted(indptr, np.arange(1, count) * (indptr[-1] / count))
    return [int(cut) for cut in np.unique(np.r_[0, cuts, size])]


def _moved(level: Level, labels: Ints, volumes: Floats, first: int, last: int) -> tuple[Ints, Ints]:
    """The vertices of a block that gain by moving, and where each gains most."""
    edges = slice(int(level.indptr[first]), int(level.indptr[last]))
    if edges.start == edges.stop:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = np.repeat(np.arange(last - first), np.diff(level.indptr[first : last + 1]))
    keys = rows * level.size + labels[level.indices[edges]]
    if level.weights is None:
        keys.sort()
        starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        joined = np.diff(np.r_[starts, len(keys)]).astype(np.float64)
    else:
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        starts = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])
        joined = np.add.reduceat(level.weights[edges][order], starts)
    rows, chosen = np.divmod(keys[starts], level.size)
    share = level.volumes[first:last] / level.volumes.sum()
    own = labels[first:last]
    at_home = chosen == own[rows]
    gain = joined - share[rows] * (volumes[chosen] - at_home * level.volumes[first:last][rows])
    stay = -share * (volumes[own] - level.volumes[first:last])
    stay[rows[at_home]] = gain[at_home]
    gain[at_home] = -np.inf
    heads = np.flatnonzero(np.r_[True, rows[1:] != rows[:-1]])
    best = np.maximum.reduceat(gain, heads)
    better = np.flatnonzero(best > stay[rows[heads]] + 1e-9)
    picks = np.flatnonzero(gain == np.repeat(best, np.diff(np.r_[heads, len(rows)])))
    picks = picks[np.searchsorted(picks, heads[better])]
    return rows[heads[better]] + first, chosen[picks]
