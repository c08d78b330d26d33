"""Unity's Table 2 with our own switches: how long the exact core takes for ResNeXt-50 with parts of it switched off.

    python -m benchmarks.unity_table2                       # writes results/unity_table2.json
    python -m benchmarks.unity_table2 --gpus 6 --limit 30

Unity takes away graph splitting, then its cache, then dynamic programming. Here the layouts with the least sum are
found for every cut of the mesh into two units,

    all             as the joint search does it
    no dominance    choices are kept that another one cannot be worse than, whatever their neighbours choose
    no cache        besides, equal layers are worked out again and again
    no elimination  branch and bound, with bounds from tables that leave variables out

each in a process of its own, with a limit of CPU seconds. All that end find the same least sum.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.search_table import RESULTS, captured, circumstances
from benchmarks.unity_fig14 import GPUS_PER_NODE, PUBLISHED
from conjoin.cost import CostModel
from conjoin.machine import parse_machine
from conjoin.search import Objective, OperatorSeconds, Problem, ReshardSeconds, Space, Table, Tables, branch_and_bound
from conjoin.search import cuts as cuts_of
from conjoin.sim import MachinePrices, take_graph_apart

NAME = "unity_table2"
MODEL = "resnext-50"
PAPER = {6: "57s, 4m01s, 37m01s", 12: "1m47s, 11m15s, >1h", 24: "3m00s, >1h, >1h", 48: "5m55s, >1h, >1h"}
"""All, without splitting, without cache and splitting; without dynamic programming none ends."""


class Forgetful(Tables):
    """Works out every sum and minimum again, though it keeps the tables themselves."""

    def minimum(
        self, parts: Sequence[tuple[tuple[int, ...], Table]], sizes: tuple[int, ...]
    ) -> tuple[Table, NDArray[np.integer[Any]]]:
        self._minima.clear()
        return super().minimum(parts, sizes)


def least(gpus: int, *, dominance: bool = True, cache: bool = True, elimination: bool = True) -> float:
    """The least sum of seconds over all cuts into two units."""
    known = PUBLISHED[MODEL]
    machine = parse_machine(f"summit:{gpus // GPUS_PER_NODE}")
    graph = captured(MODEL, known.samples_per_gpu * gpus)
    skeleton, prices = take_graph_apart(graph)[0], MachinePrices(machine, CostModel(), known.optimizer)
    operators, found = OperatorSeconds(prices), []
    for units in cuts_of(machine.mesh, 2):
        tables = Tables() if cache else Forgetful()
        space = Space(units, machine.mesh, ReshardSeconds(units, machine.mesh, prices), operators, tables)
        problem = Problem(skeleton, space, Objective(), with_dominated=not dominance)
        if elimination:
            found.append(problem.solve().total)
        else:
            found.append(branch_and_bound(problem.sizes, problem.factors, max_visited=sys.maxsize).total)
    return min(found)


SWITCHES: dict[str, Callable[[int], float]] = {
    "all": least,
    "no dominance": lambda gpus: least(gpus, dominance=False),
    "no cache": lambda gpus: least(gpus, dominance=False, cache=False),
    "no elimination": lambda gpus: least(gpus, dominance=False, cache=False, elimination=False),
}


@dataclass(frozen=True, slots=True)
class Row:
    """How long one way took; None where it did not end within the limit."""

    gpus: int
    switched: str
    cpu_seconds: float | None
    least_sum: float | None
    paper: str


def measure(gpus: int, switched: str, limit: float) -> Row:
    """One way in a process of its own, ended by the system when its CPU seconds are used up."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, gpus, switched, limit))
    process.start()
    there.close()
    try:
        seconds, total = here.recv()
    except EOFError:
        seconds = total = None
    process.join()
    return Row(gpus, switched, seconds, total, PAPER.get(gpus, ""))


def _send(connection: Connection, gpus: int, switched: str, limit: float) -> None:
    used = int(process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(limit), used + int(limit) + 5))
    started = process_time()
    try:
        total = SWITCHES[switched](gpus)
    except MemoryError:
        return
    connection.send((process_time() - started, total))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=list(PAPER), help="multiples of six")
    parser.add_argument("--limit", type=float, default=300.0, help="CPU seconds for each")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{NAME}.json")
    chosen = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    rows = []
    for gpus in chosen.gpus:
        for switched in SWITCHES:
            rows.append(measure(gpus, switched, chosen.limit))
            row = rows[-1]
            took = f"> {chosen.limit:g} s" if row.cpu_seconds is None else f"{row.cpu_seconds:.1f} s"
            print(f"{gpus:>4} GPUs {switched:<16} {took:>9}   (Unity: {row.paper})", flush=True)
        sums = {round(row.least_sum, 9) for row in rows if row.gpus == gpus and row.least_sum is not None}
        assert len(sums) <= 1, f"the least sums differ: {sums}"
    data = {**circumstances(f"python -m benchmarks.{NAME} {' '.join(given)}".strip(), chosen.limit)}
    text = json.dumps({**data, "rows": [asdict(row) for row in rows]}, indent=1)
    chosen.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
