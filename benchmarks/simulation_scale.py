"""How long a simulation takes: GPT of 175 billion parameters on 1,024 devices, and growth with devices and operators.

    python -m benchmarks.simulation_scale    # prints tables, writes results/simulation_scale.json and .svg

A simulation starts from a plan and ends with the timeline of a training step; capturing the model and making the plan
are measured apart. Devices that behave alike are simulated once. Memory is the most that the process ever held: torch,
the captured model and the plan are in it. Seconds are of the process, so that other work counts for little.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch

import zoo
from benchmarks.plotting import Point, draw
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import parse_machine
from conjoin.search import make_plan
from conjoin.sim import MachinePrices, simulate

RESULTS = Path(__file__).parent / "results" / "simulation_scale.json"
DEVICES_PER_NODE = 8
LARGE, STRATEGY, BATCH = "gpt-175b", "megatron:tp=8", 1024
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024)
BY_DEVICES = "gpt-1.3b"
BY_OPERATORS = ("gpt-125m", "gpt-350m", "gpt-13b", "llama-7b", "llama-70b")
MOST_SECONDS, MOST_BYTES = 10.0, 4 * 10**9
_BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024
"""What `ru_maxrss` counts in."""


@dataclass(frozen=True, slots=True)
class Row:
    """One simulation."""

    model: str
    devices: int
    operators: int
    tasks: int
    """On all devices together."""
    plan_seconds: float
    simulation_seconds: float
    step_seconds: float
    """What the simulation says: how long a training step takes."""
    peak_bytes: int


def captured(model: str) -> Graph:
    found = zoo.build(model, device="meta", batch_size=BATCH)
    return capture(found.model.train(), found.batch, found.loss)


def measure(model: str, graph: Graph, devices: int) -> Row:
    """Make a plan, then simulate it from nothing: no operator was priced before."""
    machine = parse_machine(f"dgx-h100:{devices // DEVICES_PER_NODE}")
    before = time.process_time()
    plan = make_plan(graph, machine, STRATEGY)
    middle = time.process_time()
    found = simulate(plan, MachinePrices(machine, CostModel()))
    seconds = time.process_time() - middle
    return Row(
        model=model,
        devices=devices,
        operators=len(graph.nodes),
        tasks=found.num_tasks,
        plan_seconds=round(middle - before, 3),
        simulation_seconds=round(seconds, 3),
        step_seconds=round(found.seconds, 4),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_MAXRSS,
    )


def show(rows: Sequence[Row]) -> None:
    print(
        f"{'model':<10} {'devices':>7} {'operators':>9} {'tasks':>10} {'plan s':>7} {'simulation s':>12} {'peak GB':>7}"
    )
    for row in rows:
        print(
            f"{row.model:<10} {row.devices:>7,} {row.operators:>9,} {row.tasks:>10,} {row.plan_seconds:>7.2f} "
            f"{row.simulation_seconds:>12.3f} {row.peak_bytes / 1e9:>7.2f}"
        )


def picture(by_devices: Sequence[Row], by_operators: Sequence[Row]) -> str:
    """Seconds against how many there are, of devices and of operators."""
    points = [Point(f"devices, {BY_DEVICES}", row.devices, row.simulation_seconds, str(row)) for row in by_devices]
    largest = sorted(by_operators, key=lambda row: row.operators)
    points += [Point("operators, 1,024 devices", row.operators, row.simulation_seconds, str(row)) for row in largest]
    return draw(points, "devices or operators", "seconds of a simulation", joined=True)


def circumstances() -> dict[str, str]:
    """Where and with what the figures were taken."""
    return {
        "command": "python -m benchmarks.simulation_scale",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, one thread, cores shared with other work",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output
    torch.set_num_threads(1)
    large = measure(LARGE, captured(LARGE), DEVICES[-1])
    show([large])
    graph = captured(BY_DEVICES)
    by_devices = [measure(BY_DEVICES, graph, devices) for devices in DEVICES]
    by_operators = [measure(model, captured(model), DEVICES[-1]) for model in BY_OPERATORS]
    show([*by_devices, *by_operators])
    tables = {"by_devices": by_devices, "by_operators": [*by_operators, large]}
    result = {**circumstances(), "large": asdict(large), **{k: [asdict(row) for row in v] for k, v in tables.items()}}
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".svg").write_text(picture(by_devices, tables["by_operators"]), encoding="utf-8")
    quick = large.simulation_seconds < MOST_SECONDS and large.peak_bytes < MOST_BYTES
    print("within ten seconds and four gigabytes" if quick else "TOO SLOW OR TOO LARGE")
    return 0 if quick else 1


if __name__ == "__main__":
    sys.exit(main())
