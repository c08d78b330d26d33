"""Are the links what was asked for? Messages of many sizes between nodes: one way, both ways, from two ranks at once.

    python -m benchmarks.emulated_cluster.check_links [--mbit 200] [--delay-us 200] [--ahead] [--output FILE]

Each message is sent over plain TCP, timed back and forth and halved, and compared with delay + bytes / rate. Then the
times of all-reduces over Gloo are fitted by latency + bytes / rate.
"""

from __future__ import annotations

import argparse
import json
import platform
import select
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.emulated_cluster.cluster import Cluster, frame_bytes
from benchmarks.emulated_cluster.namespaces import address_of

SIZES = (1, 2**10, 2**16, 2**20, 2**24)
_PORT = 5000
_SHARED_BYTES = 2**20
"""From here on two ranks are sure to meet on their link; small messages mostly find it free."""
_ROUNDS = 15
_MAX_SECONDS = 6.0
"""How long one size may take in all: long messages are sent less often."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way of sending at one size: seconds one way, the median, beside what the link should take."""

    what: str
    num_bytes: int
    seconds: float
    expected_seconds: float

    @property
    def error(self) -> float:
        """Relative to what was expected."""
        return self.seconds / self.expected_seconds - 1


@dataclass(frozen=True, slots=True)
class Fit:
    """seconds = latency + seconds_per_byte · bytes sent by a rank, fitted with relative weights."""

    latency: float
    seconds_per_byte: float
    r_squared: float
    median_error: float


def fit_line(points: list[tuple[float, float]]) -> Fit:
    """The line through (bytes, seconds) with the least relative squares.

    >>> fit_line([(0, 1.0), (10, 2.0), (20, 3.0)]).latency
    1.0
    """
    x, y = (torch.tensor(column, dtype=torch.float64) for column in zip(*points, strict=True))
    design = torch.stack([torch.ones_like(x), x], 1) / y[:, None]
    line = torch.linalg.lstsq(design, torch.ones_like(y)[:, None]).solution.flatten()
    found = line[0] + line[1] * x
    r_squared = 1 - ((y - found) ** 2).sum() / ((y - y.mean()) ** 2).sum()
    error = ((found - y).abs() / y).median()
    latency, slope = (round(value, 15) for value in line.tolist())
    return Fit(latency, slope, r_squared.item(), error.item())


def check_links(mbit: float, delay_seconds: float, ahead: bool) -> dict[str, object]:
    """Every row and fit for a cluster of 2 nodes × 2 ranks."""
    rate = mbit * 125e3
    with Cluster(2, 2, rate, delay_seconds, ahead_of_others=ahead) as cluster:
        num_rounds = {size: max(3, min(_ROUNDS, int(_MAX_SECONDS * rate / size / 2))) for size in SIZES}
        answers = cluster.run(_exchange, num_rounds, timeout=300)
        points = {group: cluster.run(_all_reduce, group, timeout=300)[0] for group in ((0, 2), (0, 1, 2, 3))}
        traffic = cluster.traffic()
    rows = [Row(what, size, seconds, _expected(what, size, rate, delay_seconds)) for what, size, seconds in answers[0]]
    rows = [row for row in rows if row.what != "two ranks" or row.num_bytes >= _SHARED_BYTES]
    fits = {f"ranks {group}": fit_line(found) for group, found in points.items()}
    return {
        "mbit": mbit,
        "delay_seconds": delay_seconds,
        "frame_bytes": frame_bytes(cluster.links),
        "rows": rows,
        "fits": fits,
        "all_reduces": {f"ranks {group}": found for group, found in points.items()},
        "traffic": traffic,
    }


def _expected(what: str, size: int, rate: float, delay_seconds: float) -> float:
    num_sharing = 2 if what == "two ranks" else 1
    return delay_seconds + num_sharing * size / rate


