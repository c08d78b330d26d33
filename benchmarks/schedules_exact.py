"""Are found schedules the best there are? A solver is asked for a faster one, for up to 4 stages and 8 micro-batches.

    python -m benchmarks.schedules_exact [--seconds 5]        # writes results/schedules_exact.json

z3 gets the rows as starts with what each waits for, rows of one owner one after another, and memory: micro-batches are
alike, so that they may run in order at each stage, and the forward of one starts after the weight gradient of the one
that has to make room for it. "Faster" is a quarter of a second less, since all times are multiples of it. When it says
that there is none, the schedule is the best; when its time is up, nothing is said. It shares nothing with the search.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import combinations, product
from pathlib import Path
from time import process_time

import z3

from conjoin.schedules import Memory, Problem, Times, chain, check, find_schedule, one_each

RESULT = Path(__file__).parent / "results" / "schedules_exact.json"
QUARTERS = 4
KINDS = ("F", "I", "W")

Name = tuple[str, int, int]
"""Of a row: kind, stage, micro-batch."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pipeline: what was found, what the search says of it, and what the solver says."""

    stages: int
    micro_batches: int
    times: Times
    limits: tuple[int, ...]
    seconds: float
    bound: float
    proven: bool
    steps: int
    cpu_seconds: float
    solver: str
    """`best`, `not best` or `unknown`."""


def waits(row: Name, stages: int, limits: Sequence[int]) -> Iterator[Name]:
    """The rows of the same stage that a row waits for; `limits` are micro-batches in flight."""
    kind, s, m = row
    if m:
        yield kind, s, m - 1
    if kind == "F" and m >= limits[s]:
        yield "W", s, m - limits[s]
    if kind != "F":
        yield ("F" if kind == "I" else "I"), s, m


def faster(pipeline: Problem, limits: Sequence[int], seconds: float) -> z3.Solver:
    """Constraints that only a schedule of less than so many seconds fulfils."""
    solver, times = z3.Solver(), pipeline.times
    stages, num = len(pipeline.owners), pipeline.num_micro_batches
    takes = {"F": times.forward, "I": times.input_gradient, "W": times.weight_gradient}
    start = {(kind, s, m): z3.Int(f"{kind}{s}.{m}") for kind, s, m in product(KINDS, range(stages), range(num))}
    end = {row: begin + round(takes[row[0]][row[1]] * QUARTERS) for row, begin in start.items()}
    for row, begin in start.items():
        solver.add(begin >= 0, end[row] <= round(seconds * QUARTERS) - 1)
        solver.add(*(begin >= end[before] for before in waits(row, stages, limits)))
    for s in range(stages - 1):
        for kind, source, target, travel in (
            ("F", s, s + 1, times.activations[s]),
            ("I", s + 1, s, times.gradients[s]),
        ):
            come = [z3.Int(f"{kind}{source}>{target}.{m}") for m in range(num)]
            for m in range(num):
                begins = [end[kind, source, m], *come[m - 1 : m]]  # one transfer after another
                solver.add(start[kind, target, m] >= come[m])
                solver.add(*(come[m] >= begin + round(travel * QUARTERS) for begin in begins))
    for s in range(stages):
        for one, other in combinations([row for row in start if row[1] == s], 2):
            if one[0] != other[0]:
                solver.add(z3.Or(start[one] >= end[other], start[other] >= end[one]))
    return solver


def judge(stages: int, micro_batches: int, times: Times, limits: tuple[int, ...], seconds: float) -> Row:
    """Find a schedule and ask the solver for a faster one, for so many seconds."""
    memory = Memory.in_flight(stages, limits)
    pipeline = Problem.of(one_each(stages), micro_batches, times, memory)
    begin = process_time()
    found = find_schedule(pipeline, max_steps=20_000)
    taken = process_time() - begin
    check(found.schedule, memory)
    solver = faster(pipeline, limits, found.seconds)
    solver.set("timeout", round(seconds * 1000))
    said = {"unsat": "best", "sat": "not best"}.get(str(solver.check()), "unknown")
    return Row(stages, micro_batches, times, limits, found.seconds, found.bound, found.proven, found.steps, taken, said)


def alike() -> Iterator[tuple[int, int, Times, tuple[int, ...]]]:
    """Stages that all take a second for each kind of row, with the memory of 1F1B, more, and twice that."""
    for stages, count, transfer in product((2, 3, 4), (2, 4, 6, 8), (0.0, 0.5, 1.0)):
        times = Times.alike(stages, chain(stages), (1, 1, 1), transfer)
        one_f_one_b = tuple(range(stages, 0, -1))
        for limits in dict.fromkeys((one_f_one_b, (stages,) * stages, (2 * stages - 1,) * stages)):
            yield stages, count, times, limits


def drawn(count: int, seed: int = 0) -> Iterator[tuple[int, int, Times, tuple[int, ...]]]:
    """Stages with times and memory of their own."""
    draw = random.Random(seed)
    for _ in range(count):
        stages, num = draw.choice((2, 3)), draw.choice((2, 3, 4))
        rows = [tuple(draw.randint(1, 8) / QUARTERS for _ in range(stages)) for _ in KINDS]
        travel = [tuple(draw.randint(0, 8) / QUARTERS for _ in range(stages - 1)) for _ in range(2)]
        yield stages, num, Times(*rows, *travel), tuple(draw.randint(1, stages + 1) for _ in range(stages))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each question to the solver")
    parser.add_argument("--drawn", type=int, default=400, help="how many pipelines with times of their own")
    parser.add_argument("--output", type=Path, default=RESULT)
    asked = parser.parse_args()
    rows = []
    for case in (*alike(), *drawn(asked.drawn)):
        rows.append(judge(*case, asked.seconds))
        print(rows[-1], flush=True)
    told = [row.solver for row in rows]
    proven, best, worse, open_ = sum(row.proven for row in rows), *map(told.count, ("best", "not best", "unknown"))
    print(f"{len(rows)} pipelines, {proven} proven; by the solver {best} are best, {worse} are not, {open_} unknown")
    head = {
        "command": f"python -m benchmarks.schedules_exact --seconds {asked.seconds:g} --drawn {asked.drawn}",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "z3": z3.get_version_string(),
    }
    lines = ",\n  ".join(json.dumps(asdict(row)) for row in rows)  # one a line: there are hundreds
    text = json.dumps(head, indent=1).removesuffix("\n}") + f',\n "rows": [\n  {lines}\n ]\n}}\n'
    asked.output.write_text(text, encoding="utf-8")
    return int("not best" in told)


if __name__ == "__main__":
    sys.exit(main())
