"""The tables about ROC say what the papers say: which way is better, and by how much at least."""

from __future__ import annotations

import pytest

from benchmarks.roc_cluster import H100S, P100S, layer_seconds, memory_bytes, step_seconds
from benchmarks.roc_fig4_10 import GIB, gcn
from benchmarks.roc_scaling import whole
from conjoin.gnn import PartitionSummary
from conjoin.memory import find_residence, least_recently_used, streaming

HALVES = PartitionSummary((100, 300), (4_000, 2_000), (50, 80), (80, 50), (1, 1))


def test_the_best_residence_of_gcn_on_reddit_moves_as_little_as_in_the_paper() -> None:
    program = gcn("reddit", (602, 256, 41))
    for gib, against_lru in ((2.25, 1.9), (2.5, 1.37)):
        capacity = int(gib * GIB)
        best = find_residence(program, capacity).loaded_bytes
        assert streaming(program).loaded_bytes > 4.6 * best
        assert least_recently_used(program, capacity).loaded_bytes > against_lru * best
        assert find_residence(program, capacity, "needed").moved_bytes < best * 1.1


def test_a_step_waits_in_every_layer_for_its_slowest_part() -> None:
    layers = layer_seconds(HALVES, (16, 8, 4), P100S)
    assert layers.shape == (4, 2)
    first, second = (
        step_seconds(PartitionSummary(*(counts[i : i + 1] for counts in shown)), (16, 8, 4), P100S)
        for shown in [(HALVES.vertices, HALVES.edges, (0, 0), (0, 0), (0, 0))]
        for i in (0, 1)
    )
    assert step_seconds(HALVES, (16, 8, 4), P100S) > max(first, second)
    assert step_seconds(HALVES, (16, 8, 4), P100S) == pytest.approx(layers.max(axis=1).sum(), rel=0.5)
    assert (layers > layer_seconds(HALVES, (16, 8, 4), H100S)).all()


def test_memory_is_that_of_the_fullest_part() -> None:
    fullest = PartitionSummary((300,), (2_000,), (80,), (50,), (1,))
    assert memory_bytes(HALVES, (16, 8, 4)) == memory_bytes(fullest, (16, 8, 4))
    assert memory_bytes(fullest, (16, 8, 4)) == 16_000 + 4_800 + 4 * (300 * (16 + 36) + 160 * 8)


def test_counts_of_a_share_grow_to_the_whole() -> None:
    grown = whole(HALVES, 0.1)
    assert grown.edges == (40_000, 20_000) and grown.peers == (1, 1)