def _exchange(rank: int, num_rounds: dict[int, int]) -> list[tuple[str, int, float]]:
    """On rank 0: median seconds one way of every message. Ranks 0 and 2 talk over the link, and so do 1 and 3."""
    peer = _connect(rank, (rank + 2) % 4)
    kinds: list[tuple[str, tuple[int, ...], Callable[[int], None]]] = [
        ("one way", (0, 2), lambda size: _ping(peer, rank < 2, size)),
        ("both ways", (0, 2), lambda size: _swap_twice(peer, size)),
        ("two ranks", (0, 1, 2, 3), lambda size: _swap_twice(peer, size)),
    ]
    rows = []
    for what, ranks, send in kinds:
        for size, count in num_rounds.items():
            seconds = []
            dist.barrier()
            for _ in range(count + 2 if rank in ranks else 0):  # the first ones open the window of TCP
                start = time.perf_counter()
                send(size)
                seconds.append((time.perf_counter() - start) / 2)
            rows.append((what, size, statistics.median(seconds[2:] or [0.0])))
    return rows


def _connect(rank: int, peer: int) -> socket.socket:
    """A connection of a rank of the first node with one of the second."""
    port = _PORT + rank % 2
    if rank < peer:
        with socket.create_server((address_of(0), port)) as server:
            dist.barrier()
            connection, _ = server.accept()
    else:
        dist.barrier()
        connection = socket.create_connection((address_of(0), port), timeout=30)
    connection.settimeout(60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _ping(connection: socket.socket, first: bool, size: int) -> None:
    content = bytes(size)
    if first:
        connection.sendall(content)
    _receive(connection, size)
    if not first:
        connection.sendall(content)


def _swap_twice(connection: socket.socket, size: int) -> None:
    """Send and receive at once, twice: who began the first one early waits there for the other."""
    for _ in range(2):
        to_send, to_receive, buffer = memoryview(bytes(size)), size, bytearray(2**20)
        connection.setblocking(False)
        while to_send or to_receive:
            readable, writable, _ = select.select([connection], [connection] if to_send else [], [], 60)
            if writable:
                to_send = to_send[connection.send(to_send) :]
            if readable:
                to_receive -= connection.recv_into(buffer, min(to_receive, len(buffer)))
    connection.settimeout(60)


def _receive(connection: socket.socket, size: int) -> None:
    left, buffer = size, bytearray(min(size, 2**20))
    while left:
        received = connection.recv_into(buffer, min(left, len(buffer)))
        if not received:
            raise ConnectionError(f"{left} of {size} bytes did not come")
        left -= received


def _all_reduce(rank: int, ranks: tuple[int, ...]) -> list[tuple[float, float]]:
    """Bytes that a rank sends in an all-reduce, and the median seconds of one, for many sizes.

    They follow each other without a barrier, which over links is not sharp: each waits for the one before.
    """
    group = dist.new_group(list(ranks))
    points = []
    for size in (2**k for k in range(10, 23)):
        tensor, seconds = torch.zeros(size // 4), []
        num_times = 32 if size < 2**18 else 8
        for _ in range(num_times if rank in ranks else 0):
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            seconds.append(time.perf_counter() - start)
        points.append((2 * (len(ranks) - 1) / len(ranks) * size, statistics.median(seconds[1:] or [0.0])))
    return points


def _show(found: dict[str, object]) -> None:
    rows, fits = found["rows"], found["fits"]
    assert isinstance(rows, list) and isinstance(fits, dict)
    print(f"{found['mbit']} Mbit/s, delay {found['delay_seconds']} s, frames of {found['frame_bytes']} bytes")
    for row in rows:
        print(
            f"{row.what:<10} {row.num_bytes:>9} bytes   {1e3 * row.seconds:9.3f} ms   expected "
            f"{1e3 * row.expected_seconds:9.3f} ms   {100 * row.error:+6.1f} %"
        )
    for what, fit in fits.items():
        print(
            f"all-reduce {what}: {1e3 * fit.latency:.3f} ms + bytes / {1e-6 / fit.seconds_per_byte:.2f} MB/s, "
            f"R² {fit.r_squared:.4f}, median error {100 * fit.median_error:.1f} %"
        )
    print(found["traffic"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--delay-us", type=float, default=200)
    parser.add_argument("--ahead", action="store_true", help="ranks go before other work on this host; takes root")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    found = check_links(given.mbit, given.delay_us * 1e-6, given.ahead)
    _show(found)
    if given.output:
        about = {
            "date": date.today().isoformat(),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "command": " ".join(["python -m benchmarks.emulated_cluster.check_links", *sys.argv[1:]]),
        }
        given.output.write_text(json.dumps({**about, **found}, indent=1, default=asdict) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
