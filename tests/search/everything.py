"""The search against trying everything: layouts, storage, what is run again, stages, micro-batches and schedules.

    python -m tests.search.everything                # 200 small models, machines and limits of memory
    python -m tests.search.everything --seeds 0 20   # those of some seeds; rows are added to the results

Two devices (seeds below 100), three (below 150) or four, of one kind or two, with links of some rate; one or two blocks
of a layer or two; a limit of memory from where nothing fits to where all does. In one stage every choice of every
operator, every storage of every parameter and every mode of every block is simulated, the fastest that fit again in
chunks, and those that do not fit but are faster again with whatever of it on the host. In several stages every number
of them, part of the machine for each, cut, number of blocks that are run again, number of micro-batches and schedule
is; stages on several devices are laid out by every named strategy and by the exact core, not by everything. A plan as
fast as the best of all, to half a per cent, is as good: of plans so near to each other the search takes the simplest.
One that is slower must be so by no more than the gap of the step that the search tells with it.

What trying everything gave is kept with the results, so that searches are compared with it again at once (`--known`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations, pairwise, product
from math import inf, prod
from pathlib import Path
from random import Random
from time import process_time, strftime
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from conjoin.cost import CostModel
from conjoin.errors import ConjoinError, StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, Pipeline, cut_in_micro_batches
from conjoin.machine import DeviceType, Link, Machine, NodeKind
from conjoin.search import Wish, find_plan
from conjoin.search.chunk_count import COUNTS
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, make_variant
from conjoin.search.exact.elimination import Solution
from conjoin.search.exact.space import LEAST_PRICE
from conjoin.search.joint import JointSearch
from conjoin.search.searches import open_contest
from conjoin.search.stage_cuts import node_seconds
from conjoin.search.stages.cells import find_cells
from conjoin.search.stages.parts import Division, Part, divisions
from conjoin.search.stages.plans import Judged, Model, build, judge
from conjoin.search.stages.programme import Cutting, Slot
from conjoin.search.stages.search import micro_batches
from conjoin.search.stages.ways import RECOMPUTE, Solver, Way, ways_on
from conjoin.sim import Offloads, kept_tensors, measure_memory

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "search_exhaustive.json"
ALIKE = 1.005
MAX_COMBINATIONS = 5_000
MICRO_BATCHES = 1, 2
"""Of plans in one stage."""
MOST_IN_A_PIPELINE = 16
"""Micro-batches of a pipeline; more are the search's own to find."""
IN_CHUNKS = 20
"""Plans that are tried in chunks too."""


class TooMany(Exception):
    """There are more combinations than are tried."""


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
class Best:
    """The best of everything for a seed; infinite seconds where nothing fits."""

    seed: int
    devices: int
    model: str
    limit: int
    """Bytes that a device may need."""
    plans: int
    """That were tried."""
    exhaustive_seconds: float
    exhaustive: str
    exhaustive_cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Row:
    """It, and what the search found."""

    best: Best
    found_seconds: float
    found: str
    gap: float | None
    """Of the step, as the search tells it."""
    cpu_seconds: float

    @property
    def is_as_good(self) -> bool:
        return self.found_seconds <= ALIKE * self.best.exhaustive_seconds

    @property
    def is_within_gap(self) -> bool:
        """Whether nothing of everything is faster than the search says that something may be."""
        return self.gap is not None and self.found_seconds <= (1 + self.gap) * self.best.exhaustive_seconds


def model_of(draw: Random, devices: int) -> tuple[Graph, str]:
    depth, width = draw.choice([1, 2, 2]) if devices < 4 else 1, draw.choice([64, 512, 2048])
    samples, has_sine = draw.choice([4, 64, 1024]), devices < 4 and depth == 1 and draw.random() < 0.5
    with torch.device("meta"):
        model, batch = (
            Blocks(depth, width, has_sine).train(),
            (torch.randn(samples, width), torch.randn(samples, width)),
        )
    return capture(model, batch, loss), f"{depth} blocks of {width}{' and sine' if has_sine else ''}, {samples} samples"


def num_devices_of(seed: int) -> int:
    return 2 if seed < 100 else 3 if seed < 150 else 4


def machine_of(draw: Random, count: int) -> Machine:
    fast, rate = draw.choice([1e12, 3e13, 3e14]), draw.choice([1e9, 2e10, 4e11])
    speeds = (*(fast for _ in range(count - 1)), fast if draw.random() < 0.7 else fast / 2)
    devices = tuple(DeviceType(f"gpu {s:g}", "cuda", 2**36, s / 100, (("float32", s),)) for s in speeds)
    links = tuple(Link((str(i), "bus"), rate, 1e-6) for i in range(count))
    return Machine("small", 1, count, "cuda", nodes=(NodeKind("node", 1, devices, switches=("bus",), links=links),))


_T = TypeVar("_T")
Tried = tuple[float, int, Entry]
"""Seconds, bytes, and of what."""


