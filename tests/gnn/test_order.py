"""Orders of vertices: each is a permutation, communities are found again, and ranges in them have small halos."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from hypothesis import given, settings

from conjoin.errors import GraphError
from conjoin.gnn import (
    Adjacency,
    breadth_first_order,
    community_order,
    equal_edges,
    from_edges,
    metis_order,
    reordered,
    summarize,
)
from conjoin.gnn.communities import find_communities, first_level
from tests.gnn.random_graphs import adjacencies
from zoo.graphs import CSR, Recipe, csr


def planted(near: float = 0.0) -> tuple[CSR, Adjacency]:
    recipe = Recipe("planted", 4_000, 60_000, num_communities=16, mixing=0.05, near=near)
    made = csr(recipe, symmetric=True)
    return made, Adjacency(made.indptr, made.indices)


def halo_rows(adjacency: Adjacency, order: np.ndarray, num_parts: int) -> int:
    moved = reordered(adjacency, order)
    return summarize(moved, equal_edges(moved, num_parts)).total_halo_rows


@settings(max_examples=40, deadline=None)
@given(adjacencies())
def test_every_order_names_each_vertex_once(adjacency: Adjacency) -> None:
    for order in (community_order(adjacency), breadth_first_order(adjacency)):
        assert np.array_equal(np.sort(order), np.arange(adjacency.num_vertices))


def test_what_was_planted_is_found() -> None:
    made, adjacency = planted()
    found = find_communities(first_level(adjacency))
    assert 16 <= found.max() + 1 < 100
    largest = [np.bincount(made.communities[found == label]).max() for label in range(found.max() + 1)]
    assert sum(largest) > 0.97 * len(found)


@pytest.mark.parametrize("near", [0.0, 1.0])
def test_communities_stand_together_so_that_halos_are_as_small_as_planted(near: float) -> None:
    made, adjacency = planted(near)
    as_planted = np.argsort(made.communities, kind="stable")
    for num_parts in (2, 3, 8):
        found = halo_rows(adjacency, community_order(adjacency), num_parts)
        assert found < 1.1 * halo_rows(adjacency, as_planted, num_parts)
        assert found < 0.8 * halo_rows(adjacency, np.arange(4_000), num_parts)


def test_a_grid_is_cut_along_its_lines() -> None:
    side = 40
    places = np.random.default_rng(0).permutation(side * side).reshape(side, side)
    across, down = (places[:, :-1].ravel(), places[:, 1:].ravel()), (places[:-1].ravel(), places[1:].ravel())
    sources, targets = np.r_[across[0], down[0]], np.r_[across[1], down[1]]
    adjacency = from_edges(side * side, np.r_[sources, targets], np.r_[targets, sources])
    assert halo_rows(adjacency, breadth_first_order(adjacency), 2) < 3 * side
    assert halo_rows(adjacency, community_order(adjacency), 2) < 6 * side
    assert halo_rows(adjacency, np.arange(side * side), 2) > 20 * side


@pytest.mark.skipif(importlib.util.find_spec("pymetis") is not None, reason="pymetis is installed")
def test_without_metis_its_cut_is_refused() -> None:
    with pytest.raises(GraphError, match="pip install pymetis"):
        metis_order(planted()[1], 4)


@pytest.mark.skipif(importlib.util.find_spec("pymetis") is None, reason="pymetis is not installed")
def test_halos_are_as_small_as_those_of_metis() -> None:
    _, adjacency = planted()
    for num_parts in (2, 4, 8):
        ours = halo_rows(adjacency, community_order(adjacency), num_parts)
        assert ours < 1.1 * halo_rows(adjacency, metis_order(adjacency, num_parts), num_parts)
