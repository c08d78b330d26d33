"""What the ROC benchmarks share: a GCN's step on parts of a graph, priced on GPUs from counts, and result files.

A layer of a part multiplies its rows by a weight, exchanges halo rows of the new width, and aggregates. Prices are
rates of data sheets: a product takes flops or bytes, whichever is longer; an aggregation reads a row of activations
and an index for each edge and writes a row for each vertex; an exchange takes the bytes of the busier direction over
the link, between nodes as soon as parts lie on several. Backward aggregates once more and multiplies twice. Nothing
is fitted.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from conjoin.gnn import PartitionSummary
from conjoin.machine import PRESET_DEVICES

RESULTS = Path(__file__).parent / "results"
FLOAT, INDEX = 4, 4


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs of one kind in nodes."""

    device: str
    per_node: int
    inside_bytes_per_second: float
    """Of one GPU to others of its node."""
    between_bytes_per_second: float
    """Of one GPU to other nodes, all of whose GPUs send at once."""
    latency_seconds: float = 20e-6

    def link(self, num_parts: int) -> float:
        """Return the bytes a second of an exchange among as many GPUs."""
        return self.inside_bytes_per_second if num_parts <= self.per_node else self.between_bytes_per_second


P100S = Cluster("P100-SXM2-16GB", 4, 20e9, 12.5e9 / 4)
"""ROC's cluster, section 4.7.1: EDR InfiniBand of 100 Gb/s for the four GPUs of a node."""
P100S_WITHOUT_NVLINK = Cluster("P100-PCIe-16GB", 4, 12e9 / 2, 12.5e9 / 4)
"""The same as for Figure 4.5: PCIe 3, two GPUs at a switch."""
H100S = Cluster("H100-SXM5-80GB", 8, 450e9, 50e9)
"""DGX H100."""


def layer_seconds(summary: PartitionSummary, widths: Sequence[int], cluster: Cluster) -> np.ndarray:
    """Return the seconds of each layer forward, then of each backward, on each part."""
    device = PRESET_DEVICES[cluster.device]
    flops, memory = dict(device.peak_flops)["float32"], device.memory_bandwidth
    vertices, edges, halo, sent = (
        np.array(counts, float) for counts in (summary.vertices, summary.edges, summary.halo_rows, summary.sent_rows)
    )
    forward, backward = [], []
    for i, (wide, narrow) in enumerate(pairwise(widths)):
        product = np.maximum(2 * vertices * wide * narrow / flops, FLOAT * vertices * (wide + narrow) / memory)
        gather = (edges * (FLOAT * narrow + INDEX) + FLOAT * vertices * narrow) / memory
        exchange = np.maximum(halo, sent) * FLOAT * narrow / cluster.link(summary.num_parts)
        exchange += cluster.latency_seconds * (summary.num_parts > 1) + 4 * device.overhead_seconds
        forward.append(product + gather + exchange)
        backward.append((2 if i else 1) * product + gather + exchange)
    return np.array([*forward, *backward])


def weights_seconds(widths: Sequence[int], num_parts: int, cluster: Cluster) -> float:
    """Return the seconds of adding up the gradients of all weights."""
    size = FLOAT * sum(wide * narrow for wide, narrow in pairwise(widths))
    share = 2 * (num_parts - 1) / num_parts
    return share * size / cluster.link(num_parts) + (num_parts > 1) * cluster.latency_seconds * 2


def step_seconds(summary: PartitionSummary, widths: Sequence[int], cluster: Cluster) -> float:
    """Return the seconds of a step: every layer waits for its slowest part, whose rows others need."""
    layers = layer_seconds(summary, widths, cluster).max(axis=1).sum()
    return float(layers) + weights_seconds(widths, summary.num_parts, cluster)


def memory_bytes(summary: PartitionSummary, widths: Sequence[int]) -> int:
    """Return what the fullest part holds: edges both ways, features, activations, their gradients, one halo."""
    kept = widths[0] + 3 * sum(widths[1:])
    rows = zip(summary.vertices, summary.edges, summary.halo_rows, strict=True)
    return max(INDEX * 2 * e + 16 * v + FLOAT * (v * kept + 2 * h * max(widths[1:])) for v, e, h in rows)


def write(name: str, rows: Sequence[dict[str, Any]], **more: object) -> None:
    """Write a benchmark's result with machine, versions, date and command, a row a line."""
    head = {
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "numpy": np.__version__,
        **more,
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    text = json.dumps(head, indent=1).removesuffix("\n}") + f',\n "rows": [\n  {lines}\n ]\n}}\n'
    (RESULTS / f"{name}.json").write_text(text, encoding="utf-8")
