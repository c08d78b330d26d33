"""How full-graph training scales, predicted: ROC's Figure 4.5 on 1 to 16 P100, and 64 to 1,024 H100 for larger graphs.

    python -m benchmarks.roc_scaling        # writes results/roc_scaling.json

Graphs with planted communities (30 % of the edges from elsewhere, most of them from communities close by), in the
order that a reordering finds, cut into equal edges. They are made at a share of their size: halo rows against vertices
depend on the number of parts, the mean degree and the communities, not on the size, so that counts are those of the
share times its inverse. One case is also counted at twice the share, as a check. Prices are those of `roc_cluster.py`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

from benchmarks.roc_cluster import (
    H100S,
    P100S_WITHOUT_NVLINK,
    Cluster,
    layer_seconds,
    memory_bytes,
    step_seconds,
    write,
)
from conjoin.gnn import Adjacency, PartitionSummary, equal_edges, summarize
from zoo.graphs import DATASETS, Recipe, csr

HIDDEN = 256
CASES = (
    ("reddit", 1 / 40, P100S_WITHOUT_NVLINK, (1, 2, 4, 8, 16)),
    ("amazon", 1 / 80, P100S_WITHOUT_NVLINK, (1, 2, 4, 8, 16)),
    ("amazon", 1 / 80, H100S, (64, 128, 256, 512, 1024)),
    ("papers100m", 1 / 500, H100S, (64, 128, 256, 512, 1024)),
)


def graph_of(dataset: str, share: float, seed: int = 0) -> Adjacency:
    """A share of a dataset, in a good order."""
    sizes = DATASETS[dataset]
    vertices, edges = round(sizes.num_vertices * share), round(sizes.num_edges * share)
    recipe = Recipe("planted", vertices, edges, num_communities=min(2_000, vertices), mixing=0.3, near=0.7, seed=seed)
    made = csr(recipe, shuffled=False)
    return Adjacency(made.indptr, made.indices)


def whole(summary: PartitionSummary, share: float) -> PartitionSummary:
    """The counts of the whole from those of a share."""
    grown = {
        name: tuple(round(count / share) for count in getattr(summary, name))
        for name in ("vertices", "edges", "halo_rows", "sent_rows")
    }
    return replace(summary, **grown)


def rows_of(dataset: str, share: float, cluster: Cluster, parts: tuple[int, ...]) -> list[dict[str, Any]]:
    """One dataset on one cluster, at every number of parts."""
    sizes = DATASETS[dataset]
    widths = (sizes.num_features, HIDDEN, sizes.num_labels)
    graph, rows = graph_of(dataset, share), []
    for num_parts in parts:
        summary = whole(summarize(graph, equal_edges(graph, num_parts)), share)
        alone = replace(summary, halo_rows=(0,) * num_parts, sent_rows=(0,) * num_parts)
        step, without = (step_seconds(s, widths, cluster) for s in (summary, alone))
        rows.append(
            {
                "graph": dataset,
                "share_counted": share,
                "device": cluster.device,
                "parts": num_parts,
                "halo_rows_of_vertices": round(max(summary.halo_rows) / (sum(summary.vertices) / num_parts), 3),
                "halo_gib_largest_part_per_step": round(
                    2 * sum(widths[1:]) * 4 * max(*summary.halo_rows, *summary.sent_rows) / 2**30, 3
                ),
                "memory_gib_largest_part": round(memory_bytes(summary, widths) / 2**30, 2),
                "fits": memory_bytes(summary, widths) < 0.9 * {"P": 16, "H": 80}[cluster.device[0]] * 1e9,
                "step_seconds": round(step, 5),
                "of_which_exchange": round(1 - without / step, 3),
                "busiest_part_seconds": round(float(layer_seconds(summary, widths, cluster).sum(axis=0).max()), 5),
            }
        )
        rows[-1]["speedup"] = round(rows[0]["step_seconds"] / step, 2)
        print(rows[-1], flush=True)
    return rows


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [row for case in CASES for row in rows_of(*case)]
    once, twice = (
        whole(summarize(g, equal_edges(g, 64)), s) for s in (1 / 500, 1 / 250) for g in [graph_of("papers100m", s)]
    )
    difference = twice.total_halo_rows / once.total_halo_rows - 1
    print(f"counted at twice the share, halos of papers100M on 64 parts differ by {difference:+.2%}")
    write("roc_scaling", rows, halo_rows_at_twice_the_share=round(difference, 4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
