"""What tables of searches share: a case is searched in a process of its own, a row is printed and kept at once.

A process of its own means that no case profits from what another one priced, and that one that fails costs one row.
Seconds of the search are of the process, so that other work counts for little; they run from captured graph to plan.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import resource
import sys
import time
import traceback
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import zoo
from benchmarks.plotting import Point, draw
from conjoin.cost import CostModel
from conjoin.errors import ConjoinError, StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, Pipeline, Plan, write_file
from conjoin.machine import Machine, parse_machine
from conjoin.search import SearchResult, Wish, find_plan, make_plan
from conjoin.sim import predict

RESULTS = Path(__file__).parent / "results"
DATA_PARALLEL = "data-parallel"
_WALL = 40.0
"""A search may take so many times its budget by the clock: others work on a shared host too."""
_FOUND = "joint search"
"""How plans are called that the search made; it is its own baseline where no named strategy fits."""
_BYTES_OF_MAXRSS = 1 if sys.platform == "darwin" else 1024
"""What `ru_maxrss` counts in."""


@dataclass(frozen=True, slots=True)
class Named:
    """A strategy by name: what a step takes, and whether a device has the memory for it."""

    name: str
    seconds: float
    fits: bool
    waiting: float | None = None
    """Seconds of these in which devices wait for communication, where it was asked for."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a machine, and what the paper says of it."""

    model: str
    machine: str
    batch_size: int
    paper: str = ""
    optimizer: str = "sgd"
    half: bool = False
    """Parameters and inputs in bfloat16."""
    named: tuple[str, ...] = ()
    """Strategies to stand beside data parallelism, whether or not the search starts from them."""
    expert: Callable[[Graph, Machine, CostModel, str], Named] | None = None
    """What no named strategy does, given the optimizer."""
    search: str = "joint"
    make_graph: Callable[[], Graph] | None = None
    """Where the model is not of the zoo."""
    make_machine: Callable[[], Machine] | None = None
    """Where the machine has no name."""
    budget: float | None = None
    """Seconds of the search where they are not the table's."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a case came to; with an error, nothing but that."""

    model: str
    machine: str
    batch_size: int
    paper: str
    error: str = ""
    devices: int = 0
    operators: int = 0
    seconds: float = 0.0
    """Of a step, as predicted."""
    data_parallel: Named | None = None
    best_named: Named | None = None
    expert: Named | None = None
    """What experts do that no named strategy does, where a case has such."""
    speedup: float | None = None
    """Over the best named strategy that fits; None where none does."""
    search: str = "joint"
    found_by: str = ""
    substitutions: tuple[str, ...] = ()
    """In the plan that was found, each once."""
    stopped: str = ""
    num_plans: int = 0
    bound: float | None = None
    """Seconds that no plan of those that the certificate is about takes less than; None where it tells none."""
    peak_bytes: int = 0
    """Of a device."""
    capture_cpu_seconds: float = 0.0
    search_seconds: float = 0.0
    search_cpu_seconds: float = 0.0
    search_peak_bytes: int = 0
    """The most that the process ever held: torch, the captured model and the plan are in it."""
    history: tuple[tuple[float, float, str], ...] = ()
    """When the best plan got better, to what, and by whom."""


def captured(model: str, batch_size: int, *, half: bool = False) -> Graph:
    """A model of the zoo in training mode, without memory for its values."""
    found = zoo.build(model, device="meta", batch_size=batch_size)
    module, batch = found.model.train(), found.batch
    if half:
        module, tensors = module.bfloat16(), batch.values() if isinstance(batch, dict) else batch
        cast = [x.bfloat16() if x.is_floating_point() else x for x in tensors]
        batch = dict(zip(batch, cast, strict=True)) if isinstance(batch, dict) else tuple(cast)
    return capture(module, batch, found.loss)


