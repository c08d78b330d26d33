"""Our schedules against the tables of `torch.distributed.pipelining`, played with transfers, at equal memory.

    python -m benchmarks.schedules_torch        # writes results/schedules_torch.json

Each table of torch (GPipe, 1F1B, looped breadth-first, interleaved, interleaved zero-bubble, ZBV, DualPipeV) is taken
as it is and played: a forward, an input and a weight gradient take a second each, a transfer none, a quarter, or a
whole one. Ours is what `find_schedule` finds for the same owners of stages within what the table holds at each owner.
DualPipeV runs a forward and a backward together; here one follows the other.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import process_time
from types import SimpleNamespace

import torch
from torch.distributed.pipelining import schedules as theirs

from conjoin.schedules import Kind, Memory, Problem, Row, Schedule, Times, chain, check, find_schedule, play

RESULT = Path(__file__).parent / "results" / "schedules_torch.json"
COMPUTES = tuple(map(str, (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)))
TABLES = (
    (theirs.ScheduleGPipe, 1),
    (theirs.Schedule1F1B, 1),
    (theirs.ScheduleLoopedBFS, 2),
    (theirs.ScheduleInterleaved1F1B, 2),
    (theirs.ScheduleInterleavedZeroBubble, 2),
    (theirs.ScheduleZBVZeroBubble, 2),
    (theirs.ScheduleDualPipeV, 2),
)
"""Schedules of torch, and how many stages each owner has."""


@dataclass(frozen=True, slots=True)
class Compared:
    """A table of torch and ours: seconds of a step."""

    table: str
    owners: int
    micro_batches: int
    transfer: float
    theirs: float
    ours: float
    name: str
    bound: float
    cpu_seconds: float


def their_table(kind: type, owners: int, stages_each: int, num: int) -> Schedule:
    """A schedule of torch as one of ours; the table of its 1F1B counts some forwards from 1 instead of 0.

    >>> print(their_table(theirs.Schedule1F1B, 2, 1, 2))
    F0.0 F0.1 B0.0 B0.1
    F1.0 B1.0 F1.1 B1.1
    """
    count = owners * stages_each
    facts = {"num_stages": count, "group_size": owners, "group_rank": 0, "submod": None, "has_backward": True}
    stages = [
        SimpleNamespace(stage_index=i * owners, is_first=i == 0, is_last=False, **facts) for i in range(stages_each)
    ]
    made = kind(stages[0], num) if issubclass(kind, theirs.PipelineScheduleSingle) else kind(stages, num)
    belongs, table = [0] * count, []
    for owner in range(owners):
        actions = [part for action in made.pipeline_order[owner] if action for part in action.sub_actions or (action,)]
        rows = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions]
        rows = [row for row in rows if row[0] in COMPUTES]
        first = min(m for letter, _, m in rows if letter == "F")
        table.append(tuple(Row(Kind(letter), stage, m - first * (letter == "F")) for letter, stage, m in rows))
        for _, stage, _ in rows:
            belongs[stage] = owner
    return Schedule(tuple(belongs), num, tuple(table), chain(count), kind.__name__)


def compare(table: Schedule, transfer: float, max_steps: int = 2000) -> Compared:
    """Ours for the same owners, within the same memory."""
    times = Times.alike(table.num_stages, table.edges, transfer=transfer)
    memory = Memory.in_flight(table.num_stages, check(table).held)
    begin = process_time()
    found = find_schedule(Problem.of(table.owners, table.num_micro_batches, times, memory), max_steps)
    taken = process_time() - begin
    check(found.schedule, memory)
    return Compared(
        table.name, table.num_owners, table.num_micro_batches, transfer, play(table, times).seconds, found.seconds,
        found.schedule.name, found.bound, round(taken, 3),
    )  # fmt: skip


def rows() -> Iterator[Compared]:
    for kind, stages_each in TABLES:
        for owners, num in ((2, 4), (2, 8), (3, 6), (4, 8), (4, 16), (8, 16)):
            try:
                table = their_table(kind, owners, stages_each, num)
            except ValueError as error:
                print(f"{kind.__name__} of {owners} owners and {num} micro-batches: torch has none ({error})")
                continue
            for transfer in (0.0, 0.25, 1.0):
                yield compare(table, transfer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT)
    asked = parser.parse_args()
    found = []
    for row in rows():
        found.append(row)
        mark = "" if row.ours <= row.theirs + 1e-9 else "  BEHIND"
        print(
            f"{row.table:30}{row.owners:3}{row.micro_batches:4}{row.transfer:6.2f}{row.theirs:9.2f}{row.ours:9.2f}"
            f"{row.theirs / row.ours:7.3f}x  {row.name}{mark}",
            flush=True,
        )
    behind = sum(row.ours > row.theirs + 1e-9 for row in found)
    print(f"{len(found)} pipelines, ours behind in {behind}")
    result = {
        "command": "python -m benchmarks.schedules_torch",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "rows": [asdict(row) for row in found],
    }
    asked.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(behind > 0)


if __name__ == "__main__":
    sys.exit(main())
