"""FlexFlow's Table 3.4: simulating a plan after a change of one operator, in full and by delta simulation.

    python -m benchmarks.flexflow_table3_4 [--models nmt ...] [--devices 64 ...] [--changes 100] [--check-only]

The paper gives the seconds of a whole search by either way, so that their quotient is what one change costs in full
over what it costs by delta. Here a chain of random changes starts from data parallelism with 64 samples a device, all
devices told apart. Every change is simulated both ways, and every start and end must be equal to the last bit. Full
simulation builds the task graph and times all of it; it has the graph taken apart, as delta simulation has.

What a change needs that was never priced (an operator on new local shapes, a new route) costs either way the same, and
in a search soon becomes rare: it is priced before the clock runs. `unwarmed` is the quotient where both ways pay.

Seconds are of the process, not of the clock on the wall, so that other work on the machine counts for little.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar

import numpy as np
import torch

import zoo
from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.ir import Plan
from conjoin.machine import parse_machine
from conjoin.search import make_plan
from conjoin.sim import Change, Layouts, MachinePrices, Simulation, random_change, simulate, simulate_layouts

RESULTS = Path(__file__).parent / "results"
TABLE, CHECKED = RESULTS / "flexflow_table3_4.json", RESULTS / "flexflow_delta_check.json"
DEVICES = (4, 8, 16, 32, 64)
DEVICES_PER_NODE = 4
SAMPLES_PER_DEVICE = 64
PAPER = {
    "alexnet": ((0.11, 0.40, 1.4, 5.3, 18), (0.04, 0.13, 0.48, 1.8, 5.9)),
    "resnet-101": ((1.4, 4.5, 22, 107, 515), (0.4, 1.4, 7.3, 33, 158)),
    "inception-v3": ((14, 66, 388, 1746, 8817), (4.1, 17, 77, 298, 1278)),
    "rnntc": ((16, 91, 404, 1358, 4404), (7.5, 39, 170, 516, 1489)),
    "rnnlm": ((21, 76, 327, 1102, 3406), (9.2, 31, 121, 342, 969)),
    "nmt": ((40, 178, 998, 2698, 8982), (16, 65, 328, 701, 2190)),
}
"""Seconds of a search by full and by delta simulation, on 4 to 64 devices: Jia's thesis, Table 3.4."""
TARGETS = {"alexnet": 3.0, "resnet-101": 3.3, "inception-v3": 6.9, "rnntc": 3.0, "rnnlm": 3.6, "nmt": 4.1}
"""What the paper reaches on 64 devices."""
TASKS_PER_SECOND = 1e6

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Row:
    """One model on so many devices: means over all changes."""

    model: str
    devices: int
    tasks: int
    full_ms: float
    delta_ms: float
    speedup: float
    paper_speedup: float
    unwarmed_speedup: float
    timed_again: float
    """Share of the instructions that delta simulation times again."""
    tasks_per_second: float
    """Of full simulation."""


@dataclass
class Clocks:
    """Seconds spent, and work done, over a chain of changes."""

    full: float = 0.0
    delta: float = 0.0
    cold: float = 0.0
    num_tasks: int = 0
    num_timed: int = 0
    num_instructions: int = 0


def paper_speedup(model: str, devices: int) -> float:
    full, delta = PAPER[model]
    place = DEVICES.index(devices)
    return full[place] / delta[place]


def data_parallel(model: str, devices: int) -> Plan:
    """The plan at which the changes start."""
    found = zoo.build(model, device="meta", batch_size=SAMPLES_PER_DEVICE * devices)
    graph = capture(found.model.train(), found.batch, found.loss)
    return make_plan(graph, parse_machine(_machine(devices)), "data-parallel")


def _machine(devices: int) -> str:
    return f"k80-cluster:{devices // DEVICES_PER_NODE}"


def start(model: str, devices: int) -> Simulation:
    prices = MachinePrices(parse_machine(_machine(devices)), CostModel())
    return simulate(data_parallel(model, devices), prices, unfold=True)


def in_full(simulation: Simulation) -> Simulation:
    """The same layouts, simulated from the beginning."""
    program = simulation.program
    layouts = Layouts(program.leaves, tuple(program.choices), program.results)
    return simulate_layouts(program.skeleton, layouts, program.drafts, program.regathered)


def same(one: Simulation, other: Simulation) -> bool:
    """Whether two timelines are equal to the last bit, every start and every end of them."""
    if one.timeline.ticks != other.timeline.ticks:
        return False
    shape = one.classes.shape
    times = zip(one.timeline.times(), other.timeline.times(), strict=True)
    return all(
        np.array_equal(np.broadcast_to(mine, shape), np.broadcast_to(theirs, shape))
        for (_, *found), (_, *wanted) in times
        for mine, theirs in zip(found, wanted, strict=True)
    )


def legal_change(simulation: Simulation, rng: Random) -> Change:
    """The first change drawn that is legal."""
    while True:
        change = random_change(simulation.program, rng)
        if change is not None:
            return change


def timed(make: Callable[[], Made]) -> tuple[Made, float]:
    before = time.process_time()
    made = make()
    return made, time.process_time() - before