def search(case: Case, budget: float) -> Row:
    """Capture a model, search, and predict the named strategies."""
    torch.set_num_threads(1)
    machine = case.make_machine() if case.make_machine else parse_machine(case.machine)
    started = time.process_time()
    graph = case.make_graph() if case.make_graph is not None else captured(case.model, case.batch_size, half=case.half)
    captured_at = time.process_time()
    wish = Wish(case.search, _WALL * budget, case.optimizer, cpu_budget=budget)
    found = find_plan(graph, machine, CostModel(), wish)
    ended = time.process_time()
    named = _named(case, graph, machine, found)
    expert = case.expert(graph, machine, CostModel(), case.optimizer) if case.expert else None
    best = min((one for one in (*named, expert) if one and one.fits), key=lambda one: one.seconds, default=None)
    return Row(
        model=case.model,
        machine=case.machine,
        batch_size=case.batch_size,
        paper=case.paper,
        devices=machine.num_devices,
        operators=len(graph.nodes),
        seconds=found.seconds_per_step,
        data_parallel=next((one for one in named if one.name == DATA_PARALLEL), None),
        best_named=best,
        expert=expert,
        speedup=None if best is None else best.seconds / found.seconds_per_step,
        search=case.search,
        found_by=found.plan.strategy,
        substitutions=_substitutions(found.plan),
        stopped=found.stopped.value,
        num_plans=found.num_plans,
        bound=(found.certificate.least_step or None) if found.certificate is not None else None,
        peak_bytes=found.peak_bytes,
        capture_cpu_seconds=round(captured_at - started, 3),
        search_seconds=round(found.search_seconds, 3),
        search_cpu_seconds=round(ended - captured_at, 3),
        search_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_MAXRSS,
        history=tuple((round(step.elapsed, 3), step.seconds, step.name) for step in found.history),
    )


def _substitutions(found: Plan | Pipeline) -> tuple[str, ...]:
    """The names of what was applied, in a plan or in any stage of a pipeline."""
    plans = [stage.plan for stage in found.stages] if isinstance(found, Pipeline) else [found]
    return tuple(dict.fromkeys(one.name for plan in plans for one in plan.substitutions))


def _named(case: Case, graph: Graph, machine: Machine, found: SearchResult) -> list[Named]:
    """The best strategy that the search started from, data parallelism, and what the case names."""
    costs = CostModel()
    named = []
    if found.baseline and not found.baseline.startswith(_FOUND):
        named.append(Named(found.baseline, found.baseline_seconds_per_step, True))
    for name in dict.fromkeys((DATA_PARALLEL, *case.named)):
        try:
            prediction = predict(make_plan(graph, machine, name), machine, costs, case.optimizer)
        except StrategyError:
            continue
        spent = prediction.breakdown
        named.append(Named(name, prediction.seconds, prediction.fits, spent.exposed + spent.waiting))
    return named


def search_apart(case: Case, budget: float) -> Row:
    """The same in a process of its own; a failure, whatever it is, becomes a row."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_row, args=(there, case, budget))
    process.start()
    there.close()
    try:
        row: Row = here.recv()
    except EOFError:
        row = _failed(case, "the process ended without a word; it may have run out of memory")
    finally:
        process.join()
    return row


def _send_row(connection: Connection, case: Case, budget: float) -> None:
    try:
        row = search(case, budget)
    except ConjoinError as error:
        row = _failed(case, str(error))
    except Exception as error:  # whatever goes wrong in one case is told in its row, and the others go on
        traceback.print_exc()
        row = _failed(case, f"{type(error).__name__}: {error}")
    connection.send(row)


def _failed(case: Case, error: str) -> Row:
    return Row(case.model, case.machine, case.batch_size, case.paper, error[:500], search=case.search)


@dataclass
class Table:
    """Rows as they come: each is printed, and the file with all of them written again."""

    output: Path
    command: str
    budget: float
    workers: int = 1
    before: Mapping[str, Any] = field(default_factory=dict)
    """An earlier run, as its file has it."""
    rows: list[Row] = field(default_factory=list)

    def fill(self, cases: Iterable[Case]) -> list[Row]:
        """Search all cases, several at a time where there are workers; the rows that were added."""
        before = len(self.rows)
        with ThreadPoolExecutor(self.workers) as pool:
            for row in pool.map(lambda case: search_apart(case, case.budget or self.budget), cases):
                self.rows.append(row)
                if len(self.rows) == 1:
                    print(HEADER)
                print(line(row), flush=True)
                self.write()
        return self.rows[before:]

    def write(self, **more: object) -> None:
        """Everything so far, beside where and with what it was found."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        rows = [asdict(row) for row in self.rows]
        known = {_case_of(row) for row in rows}
        kept = [row for row in self.before.get("rows", ()) if _case_of(row) not in known]
        if kept:
            runs = ("command", "date", "budget_seconds", "torch")
            told = {name: self.before[name] for name in runs}
            more = {**more, "earlier": [*self.before.get("earlier", ()), told]}
        data = {**circumstances(self.command, self.budget), **more, "rows": [*kept, *rows]}
        write_file(self.output, json.dumps(data, indent=1) + "\n", "table", ConjoinError)

    def draw(self, x_label: str, y_label: str, points: Sequence[Point]) -> None:
        """A picture beside the table, where there is something to see."""
        if points:
            self.output.with_suffix(".svg").write_text(draw(points, x_label, y_label, joined=True), encoding="utf-8")

    @property
    def status(self) -> int:
        """Of the command: 0 where every case came to a plan."""
        return int(any(row.error for row in self.rows))


