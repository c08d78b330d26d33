"""ROC's Figure 4.10: bytes between device and host for GCN on Reddit, by the best residence, LRU and streaming.

    python -m benchmarks.roc_fig4_10        # writes results/roc_fig4_10.json

One training step of a GCN of widths 602-256-41, as ROC's own example runs it: each layer is dropout, linear, a norm
by degrees, aggregation, the norm again, ReLU. Sizes are Reddit's, in float32, an edge as two numbers of 4 bytes. An
LRU that drops what nobody reads any more, by counting references, comes out equal to the best on this step: what the
best gains over LRU here is that knowledge. The paper tells 1.4 to 5 times fewer bytes and 1.2 to 2 times shorter
epochs. Epochs here are predicted: operations on a P100 (bytes at 732 GB/s, flops at 9.3 TFLOP/s, the vendor's
numbers), then copies at 12 GB/s, which is what PCIe 3 gives, one after another.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from time import process_time

from conjoin.memory import Operation, Program, Residence, find_residence, least_recently_used, streaming
from zoo.graphs import DATASETS

RESULT = Path(__file__).parent / "results" / "roc_fig4_10.json"
GIB = 1 << 30
MEMORY_BYTES_PER_SECOND, FLOPS, LINK_BYTES_PER_SECOND = 732e9, 9.3e12, 12e9


def gcn(dataset: str, widths: tuple[int, ...]) -> Program:
    """Return a training step of a GCN: forward, then backward without a gradient of the features."""
    sizes = DATASETS[dataset]
    edges = "edges"
    tensors = {edges: 8 * sizes.num_edges + 8 * (sizes.num_vertices + 1), "labels": 8 * sizes.num_vertices}
    operations: list[Operation] = []

    def add(name: str, inputs: tuple[str, ...], output: str, size: int, flops: float = 0.0) -> str:
        tensors[output] = size
        moved = sum(tensors[i] for i in inputs) + size
        operations.append(Operation(name, inputs, (output,), moved / MEMORY_BYTES_PER_SECOND + flops / FLOPS))
        return output

    def rows(width: int) -> int:
        return 4 * sizes.num_vertices * width

    value = "features"
    tensors[value] = rows(widths[0])
    saved: list[tuple[str, str, str]] = []
    for i, (wide, narrow) in enumerate(pairwise(widths)):
        weight = f"weight{i}"
        tensors[weight] = 4 * wide * narrow
        product = 2.0 * sizes.num_vertices * wide * narrow
        gathered = 2.0 * sizes.num_edges * narrow
        dropped = add(f"dropout{i}", (value,), f"dropped{i}", rows(wide))
        linear = add(f"linear{i}", (dropped, weight), f"linear{i}", rows(narrow), product)
        scaled = add(f"norm{i}", (linear,), f"scaled{i}", rows(narrow))
        summed = add(f"gather{i}", (edges, scaled), f"summed{i}", rows(narrow), gathered)
        value = add(f"norm_again{i}", (summed,), f"layer{i}", rows(narrow))
        if i < len(widths) - 2:
            value = add(f"relu{i}", (value,), f"hidden{i}", rows(narrow))
        saved.append((dropped, weight, value))
    gradient = add("loss", (value, "labels"), "gradient", rows(widths[-1]))
    for i in reversed(range(len(saved))):
        dropped, weight, made = saved[i]
        wide, narrow = widths[i], widths[i + 1]
        product, gathered = 2.0 * sizes.num_vertices * wide * narrow, 2.0 * sizes.num_edges * narrow
        if i < len(widths) - 2:
            gradient = add(f"relu{i}'", (made, gradient), f"d_layer{i}", rows(narrow))
        gradient = add(f"norm_again{i}'", (gradient,), f"d_summed{i}", rows(narrow))
        gradient = add(f"gather{i}'", (edges, gradient), f"d_scaled{i}", rows(narrow), gathered)
        gradient = add(f"norm{i}'", (gradient,), f"d_linear{i}", rows(narrow))
        add(f"weight{i}'", (dropped, gradient), f"d_weight{i}", 4 * wide * narrow, product)
        if i:
            gradient = add(f"linear{i}'", (weight, gradient), f"d_dropped{i}", rows(wide), product)
            gradient = add(f"dropout{i}'", (gradient,), f"d_hidden{i - 1}", rows(wide))
    return Program(tuple(operations), tensors)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to place the step."""

    capacity_gib: float
    name: str
    residence: Residence
    cpu_seconds: float


def ways(program: Program, capacities_gib: tuple[float, ...]) -> Iterator[Way]:
    """Every way at every capacity."""
    for gib in capacities_gib:
        capacity = int(gib * GIB)
        runs = {
            "streaming": lambda: streaming(program),
            "LRU": lambda capacity=capacity: least_recently_used(program, capacity),
            "LRU that counts references": lambda capacity=capacity: least_recently_used(
                program, capacity, counted=True
            ),
            "best": lambda capacity=capacity: find_residence(program, capacity),
            "best, written only where needed": lambda capacity=capacity: find_residence(program, capacity, "needed"),
        }
        for name, run in runs.items():
            began = process_time()
            yield Way(gib, name, run(), process_time() - began)


def main() -> None:
    program = gcn("reddit", (602, 256, 41))
    compute = sum(operation.seconds for operation in program.operations)
    rows = []
    for way in ways(program, (1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 4.0)):
        residence = way.residence
        seconds = compute + residence.moved_bytes / LINK_BYTES_PER_SECOND
        rows.append(
            {
                "device_gib": way.capacity_gib,
                "way": way.name,
                "loaded_gib": round(residence.loaded_bytes / GIB, 3),
                "written_gib": round(residence.written_bytes / GIB, 3),
                "predicted_epoch_seconds": round(seconds, 4),
                "cpu_seconds": round(way.cpu_seconds, 3),
            }
        )
        print(
            f"{way.capacity_gib:5.2f} GiB  {way.name:32s} loads {residence.loaded_bytes / GIB:6.2f} GiB  writes "
            f"{residence.written_bytes / GIB:5.2f} GiB  epoch {seconds:6.3f} s  ({way.cpu_seconds:.2f} s)"
        )
    for gib in (2.25, 2.5):
        loaded = {row["way"]: row["loaded_gib"] for row in rows if row["device_gib"] == gib}
        print(
            f"at {gib} GiB the best loads {loaded['streaming'] / loaded['best']:.2f} times fewer bytes than streaming, "
            f"{loaded['LRU'] / loaded['best']:.2f} than LRU"
        )
    about = {
        "command": "python -m benchmarks.roc_fig4_10",
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "python": sys.version.split()[0],
        "program": "one step of GCN 602-256-41, Reddit's sizes",
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = json.dumps(about, indent=1)[:-2]
    RESULT.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
