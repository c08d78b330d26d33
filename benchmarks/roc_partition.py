"""Cuts of a reordered graph against METIS: halo rows, balance, and how long a cut takes.

    python -m benchmarks.roc_partition [--parts 4 8 16]        # writes results/roc_partition.json

Planted communities on 233,000 vertices, 9.7 million edges, numbered at random, at three strengths. An order is made
once for a graph; then a cut into any number of parts is a look at prefix sums. METIS (pymetis, where installed)
balances edges, as we do; its seconds are those of the call with the graph's edges made simple.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from time import process_time
from typing import Any

import numpy as np

from benchmarks.roc_cluster import write
from conjoin.gnn import (
    Adjacency,
    Load,
    balanced_cuts,
    community_order,
    equal_edges,
    metis_parts,
    reordered,
    summarize,
    vertex_features,
)
from zoo.graphs import Recipe, csr

GRAPHS = {
    "mixing 0.05": Recipe("planted", 233_000, 9_700_000, num_communities=100, mixing=0.05),
    "mixing 0.1, neighbours": Recipe("planted", 233_000, 9_700_000, num_communities=100, mixing=0.1, near=0.7),
    "mixing 0.3": Recipe("planted", 233_000, 9_700_000, num_communities=100, mixing=0.3),
}
FIRST = "mixing 0.05"
LOADS = {"edges": [0, 0, 1, 0, 0, 0, 0], "edges, vertices, halo": [0, 4, 1, 0, 0, 0, 4]}


def rows_of(name: str, recipe: Recipe, parts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One graph, cut by every way into every number of parts."""
    made = csr(recipe, symmetric=True)
    graph = Adjacency(made.indptr, made.indices)
    began = process_time()
    moved = reordered(graph, community_order(graph))
    order_seconds = process_time() - began
    began = process_time()
    features = vertex_features(moved, (256,))
    features_seconds = process_time() - began
    print(f"{name}: order {order_seconds:.1f} s, features {features_seconds:.1f} s of CPU", flush=True)
    for num_parts in parts:
        for way, weights in LOADS.items():
            load = Load(features, np.array([weights], float))
            seconds = min(_timed(lambda load=load, n=num_parts: balanced_cuts(load, n)) for _ in range(3))
            yield row(name, f"ours, {way}", moved, balanced_cuts(load, num_parts), seconds)
        yield row(name, "as numbered, equal edges", graph, equal_edges(graph, num_parts), 0.0)
        if importlib.util.find_spec("pymetis"):
            began = process_time()
            owners = metis_parts(graph, num_parts)
            seconds = process_time() - began
            cuts = np.searchsorted(np.sort(owners), np.arange(num_parts + 1))
            yield row(name, "METIS", reordered(graph, np.argsort(owners, kind="stable")), cuts, seconds)


def _timed(run: Any) -> float:
    began = process_time()
    run()
    return process_time() - began


def row(name: str, way: str, graph: Adjacency, cuts: np.ndarray, seconds: float) -> dict[str, Any]:
    """What is told of one cut."""
    summary = summarize(graph, cuts)
    found = {
        "graph": name,
        "parts": summary.num_parts,
        "way": way,
        "halo_rows": summary.total_halo_rows,
        "largest_halo": max(summary.halo_rows),
        "edge_imbalance": round(summary.edge_imbalance, 4),
        "cut_cpu_seconds": round(seconds, 4),
    }
    print(found, flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, nargs="+", default=[4, 8, 16], help="of the first graph; others: 8")
    parser.add_argument("--graphs", nargs="+", default=list(GRAPHS), choices=list(GRAPHS))
    asked = parser.parse_args()
    rows = []
    metis = version("pymetis") if importlib.util.find_spec("pymetis") else None
    for name in asked.graphs:
        for found in rows_of(name, GRAPHS[name], asked.parts if name == FIRST else [8]):
            rows.append(found)
            write("roc_partition", rows, pymetis=metis)  # each takes long enough to be lost
    return 0


if __name__ == "__main__":
    sys.exit(main())
