"""FlexFlow's section 3.7.5: LeNet, and RNNLM of two steps, on four P100: is what a search finds the best there is?

    python -m benchmarks.flexflow_optimum                     # writes results/flexflow_optimum.json
    python -m benchmarks.flexflow_optimum --models lenet

The thesis goes depth first through all strategies with A* to prune, for 0.8 and 18 hours, and its random walk finds the
same optimum in less than a second. Here all layouts of all operators on both axes of the mesh, none of them left out
because another one cannot be worse, are gone through depth first by branch and bound, whose sum of seconds is then
compared with that of elimination, the exact core of the search. Neither counts what overlaps. So beside them stand the
steps by the timeline that the joint search and the random walk come to, each with the CPU seconds after which it had
its last plan, and the seconds which no plan on these units takes less than, where the search knows them.
Experts' branches on places of their own (operators at one device only) are in the walk's space, not in the tables'.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import log10
from pathlib import Path
from time import process_time

import torch

from benchmarks.search_table import RESULTS, captured, circumstances
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import parse_machine
from conjoin.search import (
    Certificate,
    Objective,
    OperatorSeconds,
    Problem,
    ReshardSeconds,
    SearchResult,
    Space,
    Tables,
    Wish,
    branch_and_bound,
    find_plan,
)
from conjoin.search import cuts as cuts_of
from conjoin.sim import MachinePrices, take_graph_apart
from zoo.rnn import LanguageModel, RnnConfig
from zoo.tokens import next_token_batch, next_token_loss

NAME = "flexflow_optimum"
MACHINE, GPUS, SAMPLES_PER_GPU = "p100-cluster:1", 4, 64
RNNLM = RnnConfig(vocabulary=10_000, hidden=2048, layers=2, steps=2, outputs=10_000)
"""Two layers of 2,048 (section 3.7.1), unrolled twice; the words are those of Penn Treebank."""
PAPER = {"lenet": "0.8 h", "rnnlm": "18 h"}
"""What going through everything took there."""


@dataclass(frozen=True, slots=True)
class Row:
    """What each way came to; seconds of a step, but for those of the process."""

    model: str
    operators: int
    log10_layouts: float
    exhaustive_sum: float
    eliminated_sum: float
    joint_step: float
    joint_found: str
    least_step: float | None
    walk_step: float
    cpu_seconds: dict[str, float]
    paper_exhaustive: str
    paper_walk: str = "< 1 s"

    @property
    def is_optimal(self) -> bool:
        """Whether elimination has the least sum of all, and the walk no better step."""
        return abs(self.eliminated_sum / self.exhaustive_sum - 1) < 1e-9 and self.joint_step <= 1.005 * self.walk_step


def graph_of(model: str) -> Graph:
    """The model in training mode, without memory for its values."""
    samples = SAMPLES_PER_GPU * GPUS
    if model == "lenet":
        return captured("lenet", samples)
    with torch.device("meta"):
        made, batch = LanguageModel(RNNLM).train(), next_token_batch(samples, RNNLM.steps, RNNLM.vocabulary)
    return capture(made, batch, next_token_loss)


def problem_of(graph: Graph, *, dominance: bool) -> Problem:
    """Every layout of every operator on both axes of the mesh."""
    machine = parse_machine(MACHINE)
    prices = MachinePrices(machine, CostModel(), "sgd")
    units = max(cuts_of(machine.mesh, len(machine.mesh.axes)), key=len)
    space = Space(units, machine.mesh, ReshardSeconds(units, machine.mesh, prices), OperatorSeconds(prices), Tables())
    return Problem(take_graph_apart(graph)[0], space, Objective(), with_dominated=not dominance)


def compare(model: str, budget: float) -> Row:
    graph, clock = graph_of(model), dict[str, float]()
    began = process_time()
    whole = problem_of(graph, dominance=False)
    clock["tables"] = process_time() - began
    began = process_time()
    tried = branch_and_bound(whole.sizes, whole.factors, max_visited=sys.maxsize)
    clock["exhaustive"] = process_time() - began
    began = process_time()
    eliminated = problem_of(graph, dominance=True).solve()
    clock["tables and elimination"] = process_time() - began
    joint, walk = (_searched(graph, search, budget) for search in ("joint", "mcmc"))
    for name, found in (("joint", joint), ("walk", walk)):
        clock[name], clock[f"{name}, last plan"] = found.cpu_seconds, _last(found)
    told = joint.certificate.least_step if isinstance(joint.certificate, Certificate) else 0.0
    sizes = [whole.sizes[variable] for variable in range(whole.num_operators)]
    return Row(
        model, len(graph.nodes), round(sum(map(log10, sizes)), 1), tried.total, eliminated.total,
        joint.seconds_per_step, joint.plan.strategy, told or None, walk.seconds_per_step,
        {name: round(seconds, 3) for name, seconds in clock.items()}, PAPER[model],
    )  # fmt: skip


def _searched(graph: Graph, search: str, budget: float) -> SearchResult:
    wish = Wish(search, 100 * budget, "sgd", cpu_budget=budget)
    return find_plan(graph, parse_machine(MACHINE), CostModel(), wish)


def _last(found: SearchResult) -> float:
    """CPU seconds until the last improvement; the history has those of the clock on the wall."""
    wall = found.history[-1].elapsed if found.history else 0.0
    return wall * found.cpu_seconds / max(found.search_seconds, 1e-9)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(PAPER), choices=list(PAPER))
    parser.add_argument("--budget", type=float, default=20.0, help="CPU seconds of each search")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    chosen = parser.parse_args(arguments)
    rows = list[Row]()
    for model in chosen.models:
        rows.append(compare(model, chosen.budget))
        print(rows[-1], "" if rows[-1].is_optimal else "NOT OPTIMAL", flush=True)
        given = sys.argv[1:] if arguments is None else arguments
        told = circumstances(" ".join((f"python -m benchmarks.{NAME}", *given)), chosen.budget)
        data = {**told, "rows": [asdict(row) | {"is_optimal": row.is_optimal} for row in rows]}
        chosen.output.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return int(not all(row.is_optimal for row in rows))


if __name__ == "__main__":
    sys.exit(main())
