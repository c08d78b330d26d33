"""FlexFlow's Figure 3.14: Inception-v3 on four P100, what the plan found sends for parameters against data parallelism.

    python -m benchmarks.flexflow_fig3_14                     # writes results/flexflow_fig3_14.json
    python -m benchmarks.flexflow_fig3_14 --budget 40

In the thesis the best strategy saves 75 % of what parameters' synchronisation costs and 12 % of a step. Here bytes are
counted: all that ranks send so that parameters are where they are read and their gradients are summed up, and all that
they send otherwise, for activations that are read in other layouts than they are made in. Steps are predicted. The
joint search and FlexFlow's own random walk are both asked. `exposed` are the seconds of a step in which devices wait
for anything sent: no plan that computes as much can save more than these of data parallelism.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import process_time

from benchmarks.search_table import RESULTS, captured, circumstances
from conjoin.comm import Traffic, Transfer
from conjoin.cost import CostModel
from conjoin.ir import Leaf, Plan, Value, is_parallel, place
from conjoin.machine import Machine, parse_machine
from conjoin.search import Wish, find_plan, make_plan
from conjoin.sim import predict

NAME = "flexflow_fig3_14"
MODEL, MACHINE, BATCH, OPTIMIZER = "inception-v3", "p100-cluster:1", 256, "sgd"
PAPER = {"synchronisation": 0.75, "step": 0.12}
SEARCHES = ("joint", "mcmc")
_WALL = 40.0


@dataclass(frozen=True, slots=True)
class Row:
    """A plan."""

    search: str
    plan: str
    seconds: float
    exposed: float
    parameter_bytes: int
    """Sent by all ranks in a step."""
    other_bytes: int
    parameters_saved: float
    """Of what data parallelism sends for parameters."""
    step_saved: float
    cpu_seconds: float = 0.0


def transfers_of(plan: Plan) -> Iterator[Transfer]:
    """All that moves in a step, in the order of the program."""
    traffic, graph = Traffic(plan), plan.graph
    nodes = [node for node in graph.nodes if not is_parallel(node)]
    yield from traffic.at_start(nodes)
    for node in nodes:
        placed = place(node, plan.mesh)
        yield from traffic.before_node(node, placed)
        yield from traffic.after_node(node, placed)
    for value in (*graph.outputs, *(value for _, value in graph.updates)):
        if isinstance(value, Value):
            yield from traffic.before(value)


def sent_bytes(plan: Plan) -> tuple[int, int]:
    """What all ranks send for parameters, and for all else."""
    found = [0, 0]
    for transfer in transfers_of(plan):
        leaves = [value.owner for value in transfer.tensors if isinstance(value.owner, Leaf)]
        for_parameters = transfer.bundled or any(leaf.is_trained for leaf in leaves)
        found[not for_parameters] += sum(collective.sent.total for collective in transfer.collectives)
    return found[0], found[1]


def row_of(search: str, plan: Plan, machine: Machine, start: Row | None = None, cpu_seconds: float = 0.0) -> Row:
    """What a plan sends and takes, against data parallelism."""
    told = predict(plan, machine, CostModel(), OPTIMIZER)
    parameters, other = sent_bytes(plan)
    exposed = told.breakdown.exposed + told.breakdown.waiting
    saved = (0.0, 0.0) if start is None else (1 - parameters / start.parameter_bytes, 1 - told.seconds / start.seconds)
    row = Row(
        search, plan.strategy, told.seconds, exposed, parameters, other, round(saved[0], 4), round(saved[1], 4),
        round(cpu_seconds, 1),
    )  # fmt: skip
    print(row, flush=True)
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--budget", type=float, default=30.0, help="seconds of the process for each search")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    chosen = parser.parse_args(arguments)
    machine, graph = parse_machine(MACHINE), captured(chosen.model, BATCH)
    rows = [row_of("none", make_plan(graph, machine, "data-parallel"), machine)]
    for search in SEARCHES:
        began = process_time()
        wish = Wish(search, _WALL * chosen.budget, OPTIMIZER, cpu_budget=chosen.budget, stages=1)
        found = find_plan(graph, machine, CostModel(), wish)
        assert isinstance(found.plan, Plan), "one stage was asked for"
        rows.append(row_of(search, found.plan, machine, rows[0], process_time() - began))
    given = sys.argv[1:] if arguments is None else arguments
    data = {
        **circumstances(" ".join((f"python -m benchmarks.{NAME}", *given)), chosen.budget), "paper_saves": PAPER,
        "machine_of_steps": MACHINE, "batch_size": BATCH, "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    chosen.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(rows[1].step_saved < 0)


if __name__ == "__main__":
    sys.exit(main())
