"""The search against trying everything: layouts, storage, what is run again, stages, micro-batches and schedules.

    python -m tests.search.everything                # 200 small models, machines and limits of memory
    python -m tests.search.everything --seeds 0 20   # those of some seeds; rows are added to the results

Two devices, of one kind or two, with a link of some rate; one or two blocks of a layer or two; a limit of memory from
where nothing fits to where all does. In one stage every choice of every operator, every storage of every parameter and
every mode of every block is simulated; in two stages every cut, number of blocks that are run again, number of
micro-batches and schedule. A plan as fast as the best of all, to half a per cent, is as good: of plans so near to each
other the search takes the simplest.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import combinations, product
from math import inf, prod
from pathlib import Path
from random import Random
from time import process_time, strftime

import torch
from torch import Tensor, nn

from conjoin.cost import CostModel
from conjoin.errors import ConjoinError, StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, cut_in_micro_batches
from conjoin.machine import DeviceType, Link, Machine, NodeKind
from conjoin.search import Wish, find_plan
from conjoin.search.contest import Contest, Entry, make_variant
from conjoin.search.exact.elimination import Solution
from conjoin.search.joint import JointSearch
from conjoin.search.searching import open_contest
from conjoin.search.stage_cuts import node_seconds
from conjoin.search.stages.cells import find_cells
from conjoin.search.stages.parts import divisions
from conjoin.search.stages.plans import Model, build, judge
from conjoin.search.stages.programme import Cutting, Slot
from conjoin.search.stages.search import micro_batches
from conjoin.search.stages.ways import RECOMPUTE, Solver, Way
from conjoin.sim import measure_memory

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "search_exhaustive.json"
ALIKE = 1.005
MAX_COMBINATIONS = 20_000
_PRICED = 1e-21
"""Of a byte: counts for nothing, but has storages that are gathered twice, and modes of blocks."""


class Block(nn.Module):
    """A layer, and what follows it."""

    def __init__(self, width: int, has_sine: bool) -> None:
        super().__init__()
        self.layer, self.has_sine = nn.Linear(width, width, bias=False), has_sine

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return torch.sin(y) if self.has_sine else y


class Blocks(nn.Module):
    """Some of them."""

    def __init__(self, depth: int, width: int, has_sine: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Block(width, has_sine)) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss(found: Tensor, wanted: Tensor) -> Tensor:
    return nn.functional.mse_loss(found, wanted, reduction="sum")


@dataclass(frozen=True, slots=True)
class Row:
    """What both found for a seed; infinite where nothing fits."""

    seed: int
    model: str
    plans: int
    exhaustive_seconds: float
    found_seconds: float
    found: str
    gap: float | None
    """Of the sum, as the search tells it: it bounds neither the timeline nor other numbers of micro-batches, and so
    excuses nothing."""
    cpu_seconds: tuple[float, float]

    @property
    def is_as_good(self) -> bool:
        return self.found_seconds <= ALIKE * self.exhaustive_seconds


def model_of(draw: Random) -> tuple[Graph, str]:
    depth, width = draw.choice([1, 2, 2]), draw.choice([64, 512, 2048])
    samples, has_sine = draw.choice([4, 64, 1024]), depth == 1 and draw.random() < 0.5
    with torch.device("meta"):
        model, batch = (
            Blocks(depth, width, has_sine).train(),
            (torch.randn(samples, width), torch.randn(samples, width)),
        )
    return capture(model, batch, loss), f"{depth} blocks of {width}{' and sine' if has_sine else ''}, {samples} samples"


def machine_of(draw: Random) -> Machine:
    fast, rate = draw.choice([1e12, 3e13, 3e14]), draw.choice([1e9, 2e10, 4e11])
    speeds = (fast, fast if draw.random() < 0.7 else fast / 2)
    devices = tuple(DeviceType(f"gpu {s:g}", "cuda", 2**36, s / 100, (("float32", s),)) for s in speeds)
    links = tuple(Link((str(i), "bus"), rate, 1e-6) for i in range(2))
    return Machine("two", 1, 2, "cuda", nodes=(NodeKind("node", 1, devices, switches=("bus",), links=links),))


def plans_of_one_stage(contest: Contest, micro: int) -> Iterator[tuple[float, int]]:
    """Seconds and bytes of everything in one stage, in some micro-batches."""
    graph, accumulation = cut_in_micro_batches(contest.captured, micro) if micro > 1 else (contest.captured, None)
    variant = make_variant(graph, (), accumulation)
    search = JointSearch(contest, [variant])
    (units,) = search.cuts()
    problem = search.problem(variant, units, search.objective(0.0, _PRICED), with_dominated=True)
    assert problem is not None
    hubs = {problem.variable[root] for root in problem.hubs}
    sizes = [1 if variable in hubs else size for variable, size in enumerate(problem.sizes)]
    if prod(sizes) > MAX_COMBINATIONS:
        raise StrategyError(f"{prod(sizes):,} combinations were to be tried. That takes too long. Take fewer.")
    for values in product(*map(range, sizes)):
        solution = Solution(values, 0.0, is_exact=True)
        layouts, regathered = problem.layouts(solution)
        simulation = contest.simulate(Entry("", variant, layouts, regathered, problem.segments(solution)))
        yield simulation.seconds, measure_memory(simulation.program, contest.optimizer, contest.machine.device).peak


def pipelines(model: Model) -> Iterator[tuple[float, int]]:
    """Seconds and bytes of everything in two stages: `judge` goes through the schedules."""
    solver = Solver(model.costs, model.optimizer)
    (division,) = divisions(model.machine, 2)
    parts = [move[0][1] for move in division.moves]
    for micro in micro_batches(model.captured):
        try:
            graph, accumulation = cut_in_micro_batches(model.captured, micro) if micro > 1 else (model.captured, None)
        except StrategyError:
            continue
        cells = find_cells(graph, node_seconds(graph, model.costs, model.machine.device_type(0)))
        ways = [Way("single"), *(Way("single", mode, n) for mode in RECOMPUTE[1:] for n in (1, 2))]
        for (cut,), some in product(combinations(range(1, len(cells)), 1), product(ways, ways)):
            rows = (0, cut), (cut, len(cells))
            slots = tuple(Slot(rows[i], (i, i + 1), parts[i], some[i]) for i in range(2))
            try:
                found = judge(model, build(model, solver, cells, accumulation, division, Cutting(slots, 0.0)))
            except StrategyError:
                continue
            if found.fits:
                yield found.seconds, found.peak_bytes


def compare(seed: int, budget: float) -> Row | None:
    """Everything, and what the search finds; None where there is too much to try."""
    draw, costs = Random(seed), CostModel()
    (graph, told), machine = model_of(draw), machine_of(draw)
    began = process_time()
    contest = open_contest(graph, machine, costs, Wish(optimizer="adam"))
    try:
        every = [plan for micro in (1, 2) for plan in plans_of_one_stage(contest, micro)]
    except StrategyError:
        return None
    peaks = sorted(peak for _, peak in every)
    limit = int(draw.uniform(0.9 * peaks[0], 1.1 * peaks[len(peaks) // 2]))
    several = list(pipelines(Model(graph, machine, costs, "adam", limit)))
    best = min((seconds for seconds, peak in (*every, *several) if peak <= limit), default=inf)
    middle, name, seconds, gap = process_time(), "", inf, None
    try:
        found = find_plan(graph, machine, costs, Wish(budget=inf, cpu_budget=budget, optimizer="adam", memory=limit))
        name, seconds = found.plan.strategy, found.seconds_per_step
        gap = found.certificate.gap if found.certificate is not None else None
    except ConjoinError as error:
        name = str(error).split(".")[0]
    taken = middle - began, process_time() - middle
    return Row(seed, told, len(every) + len(several), best, seconds, name, gap, taken)


def _write(rows: list[dict[str, object]]) -> None:
    told = {
        "command": "python -m tests.search.everything",
        "date": strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }
    RESULTS.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 200), help="the first, and one after the last")
    parser.add_argument("--budget", type=float, default=3.0, help="CPU seconds of each search")
    asked = parser.parse_args()
    rows = {row["seed"]: row for row in json.loads(RESULTS.read_text())["rows"]} if RESULTS.exists() else {}
    for seed in range(*asked.seeds):
        row = compare(seed, asked.budget)
        if row is not None:
            rows[seed] = asdict(row) | {"is_as_good": row.is_as_good}
            print(row, "" if row.is_as_good else "WORSE", flush=True)
            _write([rows[number] for number in sorted(rows)])
    kept = list(rows.values())
    worse = [row["seed"] for row in kept if not row["is_as_good"]]
    print(f"{len(kept)} models, {len(worse)} of them worse than the best of everything: {worse}")
    return int(bool(worse))


if __name__ == "__main__":
    raise SystemExit(main())
