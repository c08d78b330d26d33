"""What deciding about memory and stages together with the rest is worth, against one after the other, all else equal.

    python -m tests.search.one_after_the_other                               # writes results/joint_memory.json
    python -m tests.search.one_after_the_other --parts 0.5 --budget 20

The same model, machine, prices, substitutions and simulator, and the same seconds for each search.

*One after the other*: the graph that is fastest on one device; then the layouts of all operators with which a step is
fastest, whatever memory they need (`--search sequential` without a limit); then, for these layouts, what makes them
fit: parameters stored otherwise and blocks run again at several prices of a byte, and from each of these as few
segments run again, tensors or optimizer states on the host as are enough. Stages are not in it: the papers it stands
for have none.

*Jointly*: one search that knows the limit from the beginning, stages included (`joint`), and the same in one stage.

Limits are parts of what the plan without a limit needs. Where one after the other fits nothing, that is told, and there
is no ratio.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from time import strftime

import numpy as np
import torch

import zoo
from conjoin.cost import CostModel
from conjoin.errors import ConjoinError
from conjoin.frontends import capture
from conjoin.ir import Choice, Graph, Plan
from conjoin.machine import Machine, parse_machine
from conjoin.search import SearchResult, Wish, find_plan
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Outcome
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.settled_choices import settle
from conjoin.search.exact.space import OVERLAPS
from conjoin.search.exact.units import natural_units
from conjoin.search.joint import JointSearch
from conjoin.search.relief import relieve
from conjoin.search.searches import open_contest
from conjoin.search.variants import as_variant

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "joint_memory.json"
PRICES = tuple(0.016 * 16**i for i in range(5))
"""Of a byte, in steps for the memory of a device."""


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step, infinite where nothing was found that fits."""

    model: str
    machine: str
    part: float
    limit: int
    sequential_seconds: float
    sequential: str
    sequential_peak: int
    """Of what comes nearest to fitting where nothing does."""
    one_stage_seconds: float
    joint_seconds: float
    joint: str

    @property
    def ratio(self) -> float:
        return self.sequential_seconds / self.joint_seconds


@dataclass(frozen=True, slots=True)
class Task:
    """What is planned, and in what time."""

    graph: Graph
    machine: Machine
    optimizer: str
    budget: float

    def wish(self, **more: object) -> Wish:
        wish = Wish(budget=inf, cpu_budget=self.budget, optimizer=self.optimizer)
        return replace(wish, **more)  # type: ignore[arg-type]

    def search(self, **more: object) -> SearchResult | None:
        try:
            return find_plan(self.graph, self.machine, CostModel(), self.wish(**more))
        except ConjoinError:
            return None


def fitted(task: Task, plan: Plan, limit: int) -> tuple[Contest, Outcome | None]:
    """A plan made to fit by everything that leaves the layouts of its operators as they are."""
    contest = open_contest(task.graph, task.machine, CostModel(), task.wish(memory=limit))
    first = as_variant(contest.enter_plan(plan, is_counted=False))
    if contest.best is None:
        found = {(o.seconds, o.peak_bytes): o for o in (first, *_stored_otherwise(contest, first, limit))}
        for outcome in sorted(found.values(), key=lambda outcome: outcome.seconds):
            if (outcome.peak_bytes or 0) > limit:
                relieve(contest, outcome)
    return contest, contest.best


def _stored_otherwise(contest: Contest, first: Outcome, limit: int) -> list[Outcome]:
    """The same layouts of operators with parameters stored, and blocks run again, as a byte is worth it."""
    tables, variant, choices = JointSearch(contest, ()), first.entry.variant, first.entry.layouts.choices
    found = []
    for price in PRICES:
        objective = tables.objective(OVERLAPS[0], price * first.seconds / limit)
        problem = tables.problem(variant, natural_units(choices, contest.mesh), objective, with_dominated=True)
        assert problem is not None
        solution = settle(problem, [_value(problem, place, choice) for place, choice in enumerate(choices)])
        layouts, regathered = problem.layouts(solution)
        again, layouts = problem.segments(solution), replace(layouts, choices=choices)
        found.append(contest.enter(Entry("stored otherwise", variant, layouts, regathered, again)))
    return found


def _value(problem: Problem, place: int, choice: Choice) -> int:
    """The value of an operator's variable that stands for a choice."""
    rules = np.array(problem._rules_of(place, choice))
    return int(np.flatnonzero((problem.choices[place].picks == rules).all(axis=1))[0])


def compare(task: Task, free: SearchResult, part: float, names: tuple[str, str]) -> Row:
    limit = int(part * free.peak_bytes)
    assert isinstance(free.plan, Plan), "a search that knows no stages finds none"
    contest, after = fitted(task, free.plan, limit)
    nearest = after or contest.smallest
    peak = (nearest.peak_bytes or 0) if nearest is not None else 0
    single, several = task.search(memory=limit, stages=1), task.search(memory=limit)
    return Row(
        *names, part, limit, after.seconds if after else inf, nearest.entry.name if nearest else "", peak,
        single.seconds_per_step if single else inf,
        several.seconds_per_step if several else inf, several.plan.strategy if several else "",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--machine", default="summit:4")
    parser.add_argument("--batch", type=int, default=6144)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--parts", type=float, nargs="+", default=[0.6, 0.5, 0.25])
    parser.add_argument("--budget", type=float, default=10.0, help="CPU seconds of each search")
    asked = parser.parse_args()
    made = zoo.build(asked.model, device="meta", batch_size=asked.batch)
    graph = capture(made.model, made.batch, made.loss)
    task = Task(graph, parse_machine(asked.machine), asked.optimizer, asked.budget)
    free = task.search(search="sequential", memory=2**50)
    assert free is not None
    command = " ".join(("python -m tests.search.one_after_the_other", *sys.argv[1:]))
    told: dict[str, object] = {"command": command, "date": strftime("%Y-%m-%d")}
    told |= {"torch": torch.__version__, "budget": asked.budget}
    told["without_limit"] = {"seconds": free.seconds_per_step, "peak": free.peak_bytes}
    rows = []
    for part in asked.parts:
        row = compare(task, free, part, (asked.model, asked.machine))
        print(row, f"{row.ratio:.3f}", flush=True)
        rows.append(asdict(row) | {"ratio": row.ratio})
        RESULTS.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
