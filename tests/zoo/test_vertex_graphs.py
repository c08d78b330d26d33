"""Synthetic graphs have the sizes asked for, are the same for the same seed, and what was planted is there."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from zoo.graphs import (
    BLOCK_EDGES,
    DATASETS,
    FEATURE_ROWS,
    Kind,
    Recipe,
    csr,
    edge_blocks,
    feature_rows,
    make_features,
    planted_labels,
    recipe,
)

KINDS: tuple[Kind, ...] = ("power-law", "r-mat", "planted")


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_has_the_vertices_and_edges_asked_for(kind: Kind, shuffled: bool, symmetric: bool) -> None:
    for num_vertices, num_edges in ((1, 0), (1, 5), (3, 0), (50, 701), (1000, 9000)):
        asked = Recipe(kind, num_vertices, num_edges, num_communities=min(3, num_vertices), seed=7)
        made, again = (csr(asked, symmetric=symmetric, shuffled=shuffled) for _ in range(2))
        assert made.indptr[0] == 0 and made.indptr[-1] == num_edges == len(made.indices)
        assert len(made.indptr) == num_vertices + 1 and (np.diff(made.indptr) >= 0).all()
        assert not num_edges or (made.indices.min() >= 0 and made.indices.max() < num_vertices)
        rows = np.repeat(np.arange(num_vertices), np.diff(made.indptr))
        keys = rows * num_vertices + made.indices
        assert (np.diff(keys) >= 0).all()
        assert np.array_equal(made.indptr, again.indptr) and np.array_equal(made.indices, again.indices)
        if symmetric:
            assert np.array_equal(np.sort(made.indices * np.int64(num_vertices) + rows), keys)


def test_another_seed_is_another_graph() -> None:
    one, other = (csr(Recipe("power-law", 100, 1000, seed=seed)) for seed in (0, 1))
    assert not np.array_equal(one.indices, other.indices)


def test_degrees_of_a_power_law_graph_fall_as_they_should() -> None:
    made = csr(Recipe("power-law", 20_000, 800_000))
    degrees = np.sort(np.diff(made.indptr))[::-1]
    assert 20 < degrees[0] / degrees.mean() < 40
    ranks = np.array([2_000, 8_000])
    slope = np.diff(np.log(degrees[ranks])) / np.diff(np.log(ranks + 100))
    assert slope == pytest.approx(-0.9, abs=0.05)
    drawn = np.sort(np.bincount(made.indices, minlength=20_000))[::-1]
    assert 20 < drawn[0] / drawn.mean() < 50


def test_r_mat_puts_most_edges_where_both_ends_are_low() -> None:
    made = csr(Recipe("r-mat", 1 << 12, 200_000), shuffled=False)
    rows = np.repeat(np.arange(1 << 12), np.diff(made.indptr))
    quadrants = np.bincount((rows >> 11) * 2 + (made.indices >> 11), minlength=4) / len(rows)
    assert quadrants == pytest.approx([0.57, 0.19, 0.19, 0.05], abs=0.01)


@pytest.mark.parametrize("mixing", [0.0, 0.3])
def test_communities_keep_to_themselves_as_much_as_asked(mixing: float) -> None:
    made = csr(Recipe("planted", 5_000, 200_000, num_communities=20, mixing=mixing), symmetric=True)
    rows = np.repeat(np.arange(5_000), np.diff(made.indptr))
    inside = (made.communities[rows] == made.communities[made.indices]).mean()
    assert inside == pytest.approx(1 - mixing + mixing / 20, abs=0.01)
    assert len(np.unique(made.communities)) == 20
    assert set(planted_labels(made, 4)) == {0, 1, 2, 3}


def test_communities_may_have_neighbours() -> None:
    asked = Recipe("planted", 4_000, 100_000, num_communities=40, mixing=0.5, near=1.0)
    made = csr(asked, shuffled=False)
    rows = np.repeat(np.arange(4_000), np.diff(made.indptr))
    apart = np.abs(made.communities[rows] - made.communities[made.indices])
    assert (np.minimum(apart, 40 - apart) <= 5).mean() > 0.95


def test_pieces_of_a_graph_take_little_memory_and_make_it_up() -> None:
    asked = Recipe("power-law", 30_000, 4 * BLOCK_EDGES)
    tracemalloc.start()
    total, largest = 0, 0
    for block in edge_blocks(asked):
        total, largest = total + len(block.sources), max(largest, len(block.sources))
        assert block.counts.sum() == len(block.sources)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == asked.num_edges and largest <= BLOCK_EDGES
    assert peak < 10 * 8 * BLOCK_EDGES


def test_features_follow_labels_and_are_made_in_any_order() -> None:
    labels = np.arange(FEATURE_ROWS + 100) % 5
    features = make_features(labels, num_features=8, signal=2.0)
    assert np.array_equal(feature_rows(labels, 8, FEATURE_ROWS, signal=2.0), features[FEATURE_ROWS:])
    means = np.stack([features[labels == label].mean(axis=0) for label in range(5)])
    nearest = ((features[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == labels).mean() > 0.9


def test_datasets_are_of_their_papers_sizes() -> None:
    assert DATASETS["reddit"].num_edges == 114_848_857
    small = recipe("amazon", "r-mat", scale=1e-4)
    assert (small.num_vertices, small.num_edges) == (943, 23_159)


def test_no_graph_is_made_of_nothing() -> None:
    with pytest.raises(ValueError, match="no graph has 0 vertices"):
        Recipe("planted", 0, 0)
