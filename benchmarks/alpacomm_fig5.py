"""AlpaComm's Figure 5: 1 GB from one device to all devices of 1 to 4 on one host, then of 1 to 4 hosts with two each.

    python -m benchmarks.alpacomm_fig5        # writes results/alpacomm_fig5.json

Predicted at 10 Gb/s between hosts, without latency and with free copies inside a host. The paper: send/receive grows
with the number of devices, Alpa and broadcasts stay on one host; on several hosts only broadcasts do, and Alpa drops
at three, where parts are uneven.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.alpacomm import BYTES_PER_SECOND, CHUNKS, HEADER, Row, compare, grid, layout, write_result

SHAPE = (1 << 28,)
"""1 GB of 4 bytes each."""
MESHES = [(1, devices) for devices in (1, 2, 3, 4)] + [(hosts, 2) for hosts in (1, 2, 3, 4)]
"""Hosts and devices of each, of the two panels."""


def rows() -> list[Row]:
    found = []
    for hosts, devices in MESHES:
        source, target = grid(1, 1, 0, 0), grid(hosts, devices, 1, 1)
        paper = "ours and Alpa within 1 % of one device" if hosts == 1 else "ours nearly flat"
        name = f"1 -> {hosts} x {devices}"
        found.append(compare(name, SHAPE, (layout("R"), source), (layout("R"), target), paper))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    found = rows()
    print(HEADER, *(row.shown() for row in found), sep="\n")
    settings = {"bytes_per_second": BYTES_PER_SECOND, "chunks": CHUNKS}
    write_result("alpacomm_fig5", found, arguments, __doc__ or "", **settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
