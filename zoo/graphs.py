"""Synthetic graphs of vertices: power-law, R-MAT and planted communities, of any size, from a seed.

A `Recipe` is a graph that has not been made. `edge_blocks` makes it piece by piece, a range of targets at a time, and
needs little more memory than a number a vertex; `csr` puts the pieces together. Row v of the CSR form lists the
vertices that v aggregates over, ascending. Edges may be doubled or join a vertex to itself, as in people's data.

    graph = csr(Recipe("planted", 1_000, 20_000, num_communities=10))
    labels = planted_labels(graph, num_labels=4)
    features = make_features(labels, num_features=16)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Indices = NDArray[np.int32] | NDArray[np.int64]
Kind = Literal["power-law", "r-mat", "planted"]

BLOCK_EDGES = 1 << 20
"""Edges that are made at a time."""
FEATURE_ROWS = 1 << 14
"""Rows of features that share one stream of random numbers, so that any range of rows is made without the others."""
EXPONENT = 0.9
"""Degrees fall as rank^-0.9: 1/(γ-1) for γ = 2.1, the exponent of many networks."""
HUBS = 1 / 200
"""Ranks are counted from this share of the vertices on: a hub has about 30 times the mean degree (Reddit's has 44)."""
QUADRANTS = (0.57, 0.19, 0.19, 0.05)
"""R-MAT's a, b, c, d, as in Graph 500."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a dataset is (ROC, Table 4.4; OGB's page for papers100M)."""

    num_vertices: int
    num_edges: int
    num_features: int
    num_labels: int


DATASETS = {
    "pubmed": Sizes(19_717, 108_365, 500, 3),
    "ppi": Sizes(56_944, 1_612_348, 700, 121),
    "reddit": Sizes(232_965, 114_848_857, 602, 41),
    "amazon": Sizes(9_430_088, 231_594_310, 300, 24),
    "papers100m": Sizes(111_059_956, 1_615_685_872, 128, 172),
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """A graph that has not been made: the same recipe always makes the same graph."""

    kind: Kind
    num_vertices: int
    num_edges: int
    num_communities: int = 1
    mixing: float = 0.1
    """Of a planted graph: the share of edges that come from anywhere."""
    near: float = 0.0
    """Of those: the share that comes from communities close by, so that communities have an order."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_vertices < 1 or self.num_edges < 0 or not 1 <= self.num_communities <= self.num_vertices:
            raise ValueError(
                f"no graph has {self.num_vertices} vertices, {self.num_edges} edges, {self.num_communities} communities"
            )


@dataclass(frozen=True, slots=True)
class EdgeBlock:
    """The edges into vertices `first`, `first + 1`, …: `counts` of them each, from `sources`, ascending in each row."""

    first: int
    counts: Ints
    sources: Ints


@dataclass(frozen=True, slots=True)
class CSR:
    """A graph: row v is `indices[indptr[v]:indptr[v + 1]]`, the vertices that v aggregates over."""

    indptr: Ints
    indices: Indices
    communities: Ints
    """Of each vertex; all zero where none were planted."""


def recipe(dataset: str, kind: Kind = "planted", seed: int = 0, scale: float = 1.0) -> Recipe:
    """Return the recipe of a graph of a dataset's size, or of `scale` times its vertices and edges.

    >>> recipe("reddit", "power-law").num_edges
    114848857
    """
    sizes = DATASETS[dataset]
    num_vertices = max(sizes.num_labels, round(sizes.num_vertices * scale))
    communities = min(num_vertices, 2 * sizes.num_labels)
    return Recipe(kind, num_vertices, round(sizes.num_edges * scale), num_communities=communities, seed=seed)


def edge_blocks(recipe: Recipe) -> Iterator[EdgeBlock]:
    """Yield the edges of a graph in the order of their targets; communities are ranges of vertices."""
    indptr = _first_edges(recipe)
    draw = _sources_of(recipe)
    first, number = 0, 0
    while first < recipe.num_vertices:
        last = int(np.searchsorted(indptr, indptr[first] + BLOCK_EDGES, side="right")) - 1
        last = min(max(last, first + 1), recipe.num_vertices)
        counts = np.diff(indptr[first : last + 1])
        targets = np.repeat(np.arange(first, last), counts)
        sources = draw(targets, np.random.default_rng([recipe.seed, number]))
        keys = targets * recipe.num_vertices + sources
        keys.sort()
        yield EdgeBlock(first, counts, keys - targets * recipe.num_vertices)
        first, number = last, number + 1


def csr(recipe: Recipe, symmetric: bool = False, shuffled: bool = True) -> CSR:
    """Make a graph. Symmetric: every edge in both directions. Shuffled: vertices are numbered at random."""
    made = replace(recipe, num_edges=recipe.num_edges // 2) if symmetric else recipe
    renamed = np.arange(recipe.num_vertices)
    if shuffled:
        np.random.default_rng([recipe.seed, 1 << 40]).shuffle(renamed)
    communities = np.empty(recipe.num_vertices, np.int64)
    communities[renamed] = communities_of(recipe, np.arange(recipe.num_vertices))
    if not symmetric and not shuffled:
        indices = _indices(np.empty(recipe.num_edges, np.int32), recipe.num_vertices)
        for block, where in _placed(edge_blocks(made)):
            indices[where] = block.sources
        return CSR(_first_edges(recipe), indices, communities)
    keys = np.empty(recipe.num_edges, np.int64)
    keys[-1:] = 0  # of an odd number of edges one has no other direction: vertex 0 to itself
    for block, where in _placed(edge_blocks(made)):
        targets = renamed[np.repeat(np.arange(block.first, block.first + len(block.counts)), block.counts)]
        sources = renamed[block.sources]
        keys[where] = targets * recipe.num_vertices + sources
        if symmetric:
            mirrored = slice(where.start + made.num_edges, where.stop + made.num_edges)
            keys[mirrored] = sources * recipe.num_vertices + targets
    keys.sort()
    bounds = np.arange(recipe.num_vertices + 1) * recipe.num_vertices
    return CSR(np.searchsorted(keys, bounds), _indices(keys % recipe.num_vertices, recipe.num_vertices), communities)


def communities_of(recipe: Recipe, vertices: Ints) -> Ints:
    """Return the community of each vertex, numbered as `edge_blocks` numbers them."""
    return np.searchsorted(_bounds(recipe), vertices, side="right") - 1


def planted_labels(graph: CSR, num_labels: int) -> Ints:
    """Return a label for each vertex: that of its community."""
    return graph.communities % num_labels


def make_features(labels: Ints, num_features: int, signal: float = 0.5, seed: int = 0) -> NDArray[np.float32]:
    """Return a row of features for each vertex: its label's own direction, `signal` strong, in noise."""
    blocks = [feature_rows(labels, num_features, i, signal, seed) for i in range(0, len(labels), FEATURE_ROWS)]
    return np.concatenate(blocks) if blocks else np.empty((0, num_features), np.float32)


def feature_rows(
    labels: Ints, num_features: int, first: int, signal: float = 0.5, seed: int = 0
) -> NDArray[np.float32]:
    """Return rows `first` to `first + FEATURE_ROWS` of the features; `first` is a multiple of `FEATURE_ROWS`."""
    shown = labels[first : first + FEATURE_ROWS]
    directions = np.random.default_rng([seed, 1 << 41]).standard_normal(
        (int(labels.max()) + 1, num_features), np.float32
    )
    noise = np.random.default_rng([seed, first]).standard_normal((len(shown), num_features), np.float32)
    noise += np.float32(signal) * directions[shown]
    return noise


def _indices(values: Indices, num_vertices: int) -> Indices:
    """Numbers of vertices in as few bytes as they need."""
    if num_vertices < 2**31:
        return values.astype(np.int32, copy=False)
    return values.astype(np.int64, copy=False)


def _placed(blocks: Iterator[EdgeBlock]) -> Iterator[tuple[EdgeBlock, slice]]:
    """Each block, and where its edges stand among all."""
    done = 0
    for block in blocks:
        yield block, slice(done, done + len(block.sources))
        done += len(block.sources)


def _bounds(recipe: Recipe) -> Ints:
    """Where communities begin: sizes vary by a factor of about three."""
    sizes = np.random.default_rng([recipe.seed, 1 << 42]).uniform(0.5, 1.5, recipe.num_communities)
    spare = recipe.num_vertices - recipe.num_communities
    return np.r_[
        0, (np.cumsum(sizes)[:-1] / sizes.sum() * spare).astype(np.int64) + np.arange(1, recipe.num_communities)
    ]


def _first_edges(recipe: Recipe) -> Ints:
    """The CSR's indptr: expected degrees, added up and rounded, so that the number of edges is exact."""
    match recipe.kind:
        case "power-law":
            expected = _tail(_scattered(recipe)(np.arange(recipe.num_vertices)), recipe.num_vertices)
        case "r-mat":
            expected = _row_weights(recipe.num_vertices)
        case "planted":
            bounds, ends = _bounds(recipe), np.r_[_bounds(recipe)[1:], recipe.num_vertices]
            vertices = np.arange(recipe.num_vertices)
            home = np.repeat(np.arange(recipe.num_communities), ends - bounds)
            size = (ends - bounds)[home]
            expected = _tail((vertices - bounds[home]) / size * recipe.num_vertices, recipe.num_vertices)
    total = np.cumsum(expected, out=expected)
    total *= recipe.num_edges / total[-1]
    return np.r_[0, np.minimum(np.rint(total), recipe.num_edges)].astype(np.int64)


def _sources_of(recipe: Recipe) -> Callable[[Ints, np.random.Generator], Ints]:
    """What draws a source for each target."""
    num_vertices = recipe.num_vertices
    match recipe.kind:
        case "power-law":
            back = _scattered(recipe, inverse=True)
            return lambda targets, random: back((_ranks(random, len(targets)) * num_vertices).astype(np.int64))
        case "r-mat":
            return lambda targets, random: _columns(targets, num_vertices, random)
        case "planted":
            return _planted_sources(recipe)


def _planted_sources(recipe: Recipe) -> Callable[[Ints, np.random.Generator], Ints]:
    bounds = _bounds(recipe)
    sizes = np.diff(np.r_[bounds, recipe.num_vertices])

    def draw(targets: Ints, random: np.random.Generator) -> Ints:
        home = np.searchsorted(bounds, targets, side="right") - 1
        outside = np.flatnonzero(random.random(len(targets)) < recipe.mixing)
        anywhere = np.searchsorted(bounds, random.integers(recipe.num_vertices, size=len(outside)), side="right") - 1
        beside = (
            home[outside] + np.rint(random.laplace(0, 1.5, len(outside))).astype(np.int64)
        ) % recipe.num_communities
        home[outside] = np.where(random.random(len(outside)) < recipe.near, beside, anywhere)
        return bounds[home] + (_ranks(random, len(targets)) * sizes[home]).astype(np.int64)

    return draw


def _tail(ranks: NDArray[np.float64] | Ints, num_vertices: int) -> NDArray[np.float64]:
    return (ranks / num_vertices + HUBS) ** -EXPONENT


def _ranks(random: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Ranks in [0, 1), drawn as often as `_tail` says: the inverse of its integral."""
    power = 1 - EXPONENT
    low, high = HUBS**power, (1 + HUBS) ** power
    return np.minimum((low + random.random(count) * (high - low)) ** (1 / power) - HUBS, np.nextafter(1.0, 0.0)).clip(0)


def _scattered(recipe: Recipe, inverse: bool = False) -> Callable[[Ints], Ints]:
    """A permutation of the vertices that takes no memory, v·a + b, or its inverse: hubs stand anywhere."""
    num_vertices = recipe.num_vertices
    factor = max(1, int(num_vertices * 0.6180339887498949))
    while np.gcd(factor, num_vertices) != 1:
        factor += 1
    shift = int(np.random.default_rng([recipe.seed, 1 << 43]).integers(num_vertices))
    if inverse:
        undo = pow(factor, -1, num_vertices) if num_vertices > 1 else 0
        return lambda ranks: (ranks - shift) % num_vertices * undo % num_vertices
    return lambda vertices: (vertices * factor + shift) % num_vertices


def _row_weights(num_vertices: int) -> NDArray[np.float64]:
    """How likely R-MAT is to put an edge into each row: a factor for each bit of its number."""
    a, b, c, d = QUADRANTS
    weights = np.ones(1)
    while len(weights) < num_vertices:
        weights = np.concatenate([weights * (a + b), weights * (c + d)])
    return weights[:num_vertices].copy()


def _columns(rows: Ints, num_vertices: int, random: np.random.Generator) -> Ints:
    """R-MAT's column for each row: bit by bit, given the row's; what lies beyond the last vertex is folded back."""
    a, b, c, d = QUADRANTS
    columns = np.zeros(len(rows), np.int64)
    for bit in range((num_vertices - 1).bit_length()):
        low = np.where(rows >> bit & 1, np.float32(c / (c + d)), np.float32(a / (a + b)))
        columns |= (random.random(len(rows), np.float32) >= low).astype(np.int64) << bit
    return columns % num_vertices