def plans_of_one_stage(contest: Contest, micro: int) -> Iterator[Tried]:
    """Everything in one stage, in some micro-batches."""
    try:
        graph, accumulation = cut_in_micro_batches(contest.captured, micro) if micro > 1 else (contest.captured, None)
    except StrategyError:
        return
    variant = make_variant(graph, (), accumulation)
    search = JointSearch(contest, [variant])
    (units,) = search.cuts()
    problem = search.problem(variant, units, search.objective(0.0, LEAST_PRICE), with_dominated=True)
    assert problem is not None
    hubs = {problem.variable[root] for root in problem.hubs}
    sizes = [1 if variable in hubs else size for variable, size in enumerate(problem.sizes)]
    if prod(sizes) > MAX_COMBINATIONS:
        raise TooMany
    for values in product(*map(range, sizes)):
        solution = Solution(values, 0.0, is_exact=True)
        layouts, regathered = problem.layouts(solution)
        yield _tried(contest, Entry("", variant, layouts, regathered, problem.segments(solution)))


def _tried(contest: Contest, entry: Entry) -> Tried:
    simulation = contest.simulate(entry)
    peak = measure_memory(simulation.program, contest.optimizer, contest.machine.device).peak
    return simulation.seconds, peak, entry


def in_chunks(contest: Contest, plans: Iterable[Tried], limit: int) -> Iterator[Tried]:
    """The fastest of some plans that fit, with their products in chunks."""
    for _, _, entry in sorted((plan for plan in plans if plan[1] <= limit), key=lambda plan: plan[0])[:IN_CHUNKS]:
        yield from (_tried(contest, replace(entry, chunks=count)) for count in COUNTS)


def on_host(contest: Contest, plans: Iterable[Tried], limit: int, best: float) -> Iterator[Tried]:
    """Plans that do not fit but are faster than the best that does, with every set of tensors and of optimizer states
    on the host: what is copied there makes nothing faster."""
    for seconds, peak, entry in sorted(plans, key=lambda plan: plan[0]):
        if seconds >= best:
            return
        if peak <= limit or entry.segments:
            continue
        program = contest.simulate(entry).program
        tensors = sorted(tensor.made for tensor in kept_tensors(program, contest.machine.device))
        states = [leaf.name for leaf in entry.variant.skeleton.graph.leaves if leaf.is_trained]
        if _tried(contest, replace(entry, offloads=Offloads(tuple(tensors), frozenset(states))))[1] > limit:
            continue
        for some, other in product(_subsets(tensors), _subsets(states)):
            tried = _tried(contest, replace(entry, offloads=Offloads(some, frozenset(other))))
            yield tried
            best = min(best, tried[0] if tried[1] <= limit else inf)


def _subsets(some: Sequence[_T]) -> Iterator[tuple[_T, ...]]:
    return (found for count in range(len(some) + 1) for found in combinations(some, count))


def dealt_out(division: Division, begin: int = 0) -> Iterator[tuple[tuple[tuple[int, int], Part], ...]]:
    """Every way to go through the granules of a machine in stages."""
    if begin == division.count:
        yield ()
        return
    for size, part in division.moves[begin]:
        for rest in dealt_out(division, begin + size):
            yield (((begin, begin + size), part), *rest)


def ways_to_run(machine: Machine) -> list[Way]:
    """Every way for a stage; of those that run something again also with some blocks only."""
    named = [way for way in ways_on(machine) if not way.recompute]
    every = named if machine.num_devices == 1 else [*named, *(replace(w, is_solved=True) for w in named if w.is_plain)]
    again = [replace(way, recompute=mode, blocks=n) for way in every for mode in RECOMPUTE[1:] for n in (1, 2)]
    return [*every, *again] if machine.num_devices == 1 else every


def pipelines(model: Model, best: float) -> Iterator[Judged]:
    """Everything in several stages that fits and may beat the best: `judge` goes through the schedules."""
    count = model.machine.num_devices
    solver = Solver(model.costs, model.optimizer)
    fastest = max(model.machine.device_types, key=lambda device: device.memory_bandwidth)
    for micro in micro_batches(model.captured):
        if micro > MOST_IN_A_PIPELINE:
            return
        try:
            graph, accumulation = cut_in_micro_batches(model.captured, micro) if micro > 1 else (model.captured, None)
        except StrategyError:
            continue
        seconds = node_seconds(graph, model.costs, fastest)
        cells = find_cells(graph, seconds)
        for division in divisions(model.machine, count):
            for slots in (slots for places in dealt_out(division) for slots in _slots(division, places, len(cells))):
                rows = [(cells.places[slot.cells[0]], cells.places[slot.cells[1]]) for slot in slots]
                each = [seconds[a:b].sum() / s.part.num_devices for (a, b), s in zip(rows, slots, strict=True)]
                if micro * max(each) >= best:
                    continue
                try:
                    found = judge(model, build(model, solver, cells, accumulation, division, Cutting(slots, 0.0)))
                except StrategyError:
                    continue
                if found.fits:
                    best = min(best, found.seconds)
                    yield found


