"""What collectives are reckoned to take on GPUs, against what people measured with nccl-tests.

    python -m benchmarks.collectives    # prints tables, writes results/collectives.json

The first table has every published row with its source; a row is a machine, a collective, the bytes of its result and
the microseconds that it took. The second shows what is reckoned on 8 to 1,024 H100, and by which of NCCL's algorithms.
Nothing here is fitted to a row.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median

from conjoin.cost import Groups, Way, nccl_ways
from conjoin.machine import NETWORK, DeviceType, Link, Machine, NodeKind

RESULTS = Path(__file__).parent / "results" / "collectives.json"
GB, KIB, MIB, GIB = 1e9, 2**10, 2**20, 2**30
A100 = DeviceType("A100-SXM4-40GB", "cuda", 40 * GIB, 1555 * GB, (("float32", 19.5e12), ("bfloat16", 312e12)))
SIZES = (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
NODES = (1, 2, 8, 32, 128)


@dataclass(frozen=True, slots=True)
class Published:
    """A row that somebody published."""

    machine: Machine
    kind: str
    num_bytes: int
    microseconds: float
    source: str
    without: str = ""
    """An algorithm that was not in use there."""


def bus_row(machine: Machine, kind: str, num_bytes: int, bus: float, source: str) -> Published:
    """A row that is published as GB/s over each link of a ring."""
    rounds = 2 if kind == "all-reduce" else 1
    sent = rounds * num_bytes * (machine.num_devices - 1) / machine.num_devices
    return Published(machine, kind, num_bytes, sent / bus / GB * 1e6, source)


def a100_cluster(num_nodes: int, num_cards: int) -> Machine:
    """Eight A100 on NVSwitch that share some cards of 200 Gb/s."""
    links = [Link((str(i), "nvswitch"), 300 * GB, 0.5e-6, "NVLink") for i in range(8)]
    cards = [f"nic{i * num_cards // 8}" for i in range(8)]
    links += [Link((str(i), card), 32 * GB, 0.5e-6, "PCIe") for i, card in enumerate(cards)]
    links += [Link((card, NETWORK), 25 * GB, 0.75e-6, "InfiniBand") for card in dict.fromkeys(cards)]
    kind = NodeKind("node", num_nodes, (A100,) * 8, tuple(links), ("nvswitch", *dict.fromkeys(cards)))
    return Machine("8 x A100, four HDR cards", num_nodes, 8, "cuda", nodes=(kind,))


def published() -> Iterator[Published]:
    """Rows of nccl-tests, each from a public page."""
    h100, h200 = Machine.preset("dgx-h100", 1), Machine.preset("dgx-h200", 1)
    yield bus_row(h100, "all-reduce", 8 * GIB, 480.0, "NVIDIA, nccl-tests issue 212: peak with NVLink SHARP")
    yield bus_row(h100, "all-gather", 8 * GIB, 370.0, "NVIDIA, nccl-tests issue 212: all but all-reduces")
    yield bus_row(h100, "all-reduce", 8 * GIB, 476.0, "nccl-tests issue 290: one node")
    yield bus_row(h200, "all-reduce", 4 * GIB, 475.0, "nccl-tests issue 272: peak")
    yield bus_row(a100_cluster(3, 4), "all-reduce", 128 * MIB, 96.0, "nccl-tests issue 119: peak")
    curve = {
        32 * KIB: 18.66, 64 * KIB: 18.95, 128 * KIB: 19.25, 256 * KIB: 19.54, 512 * KIB: 20.39, MIB: 27.76,
        2 * MIB: 40.66, 4 * MIB: 53.24, 8 * MIB: 81.16, 16 * MIB: 121.33, 32 * MIB: 195.4, 128 * MIB: 700.25,
        256 * MIB: 1366.17, 512 * MIB: 2671.6, GIB: 5252.64,
    }  # fmt: skip
    for size, microseconds in curve.items():  # NVLink as H100 has it; the rate is a ring's
        yield Published(h100, "all-reduce", size, microseconds, "Mooncake pull request 3484: 8 x H20", "NVLS")


def quickest(machine: Machine, kind: str, num_bytes: int, without: str = "") -> Way:
    ways = nccl_ways(Groups.along(machine, machine.mesh.names), kind)
    return min((way for way in ways if not without or without not in way.name), key=lambda way: way.seconds(num_bytes))


def main() -> int:
    rows, off = [], []
    print(f"{'machine':<26} {'collective':<14} {'bytes':>11} {'measured us':>12} {'reckoned':>10} {'ratio':>6}  by")
    for row in published():
        way = quickest(row.machine, row.kind, row.num_bytes, row.without)
        reckoned = way.seconds(row.num_bytes) * 1e6
        off.append(abs(reckoned / row.microseconds - 1))
        rows.append({**asdict(row), "machine": str(row.machine), "reckoned": reckoned, "way": way.name})
        print(
            f"{row.machine.name:<26} {row.kind:<14} {row.num_bytes:>11} {row.microseconds:>12.1f} {reckoned:>10.1f} "
            f"{reckoned / row.microseconds:>6.2f}  {way.name}; {row.source}"
        )
    print(f"off by {median(off):.1%} in the median, {max(off):.1%} at worst\n")
    reckoned_rows = []
    for kind in ("all-reduce", "all-gather"):
        for num_nodes in NODES:
            machine = Machine.preset("dgx-h100", num_nodes)
            found = [(size, quickest(machine, kind, size)) for size in SIZES]
            where = {"devices": machine.num_devices, "kind": kind}
            reckoned_rows += [
                {**where, "bytes": size, "seconds": way.seconds(size), "way": way.name} for size, way in found
            ]
            told = "  ".join(f"{way.seconds(size) * 1e6:.0f} {way.name}" for size, way in found)
            print(f"{kind:<11} {machine.num_devices:>5} H100, us for 64 KiB to 1 GiB: {told}")
    facts = {
        "machine": platform.platform(), "python": platform.python_version(), "date": date.today().isoformat(),
        "command": "python -m benchmarks.collectives", "median_error": median(off), "worst_error": max(off),
    }  # fmt: skip
    found = {**facts, "published": rows, "reckoned": reckoned_rows}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(max(off) > 0.2)


if __name__ == "__main__":
    sys.exit(main())
