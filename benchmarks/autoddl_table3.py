"""AutoDDL's Table 3: a wide and a deep GPT on 64 and 128 nodes of Piz Daint with pipelines, against Megatron by hand.

    python -m benchmarks.autoddl_table3                                    # writes results/autoddl_table3.json
    python -m benchmarks.autoddl_table3 --rows deep-64 --budget 20 --add   # one row, beside those that the file has

For Megatron every number of stages up to four is tried, as the paper does by hand, with the smallest degree of tensor
parallelism at which parameters and Adam in float32 take less than three quarters of the memory: a higher one sends
more. Micro-batches are of one sequence for each data-parallel rank, the smallest. What does not fit is tried with
blocks run again, which the paper does not mention. The search is asked twice: in as many stages as were best in the
paper, and free to choose. Times of the paper are measured, of how many steps it does not say, so that only ratios can
be compared; ours are predicted, of one step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.search_table import RESULTS, Named, captured, circumstances
from conjoin.cost import CostModel
from conjoin.errors import ConjoinError
from conjoin.ir import Graph
from conjoin.machine import Machine, parse_machine
from conjoin.search import Wish, find_plan, make_pipeline, make_plan
from conjoin.sim import predict, predict_pipeline

NAME = "autoddl_table3"
OPTIMIZER = "adam"
STAGES = (1, 2, 4)
STORED = 16
"""Bytes of a parameter: itself, its gradient and Adam's two averages, in float32."""
ROOM = 0.75
"""The part of the memory that they may take."""
_WALL = 40.0


@dataclass(frozen=True, slots=True)
class Published:
    """A pair of lines of the table."""

    model: str
    nodes: int
    batch_size: int
    parameters: float
    best_stages: int
    megatron_seconds: float
    autoddl_seconds: float


def _parameters(layers: int, width: int) -> float:
    return 12.0 * layers * width**2


TABLE = {
    "wide-64": Published("gpt-autoddl-20l", 64, 512, _parameters(20, 8192), 1, 533, 335),
    "wide-128": Published("gpt-autoddl-20l", 128, 1024, _parameters(20, 8192), 1, 503, 315),
    "deep-64": Published("gpt-autoddl-deep", 64, 512, _parameters(36, 4096), 2, 710, 443),
    "deep-128": Published("gpt-autoddl-deep", 128, 1024, _parameters(36, 4096), 2, 807, 508),
}


@dataclass(frozen=True, slots=True)
class Found:
    """What a search comes to."""

    stages: int | None
    """Asked for; None where it is free to choose."""
    plan: str
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """A model on some nodes."""

    name: str
    machine: str
    batch_size: int
    megatrons: tuple[Named, ...]
    megatron: Named | None
    """The fastest that fits."""
    found: tuple[Found, ...]
    speedup: float | None
    """Of the free search over Megatron."""
    paper: float


def degrees(known: Published, memory: float) -> Iterator[tuple[int, int, int]]:
    """Stages, degrees of tensor and of data parallelism: for each number of stages the smallest with room."""
    for stages in STAGES:
        tensor = 1
        while STORED * known.parameters / (stages * tensor) > ROOM * memory and stages * tensor < known.nodes:
            tensor *= 2
        yield stages, tensor, known.nodes // (stages * tensor)


def megatron(graph: Graph, machine: Machine, costs: CostModel, strategy: str) -> Named:
    """What a step takes by Megatron."""
    if strategy.startswith("pipeline:"):
        several = predict_pipeline(make_pipeline(graph, machine, strategy, costs), machine, costs)
        return Named(strategy, several.seconds, several.fits)
    one = predict(make_plan(graph, machine, strategy), machine, costs, OPTIMIZER)
    return Named(strategy, one.seconds, one.fits)


def megatrons(known: Published, graph: Graph, machine: Machine, costs: CostModel) -> Iterator[Named]:
    """All degrees, with blocks run again where they do not fit otherwise."""
    for stages, tp, dp in degrees(known, machine.device_types[0].memory_bytes):
        micro = known.batch_size // dp
        several = f"pipeline:pp={stages},tp={tp},micro={micro}"
        asked = several if stages > 1 else f"megatron:tp={tp},dp={dp}+micro={micro}"
        for again in ("", "+recompute=full"):
            try:
                tried = megatron(graph, machine, costs, f"{asked}{again}")
            except ConjoinError as error:
                print(f"{asked}{again}: {error}", flush=True)
                continue
            print(tried, flush=True)
            yield tried
            if tried.fits:
                break


def row_of(name: str, budget: float) -> Row:
    """Megatron in all its degrees, and the searches."""
    known, costs = TABLE[name], CostModel()
    machine = parse_machine(f"piz-daint:{known.nodes}")
    graph = captured(known.model, known.batch_size)
    tried = tuple(megatrons(known, graph, machine, costs))
    best = min((one for one in tried if one.fits), key=lambda one: one.seconds, default=None)
    found = list[Found]()
    for stages in (known.best_stages, None):
        began = process_time()
        wish = Wish("joint", _WALL * budget, OPTIMIZER, cpu_budget=budget, stages=stages)
        result = find_plan(graph, machine, costs, wish)
        took = round(process_time() - began, 1)
        found.append(Found(stages, result.plan.strategy, result.seconds_per_step, took))
        print(found[-1], flush=True)
    ratio = round(best.seconds / found[-1].seconds, 3) if best else None
    paper = round(known.megatron_seconds / known.autoddl_seconds, 2)
    return Row(name, machine.name, known.batch_size, tried, best, tuple(found), ratio, paper)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=tuple(TABLE), default=list(TABLE))
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of the process for each search")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    parser.add_argument("--add", action="store_true", help="to the other rows that the file has")
    chosen = parser.parse_args(arguments)
    known: dict[str, Any] = json.loads(chosen.output.read_text(encoding="utf-8"))["rows"] if chosen.add else {}
    lost = False
    for name in chosen.rows:
        row = row_of(name, chosen.budget)
        print(f"{name}: {row.speedup} times as fast as {row.megatron}; paper {row.paper}", flush=True)
        told = circumstances(f"python -m benchmarks.{NAME} --rows {name} --budget {chosen.budget:g}", chosen.budget)
        known[name] = {**told, **asdict(row)}
        chosen.output.write_text(json.dumps({**told, "rows": known}, indent=1) + "\n", encoding="utf-8")
        lost = lost or (row.speedup is not None and row.speedup < 1)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main())
