"""How the exact core grows: seconds to find the least sum over all cuts of the mesh in two, with layers and devices.

    python -m benchmarks.core_scale        # writes results/core_scale.json and .svg

The model is the GPT of `search_scale.py`. Equal layers are worked out once, so that a stack of them costs what its
tables of one layer cost, and a walk over its operators. A cut is one of `log2` of the devices.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

from benchmarks.plotting import Point, draw
from benchmarks.search_scale import DEVICES_PER_NODE, FIXED_DEVICES, FIXED_LAYERS, NUM_DEVICES, NUM_LAYERS, gpt
from benchmarks.search_table import RESULTS, circumstances
from conjoin.cost import CostModel
from conjoin.machine import parse_machine
from conjoin.search import Objective, OperatorSeconds, Problem, ReshardSeconds, Space, cuts
from conjoin.sim import MachinePrices, take_graph_apart

NAME = "core_scale"


@dataclass(frozen=True, slots=True)
class Row:
    """One model on one machine."""

    layers: int
    devices: int
    operators: int
    cuts: int
    cpu_seconds: float
    seconds_a_cut: float
    least_sum: float


def measure(layers: int, devices: int) -> Row:
    """The least sum over all cuts, from the captured graph on; nothing is priced before."""
    machine = parse_machine(f"dgx-h100:{devices // DEVICES_PER_NODE}")
    graph = gpt(layers, 4 * devices)
    started = process_time()
    skeleton, prices = take_graph_apart(graph)[0], MachinePrices(machine, CostModel(), "adam")
    operators, found = OperatorSeconds(prices), []
    for units in cuts(machine.mesh, 2):
        space = Space(units, machine.mesh, ReshardSeconds(units, machine.mesh, prices), operators)
        found.append(Problem(skeleton, space, Objective(overlap=0.6)).solve().total)
    took = process_time() - started
    return Row(layers, devices, len(graph.nodes), len(found), round(took, 3), round(took / len(found), 3), min(found))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=list(NUM_LAYERS))
    parser.add_argument("--devices", type=int, nargs="+", default=list(NUM_DEVICES))
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    chosen = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    wanted = [(layers, FIXED_DEVICES) for layers in chosen.layers]
    wanted += [(FIXED_LAYERS, devices) for devices in chosen.devices]
    rows = []
    for layers, devices in wanted:
        rows.append(measure(layers, devices))
        row = rows[-1]
        print(f"{layers:>4} layers {devices:>5} devices {row.operators:>6} operators {row.cpu_seconds:7.2f} s "
              f"of {row.cuts} cuts", flush=True)  # fmt: skip
        data = circumstances(f"python -m benchmarks.{NAME} {' '.join(given)}".strip(), 0.0)
        text = json.dumps({**data, "rows": [asdict(row) for row in rows]}, indent=1)
        chosen.output.write_text(text + "\n", encoding="utf-8")
    by_layers, by_devices = rows[: len(chosen.layers)], rows[len(chosen.layers) :]
    points = [Point(f"layers, {FIXED_DEVICES} devices", r.layers, r.cpu_seconds, str(r)) for r in by_layers]
    points += [Point(f"devices, {FIXED_LAYERS} layers", r.devices, r.cpu_seconds, str(r)) for r in by_devices]
    drawn = draw(points, "layers, devices", "CPU seconds", joined=True)
    chosen.output.with_suffix(".svg").write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