def measure(model: str, devices: int, num_changes: int, seed: int = 0) -> Row:
    """Time a chain of changes both ways, and compare the timelines."""
    simulation, rng, clocks = start(model, devices), Random(seed), Clocks()
    gc.collect()
    gc.freeze()
    for _ in range(num_changes):
        change = legal_change(simulation, rng)
        clocks.cold += timed(partial(simulation.change, change))[1]
        simulation, seconds = timed(partial(simulation.change, change))
        full, full_seconds = timed(partial(in_full, simulation))
        clocks.delta, clocks.full = clocks.delta + seconds, clocks.full + full_seconds
        clocks.num_tasks += full.num_tasks
        clocks.num_timed += simulation.timeline.num_timed
        clocks.num_instructions += full.timeline.num_timed
        if not same(simulation, full):
            raise AssertionError(f"{model} on {devices} devices: delta and full simulation differ after {change}")
    gc.unfreeze()
    return _row(model, devices, clocks, num_changes)


def _row(model: str, devices: int, clocks: Clocks, num_changes: int) -> Row:
    new = clocks.cold - clocks.delta
    return Row(
        model=model,
        devices=devices,
        tasks=round(clocks.num_tasks / num_changes),
        full_ms=round(1e3 * clocks.full / num_changes, 3),
        delta_ms=round(1e3 * clocks.delta / num_changes, 3),
        speedup=round(clocks.full / clocks.delta, 2),
        paper_speedup=round(paper_speedup(model, devices), 2),
        unwarmed_speedup=round((clocks.full + new) / clocks.cold, 2),
        timed_again=round(clocks.num_timed / clocks.num_instructions, 4),
        tasks_per_second=round(clocks.num_tasks / clocks.full),
    )


def check(model: str, devices: int, num_changes: int, seed: int = 0) -> int:
    """Compare the timelines over a chain of changes; how many of them were compared."""
    simulation, rng = start(model, devices), Random(seed)
    for _ in range(num_changes):
        simulation = simulation.change(legal_change(simulation, rng))
        if not same(simulation, in_full(simulation)):
            raise AssertionError(f"{model} on {devices} devices: delta and full simulation differ")
    return num_changes


def check_all(cases: Sequence[tuple[str, int]], num_changes: int, output: Path, workers: int) -> None:
    """Check all cases, several at a time, the largest first; keep what held so far."""
    found = {}
    with ProcessPoolExecutor(workers) as pool:
        largest_first = sorted(cases, key=lambda case: -case[1])
        waiting = {pool.submit(timed_check, *case, num_changes): case for case in largest_first}
        for done in as_completed(waiting):
            (model, devices), (number, seconds) = waiting[done], done.result()
            print(f"{model:<13} {devices:>7}: {number} changes, delta and full equal to the last bit", flush=True)
            found[model, devices] = {
                "model": model, "devices": devices, "equal_changes": number, "seconds": round(seconds, 1),
            }  # fmt: skip
            kept = [found[case] for case in cases if case in found]
            output.write_text(json.dumps({**circumstances(), "cases": kept}, indent=1) + "\n", encoding="utf-8")


def timed_check(model: str, devices: int, num_changes: int) -> tuple[int, float]:
    """A check, and how long it took."""
    return timed(partial(check, model, devices, num_changes))


def too_slow(rows: Sequence[Row]) -> list[str]:
    """What is behind the targets, which are for the largest number of devices."""
    largest = [row for row in rows if row.devices == DEVICES[-1]]
    return [
        *(f"{r.model}: {r.speedup} times, not {TARGETS[r.model]}" for r in largest if r.speedup < TARGETS[r.model]),
        *(f"{r.model}: {r.tasks_per_second:,} tasks/s" for r in largest if r.tasks_per_second < TASKS_PER_SECOND),
    ]


def show(row: Row) -> None:
    print(
        f"{row.model:<13} {row.devices:>7} {row.tasks:>8,} {row.full_ms:>8.2f} {row.delta_ms:>8.2f} "
        f"{row.speedup:>8.2f} {row.paper_speedup:>6.2f} {row.unwarmed_speedup:>9.2f} {row.timed_again:>11.1%} "
        f"{row.tasks_per_second:>12,}",
        flush=True,
    )


def circumstances() -> dict[str, str]:
    """Where and with what the figures were taken."""
    return {
        "command": " ".join(["python -m benchmarks.flexflow_table3_4", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, one thread, cores shared with other work",
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(PAPER), default=tuple(PAPER))
    parser.add_argument("--devices", nargs="+", type=int, choices=DEVICES, default=DEVICES)
    parser.add_argument("--changes", type=int, default=100)
    parser.add_argument("--check-only", action="store_true", help="compare timelines, and time nothing")
    parser.add_argument("--workers", type=int, default=1, help="of a check: cases at a time")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def main() -> int:
    torch.set_num_threads(1)
    arguments = parse_arguments()
    cases = [(model, devices) for model in arguments.models for devices in arguments.devices]
    if arguments.check_only:
        check_all(cases, arguments.changes, arguments.output or CHECKED, arguments.workers)
        return 0
    print(
        f"{'model':<13} {'devices':>7} {'tasks':>8} {'full ms':>8} {'delta ms':>8} {'speed-up':>8} {'paper':>6} "
        f"{'unwarmed':>9} {'timed again':>11} {'full tasks/s':>12}"
    )
    rows, output = [], arguments.output or TABLE
    for model, devices in cases:
        rows.append(measure(model, devices, arguments.changes))
        show(rows[-1])
        result = {**circumstances(), "changes": arguments.changes, "rows": [asdict(row) for row in rows]}
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    behind = too_slow(rows)
    print("\n".join(behind) or "as fast as in the paper, or faster")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
