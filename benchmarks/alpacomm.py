"""What the scripts about AlpaComm's tables share: meshes and specs as it writes them, ways to transfer, results."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from conjoin.comm import SENDER_WAYS, Form, Grid, TransferPlan, WholeSlices, plan_transfer
from conjoin.machine import Axis, Mesh
from conjoin.ops import Invariant, Layout, Split

RESULTS = Path(__file__).parent / "results"
BYTES_PER_SECOND = 10e9 / 8
"""Between two p3.8xlarge: 10 Gb/s (AlpaComm 5)."""
ITEMSIZE = 4
CHUNKS = 100
"""AlpaComm 3.1: K is about 100."""

Side = tuple[Layout, Grid]


@dataclass(frozen=True, slots=True)
class Row:
    """Predicted seconds of one transfer, by the ways of the paper and by ours."""

    name: str
    num_slices: int
    bound: float
    send_receive: float
    alpa: float
    """All-gathers, or send/receive where parts would be uneven; senders by longest first."""
    naive: float
    load_balance_only: float
    alpacomm: float
    """Broadcasts, in the better order of a depth-first and a randomized search."""
    ours: float
    paper: str

    def shown(self) -> str:
        numbers = (
            self.bound,
            self.send_receive,
            self.alpa,
            self.naive,
            self.load_balance_only,
            self.alpacomm,
            self.ours,
        )
        return (
            f"{self.name:18}{self.num_slices:7}" + "".join(f"{number:10.3f}" for number in numbers) + f"   {self.paper}"
        )


HEADER = f"{'':18}{'slices':>7}" + "".join(
    f"{name:>10}" for name in ("bound", "send/recv", "Alpa", "naive", "balance", "AlpaComm", "ours")
) + "   paper"  # fmt: skip


def grid(hosts: int, per_host: int, first_device: int, first_host: int, places: int | None = None) -> Grid:
    """A mesh as the paper writes it: hosts along its first axis, their devices along its second.

    Where hosts have more places for devices, the first ones are taken.
    """
    mesh = Mesh((Axis("0", hosts, True), Axis("1", per_host)))
    taken = [divmod(i, per_host) for i in range(hosts * per_host)]
    devices = tuple(first_device + host * (places or per_host) + place for host, place in taken)
    return Grid(mesh, devices, tuple(first_host + host for host, _ in taken))


def layout(spec: str) -> Layout:
    """A sharding spec such as `S0 R S1`: what splits each dim, `S01` for both axes.

    >>> layout("R S01 R")
    (('0', S(1)), ('1', S(1)))
    """
    placed = {"0": Invariant(), "1": Invariant()} | {
        axis: Split(dim) for dim, each in enumerate(spec.split()) if each[0] == "S" for axis in each[1:]
    }
    return tuple(placed.items())


def compare(name: str, shape: tuple[int, ...], source: Side, target: Side, paper: str) -> Row:
    """One transfer by all ways, at 10 Gb/s and without latency."""
    plan = plan_transfer(shape, ITEMSIZE, source, target, CHUNKS)
    slices = WholeSlices(shape, source, target)
    per_element = ITEMSIZE / BYTES_PER_SECOND
    ways = {form: slices.tasks(form, per_element, CHUNKS) for form in Form}
    broadcast = ways[Form.BROADCAST]
    best = min(SENDER_WAYS[way](broadcast).seconds for way in ("depth first", "randomized"))
    gathered = ways[Form.GLOBAL_ALL_GATHER] if parts_are_even(slices) else ways[Form.SEND_RECEIVE]
    greedy = SENDER_WAYS["longest first"]
    return Row(
        name, len(slices.slices.sizes), plan.bound_seconds(BYTES_PER_SECOND), greedy(ways[Form.SEND_RECEIVE]).seconds,
        greedy(gathered).seconds, SENDER_WAYS["naive"](broadcast).seconds, greedy(broadcast).seconds, best,
        ours(plan), paper,
    )  # fmt: skip


def ours(plan: TransferPlan) -> float:
    return plan.seconds(BYTES_PER_SECOND)


def parts_are_even(slices: WholeSlices) -> bool:
    """Whether the devices that want a slice can take equal parts of it, which Alpa needs (AlpaComm 5.1.1)."""
    wanted = slices.want.count.sum(axis=1)[slices.slices.target]
    return bool((slices.slices.sizes % wanted == 0).all())


def write_result(name: str, rows: Sequence[Any], arguments: Sequence[str] | None, doc: str, **more: Any) -> None:
    """Write a result file beside the others, unless another place is asked for."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json")
    output = parser.parse_args(arguments).output
    result = {
        "command": f"python -m benchmarks.{name}",
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}; predicted, nothing is measured",
        **more,
        "rows": [asdict(row) for row in rows],
    }
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {output.name}", file=sys.stderr)