def _slots(
    division: Division, places: tuple[tuple[tuple[int, int], Part], ...], num_cells: int
) -> Iterator[tuple[Slot, ...]]:
    """Every cut and every way for stages on given devices; at least two."""
    if len(places) < 2:
        return
    ways = [ways_to_run(division.machines[part]) for _, part in places]
    for cut, some in product(combinations(range(1, num_cells), len(places) - 1), product(*ways)):
        rows = pairwise((0, *cut, num_cells))
        yield tuple(Slot(row, at, part, way) for row, (at, part), way in zip(rows, places, some, strict=True))


def drawn(seed: int) -> tuple[Graph, str, Machine, Random]:
    """The model and the machine of a seed."""
    draw = Random(seed)
    (graph, told), machine = model_of(draw, devices := num_devices_of(seed)), machine_of(draw, devices)
    return graph, told, machine, draw


def try_everything(seed: int) -> Best | None:
    """The best of everything; None where there is too much to try."""
    graph, told, machine, draw = drawn(seed)
    costs, began = CostModel(), process_time()
    contest = open_contest(graph, machine, costs, Wish(optimizer="adam"))
    try:
        every = [plan for micro in MICRO_BATCHES for plan in plans_of_one_stage(contest, micro)]
    except TooMany:
        return None
    peaks = sorted(peak for _, peak, _ in every)
    limit = int(draw.uniform(0.9 * peaks[0], 1.1 * peaks[len(peaks) // 2]))
    every += in_chunks(contest, every, limit)
    best = min((seconds for seconds, peak, _ in every if peak <= limit), default=inf)
    every += on_host(contest, list(every), limit, best)
    fit = min((plan for plan in every if plan[1] <= limit), key=lambda plan: plan[0], default=None)
    best, name = (fit[0], _told(fit[2])) if fit is not None else (inf, "")
    several = list(pipelines(Model(graph, machine, costs, "adam", limit), best))
    best, name = min([(best, name), *((found.seconds, _name(found.pipeline)) for found in several)])
    tried, taken = len(every) + len(several), process_time() - began
    return Best(seed, machine.num_devices, told, limit, tried, best, name, taken)


def _name(pipeline: Pipeline) -> str:
    return f"{pipeline.strategy}, {pipeline.schedule.name}"


def _told(entry: Entry) -> str:
    """What is special about a plan."""
    some = {
        "micro-batches": entry.variant.steps,
        "chunks": entry.chunks,
        "segments run again": len(entry.segments) + 1,
        "tensors on the host": len(entry.offloads.tensors) + 1,
        "states on the host": len(entry.offloads.states) + 1,
        "parameters gathered again": len(entry.regathered) + 1,
    }
    return ", ".join(f"{count - (' ' in what)} {what}" for what, count in some.items() if count > 1)


def compare(best: Best, budget: float) -> Row:
    """The best of everything, and what the search finds."""
    graph, _, machine, _ = drawn(best.seed)
    began, name, seconds, gap = process_time(), "", inf, None
    try:
        wish = Wish(budget=inf, cpu_budget=budget, optimizer="adam", memory=best.limit)
        found = find_plan(graph, machine, CostModel(), wish)
        name, seconds = found.plan.strategy, found.seconds_per_step
        gap = found.certificate.step_gap if found.certificate is not None else None
    except ConjoinError as error:
        name = str(error).split(".")[0]
    return Row(best, seconds, name, gap, process_time() - began)


def _write(rows: list[dict[str, Any]]) -> None:
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
    parser.add_argument("--again", action="store_true", help="try everything again where that was done before")
    parser.add_argument("--known", action="store_true", help="search only where everything was tried before")
    asked = parser.parse_args()
    rows = {row["seed"]: row for row in json.loads(RESULTS.read_text())["rows"]} if RESULTS.exists() else {}
    for seed in range(*asked.seeds):
        best = None if asked.again else _known(rows.get(seed))
        best = try_everything(seed) if best is None and not asked.known else best
        if best is not None:
            row = compare(best, asked.budget)
            told = {"is_as_good": row.is_as_good, "is_within_gap": row.is_within_gap}
            rows[seed] = {name: value for name, value in (asdict(best) | asdict(row) | told).items() if name != "best"}
            print(row, "" if row.is_as_good else "WORSE", flush=True)
            _write([rows[number] for number in sorted(rows)])
    worse = [seed for seed, row in sorted(rows.items()) if not row["is_as_good"]]
    beyond = [seed for seed in worse if not rows[seed]["is_within_gap"]]
    print(f"{len(rows)} models, {len(worse)} of them worse than the best of everything: {worse}")
    print(f"beyond the gap that is told: {beyond}")
    return int(bool(beyond))


def _known(row: dict[str, Any] | None) -> Best | None:
    """What trying everything gave before."""
    names = [field.name for field in fields(Best)]
    return Best(**{name: row[name] for name in names}) if row is not None and set(names) <= set(row) else None


if __name__ == "__main__":
    raise SystemExit(main())
