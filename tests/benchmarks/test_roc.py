"""The tables about ROC say what the papers say: which way is better, and by how much at least."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest

from benchmarks import roc_accuracy, roc_larger_than_memory
from benchmarks.roc_cluster import H100S, P100S, layer_seconds, memory_bytes, step_seconds
from benchmarks.roc_fig4_10 import GIB, gcn
from benchmarks.roc_scaling import whole
from conjoin.comm import offloads
from conjoin.gnn import PartitionSummary
from conjoin.machine import parse_machine
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


def test_a_step_within_a_third_of_its_memory_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloads, "AHEAD_BYTES", 0)  # small tensors leave as large ones do
    sizes = roc_larger_than_memory.Sizes(vertices=300, degree=3, hidden=64, layers=12)
    found = roc_larger_than_memory.run(sizes, "cpu", parse_machine("local:1"), 1 / 3, Namespace(steps=2, seconds=1))
    assert found["largest_difference"] == 0 and found["offloaded"] > 12
    assert found["told_gib"] < 0.6 * found["unlimited_told_gib"]


def test_sampled_batches_are_parts_of_the_graph() -> None:
    data = roc_accuracy.Data(200)
    every = set(zip(*data.edges.tolist(), strict=True))
    rows = {tuple(row): place for place, row in enumerate(data.x.tolist())}
    trained = 0
    for x, edges, weight, targets in roc_accuracy.sampled(data, np.random.default_rng(0)):
        places = [rows[tuple(row)] for row in x.tolist()]
        assert {(places[s], places[t]) for s, t in zip(*edges.tolist(), strict=True)} <= every
        assert weight.shape == edges.shape[1:] and set(edges[1].bincount().tolist()) <= {0, roc_accuracy.SEEN}
        trained += int((targets >= 0).sum())
    assert trained == int(data.is_trained.sum())
