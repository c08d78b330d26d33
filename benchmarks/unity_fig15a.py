"""Unity's Figure 15a: what each dimension of parallelism is worth for BERT-Large on Summit.

    python -m benchmarks.unity_fig15a                     # writes results/unity_fig15a.json
    python -m benchmarks.unity_fig15a --gpus 24 --budget 20

The paper adds dimension after dimension to what its search may choose, and finds that reductions alone bring nothing,
reductions and attention heads up to 1.2, and pipelines 1.4 over data and model parallelism. Here the exact core is
given the same dimensions: of products it may split samples and outputs, then also what is summed, then also heads.
For each it solves every cut of the mesh into two units, with all, half and none of the parameters' communication
counted, and the timeline chooses among what comes out, data parallelism included. Then the joint search may use all
it has (sequences, storage, rewrites, memory), first in one stage, then in as many as are fastest, as long as it is
given.

Samples are four a GPU, Adam is the optimizer. The paper's figures are measured, ours predicted; how many GPUs its
figure is of is only in the picture.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time
from typing import Any

from benchmarks.search_table import RESULTS, captured, circumstances
from benchmarks.unity_fig14 import GPUS_PER_NODE, PUBLISHED
from conjoin.cost import CostModel
from conjoin.ir import Graph
from conjoin.machine import Machine, parse_machine
from conjoin.search import (
    Objective,
    OperatorSeconds,
    Problem,
    ReshardSeconds,
    Space,
    Tables,
    Wish,
    find_plan,
    make_plan,
)
from conjoin.search import cuts as cuts_of
from conjoin.sim import MachinePrices, measure_memory, simulate, simulate_layouts

NAME = "unity_fig15a"
MODEL = "bert-large"
FORBIDDEN = {
    "data + model": {"linear": frozenset({"d1", "k"}), "matmul": frozenset({"d1", "m", "n", "k"})},
    "+ reduction": {"linear": frozenset({"d1"}), "matmul": frozenset({"d1", "m", "n"})},
    "+ attention heads": {"linear": frozenset({"d1"}), "matmul": frozenset({"m", "n"})},
}
"""Indices of products that may not be split: d1 of a layer is the sequence, of products in attention the heads."""
PAPER = {"+ reduction": "1.0", "+ attention heads": "up to 1.2", "+ pipeline": "1.4"}
HIDDEN = (0.0, 0.5, 1.0)
"""Of the parameters' communication, what is taken to cost nothing."""
_FORBIDDEN_SECONDS = 1e4
_WALL = 40.0


class Allowed(OperatorSeconds):
    """Seconds of operators, but for splits that may not be chosen, which take hours."""

    forbidden: Mapping[str, frozenset[str]]

    def _both(self, task: Any, ways: Any) -> tuple[float, float]:
        barred = self.forbidden.get(task.call.op, frozenset())
        if any(index in barred and count > 1 for index, count in ways):
            return _FORBIDDEN_SECONDS, _FORBIDDEN_SECONDS
        return super()._both(task, ways)


@dataclass(frozen=True, slots=True)
class Row:
    """The best plan with some dimensions."""

    gpus: int
    dimensions: str
    seconds: float
    speedup: float
    """Over data and model parallelism."""
    paper: str
    plan: str
    cpu_seconds: float


def with_dimensions(
    graph: Graph, machine: Machine, costs: CostModel, forbidden: Mapping[str, frozenset[str]]
) -> tuple[float, str]:
    """The fastest step of those with the least sums, and of which units."""
    prices = MachinePrices(machine, costs, PUBLISHED[MODEL].optimizer)
    start = simulate(make_plan(graph, machine, "data-parallel"), prices)
    program, device = start.program, machine.device_types[0]
    operators = Allowed(prices)
    operators.forbidden = forbidden
    found = [(start.seconds, "data parallelism")]
    for units in cuts_of(machine.mesh, 2):
        space = Space(units, machine.mesh, ReshardSeconds(units, machine.mesh, prices), operators, Tables())
        for hidden in HIDDEN:
            problem = Problem(program.skeleton, space, Objective(overlap=hidden))
            solution = problem.solve()
            if solution.total >= _FORBIDDEN_SECONDS:
                continue
            layouts, regathered = problem.layouts(solution)
            simulation = simulate_layouts(program.skeleton, layouts, program.drafts, regathered)
            peak = measure_memory(simulation.program, PUBLISHED[MODEL].optimizer, machine.device).peak
            if peak <= device.memory_bytes:
                found.append((simulation.seconds, "×".join(str(unit.degree) for unit in units)))
    return min(found)


def rows_of(gpus: int, budget: float, model: str = MODEL) -> list[Row]:
    known, machine, costs = PUBLISHED[MODEL], parse_machine(f"summit:{gpus // GPUS_PER_NODE}"), CostModel()
    graph, rows = captured(model, known.samples_per_gpu * gpus), list[Row]()

    def add(name: str, seconds: float, plan: str, began: float) -> None:
        base = rows[0].seconds if rows else seconds
        took = round(process_time() - began, 1)
        rows.append(Row(gpus, name, seconds, round(base / seconds, 3), PAPER.get(name, ""), plan, took))
        print(rows[-1], flush=True)

    for name, forbidden in FORBIDDEN.items():
        began = process_time()
        add(name, *with_dimensions(graph, machine, costs, forbidden), began)
    for name, stages in (("everything, one stage", 1), ("+ pipeline", None)):
        began = process_time()
        wish = Wish("joint", _WALL * budget, known.optimizer, cpu_budget=budget, stages=stages)
        found = find_plan(graph, machine, costs, wish)
        add(name, found.seconds_per_step, found.plan.strategy, began)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[24, 96], help="multiples of six")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of the process for each joint search")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    chosen = parser.parse_args(arguments)
    rows = list[Row]()
    for gpus in chosen.gpus:
        rows += rows_of(gpus, chosen.budget, chosen.model)
        given = sys.argv[1:] if arguments is None else arguments
        told = circumstances(" ".join((f"python -m benchmarks.{NAME}", *given)), chosen.budget)
        data = {**told, "rows": [asdict(row) for row in rows]}
        chosen.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