def _case_of(row: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(row[name] for name in ("model", "machine", "batch_size", "search"))


HEADER = (
    f"{'model':<17} {'machine':<16} {'batch':>6} {'best named':>22} {'named ms':>9} {'dp ms':>9} {'joint ms':>9} "
    f"{'gap':>6} {'speedup':>7} {'paper':>12} {'dp waits':>8} {'cpu s':>6} {'wall s':>6} {'plans':>5} stopped"
)


def line(row: Row) -> str:
    """A row of the printed table."""
    start = f"{row.model:<17} {row.machine:<16} {row.batch_size:>6}"
    if row.error:
        return f"{start} {row.error}"
    named = "none fits" if row.best_named is None else row.best_named.name
    speedup = "-" if row.speedup is None else f"{row.speedup:.3f}"
    return (
        f"{start} {named:>22} {_shown(row.best_named):>9} {_shown(row.data_parallel):>9} {row.seconds * 1e3:>9.4g} "
        f"{_gap(row):>6} {speedup:>7} {row.paper:>12} {_waits(row.data_parallel):>8} {row.search_cpu_seconds:>6.1f} "
        f"{row.search_seconds:>6.1f} {row.num_plans:>5} {row.stopped}"
    )


def _shown(named: Named | None) -> str:
    """Milliseconds; with a mark where the memory does not suffice."""
    return "-" if named is None else f"{named.seconds * 1e3:.4g}{'' if named.fits else '!'}"


def _gap(row: Row) -> str:
    """How far the step is from its bound."""
    return "-" if row.bound is None else f"{max(0.0, row.seconds / row.bound - 1):.1%}"


def _waits(named: Named | None) -> str:
    """The part of a step in which devices wait for communication: more than that only cheaper computing can save."""
    return "-" if named is None or named.waiting is None else f"{named.waiting / named.seconds:.1%}"


def speedups(rows: Iterable[Row]) -> list[Point]:
    """Speed-ups against devices, a line for every model on every kind of machine."""
    return [
        Point(f"{row.model}, {row.machine.partition(':')[0]}", row.devices, row.speedup, line(row))
        for row in rows
        if row.speedup is not None
    ]


def circumstances(command: str, budget: float) -> dict[str, object]:
    """Where and with what the figures were taken."""
    return {
        "command": command,
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, one thread, cores shared with other work",
        "budget_seconds": budget,
        "costs": "the profiles that ship, then the devices' peaks: predicted, not measured",
    }


def options(about: str, name: str, models: Sequence[str]) -> ArgumentParser:
    """The options that every table has."""
    parser = ArgumentParser(description=about, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models), help="which rows; all where none is named")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of the process for a search")
    parser.add_argument("--workers", type=int, default=1, help="searches at a time, each with a core for itself")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--add", action="store_true", help="to the rows of other cases that the file has")
    return parser


def open_table(chosen: Namespace, name: str, arguments: Sequence[str] | None) -> Table:
    """A table that names the command it was made by."""
    given = sys.argv[1:] if arguments is None else arguments
    command = " ".join((f"python -m benchmarks.{name}", *given))
    before = json.loads(chosen.output.read_text(encoding="utf-8")) if chosen.add else {}
    return Table(chosen.output, command, chosen.budget, chosen.workers, before)
