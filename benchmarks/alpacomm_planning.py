"""Seconds to plan a transfer between two meshes of 512 devices each, in 64 hosts of 8: all 81 pairs of 2-D layouts.

    python -m benchmarks.alpacomm_planning        # writes results/alpacomm_planning.json

The mark is a second for each. Told are process seconds on one core, the median and the most of all pairs, how long one
device then takes to list its own messages, and by how much the fullest host is above the least that any plan could have
it send or take.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from time import process_time

from benchmarks.alpacomm import ITEMSIZE, RESULTS, layout
from conjoin.comm import Grid, plan_transfer
from conjoin.machine import Axis, Mesh

HOSTS, PER_HOST = 64, 8
SHAPE = (4096, 2048)
SPECS = ("R R", "S0 R", "S1 R", "R S0", "R S1", "S01 R", "R S01", "S0 S1", "S1 S0")
"""All 2-D layouts of a mesh of two axes: 0 between hosts, 1 inside them."""
MARK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Row:
    send: str
    receive: str
    seconds: float
    listing: float
    """Seconds in which the first device that sends lists what it sends and gets, round by round."""
    messages: int
    above_bound: float
    """How many times the least that the fullest host has to send or take."""


def grid(first_host: int) -> Grid:
    """A mesh of 512 devices as AlpaComm writes it."""
    mesh = Mesh((Axis("0", HOSTS, True), Axis("1", PER_HOST)))
    places = itertools.product(range(HOSTS), range(PER_HOST))
    devices = [(first_host + host) * PER_HOST + place for host, place in places]
    return Grid(mesh, tuple(devices), tuple(device // PER_HOST for device in devices))


def row(send: str, receive: str, shape: tuple[int, ...] = SHAPE) -> Row:
    """Planned once, for device 0 of the senders."""
    sides = (layout(send), grid(0)), (layout(receive), grid(HOSTS))
    begin = process_time()
    plan = plan_transfer(shape, ITEMSIZE, *sides)
    seconds = process_time() - begin
    begin = process_time()
    messages = sum(len(messages) for messages in plan.rounds(0))
    listing = process_time() - begin
    return Row(send, receive, round(seconds, 3), round(listing, 3), messages, round(plan.most / plan.bound, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "alpacomm_planning.json")
    given = parser.parse_args()
    rows = []
    for send, receive in itertools.product(SPECS, SPECS):
        rows.append(row(send, receive))
        print(f"{send:6} -> {receive:6} {rows[-1].seconds:7.3f} s planned, {rows[-1].listing:7.3f} s listed")
    seconds = [each.seconds for each in rows]
    summary = {
        "pairs": len(rows), "median_seconds": round(statistics.median(seconds), 3), "most_seconds": max(seconds),
        "above_a_second": sum(each > MARK_SECONDS for each in seconds),
        "most_listing": max(each.listing for each in rows),
        "most_above_bound": max(each.above_bound for each in rows),
    }  # fmt: skip
    print(json.dumps(summary))
    given.output.write_text(json.dumps({
        "command": f"python -m benchmarks.alpacomm_planning {' '.join(sys.argv[1:])}".strip(),
        "date": str(date.today()), "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(), "load_average": os.getloadavg()[0], "shape": SHAPE,
        "devices": [HOSTS * PER_HOST] * 2, "summary": summary, "rows": [asdict(each) for each in rows],
    }, indent=1) + "\n", encoding="utf-8")  # fmt: skip


if __name__ == "__main__":
    main()
