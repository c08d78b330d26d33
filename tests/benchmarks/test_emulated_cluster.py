"""The emulated cluster: exact times of the switch's clock, honest links, and that nothing is left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.emulated_cluster import Cluster, Link
from benchmarks.emulated_cluster.memory import LiveStorages
from benchmarks.emulated_cluster.run_plan import Training, losses_alone, run_plan
from benchmarks.emulated_cluster.switch import Clock
from conjoin import capture
from conjoin.errors import RankError, UsageError
from conjoin.machine import Machine
from conjoin.search import make_plan
from tests.cli.processes import Forked
from tests.waiting import HUNG_SECONDS


def _why_not() -> str:
    """Why this host cannot emulate a cluster; empty where it can."""
    try:
        with Cluster(1, 1, 1e6):
            return ""
    except (UsageError, AttributeError, OSError) as error:
        return str(error)


needs_namespaces = pytest.mark.skipif(bool(_WHY := _why_not()), reason=_WHY or "possible here")


def test_an_idle_link_takes_delay_plus_bytes_over_rate() -> None:
    clock = Clock([Link(1000.0, 0.5)] * 2)
    assert clock.send(10.0, 0, 1, 1) == 10.501
    assert clock.send(20.0, 0, 1, 4000) == 24.5


def test_directions_do_not_disturb_each_other_but_ranks_of_a_node_do() -> None:
    clock = Clock([Link(1000.0, 0.5)] * 3)
    assert clock.send(0.0, 0, 1, 1000) == clock.send(0.0, 1, 0, 1000) == 1.5
    assert clock.send(0.0, 0, 2, 1000) == 2.5, "both leave by one card"
    assert clock.send(0.0, 2, 1, 1000) == 2.5, "both arrive at one card"


def test_the_slower_card_decides() -> None:
    assert Clock([Link(1000.0, 0.0), Link(100.0, 1.0)]).send(0.0, 0, 1, 100) == 1.5
    assert Clock([Link(100.0, 1.0), Link(1000.0, 0.0)]).send(0.0, 0, 1, 100) == 1.5


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Cluster(17, 1, 1e6), "17 nodes × 1 ranks"),
        (lambda: Cluster(2, 33, 1e6), "2 nodes × 33 ranks"),
        (lambda: Cluster(0, 1, 1e6), "0 nodes"),
        (lambda: Cluster(2, 1, 200.0), "200 bytes/s"),
        (lambda: Cluster(2, 1, 1e6, 200.0), "200 s was asked for"),
        (lambda: Cluster(2, 1, [1e6]), "1 rates or delays were given for 2 nodes"),
        (lambda: Cluster(2, 1, 1e6).run(print, timeout=1), "a cluster that is not there"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make()


def _place(rank: int) -> tuple[str, Machine, int]:
    return socket.gethostname(), Machine.detect(), torch.get_num_threads()


@needs_namespaces
def test_every_rank_is_on_its_node() -> None:
    with Cluster(2, 2, 1e8) as cluster, Cluster(2, 1, 1e8) as other:
        places = cluster.run(_place, timeout=60)
        assert [place[0] for place in other.run(_place, timeout=60)] == ["node0", "node1"]
        assert cluster.machine.fingerprint() == places[0][1].fingerprint()
    assert [place[0] for place in places] == ["node0", "node0", "node1", "node1"]
    assert all(num_threads == 1 for _, _, num_threads in places)


def _seconds_of(rank: int, size: int, pairs: tuple[tuple[int, int], ...]) -> float:
    """The least time of a message back and forth between the ranks of a pair, halved."""
    peers = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    tensor, seconds = torch.zeros(size, dtype=torch.uint8), []
    for _ in range(8):
        dist.barrier()
        start = time.perf_counter()
        if rank in peers:
            turns = (dist.send, dist.recv) if rank < peers[rank] else (dist.recv, dist.send)
            for turn in turns:
                turn(tensor, peers[rank])
        seconds.append((time.perf_counter() - start) / 2)
    return min(seconds)


@needs_namespaces
@pytest.mark.parametrize("size", [1, 100_000])
def test_a_message_takes_as_long_as_was_asked_for(size: int) -> None:
    rate, delay = 4e6, 10e-3
    with Cluster(2, 2, rate, delay) as cluster:
        across = cluster.run(_seconds_of, size, ((0, 2),), timeout=60)[0]
        inside = cluster.run(_seconds_of, size, ((0, 1),), timeout=60)[0]
        assert cluster.traffic().num_dropped == 0
    expected = delay + size / rate
    assert expected <= across < 3 * expected, "a loaded host is later, but nothing may be early"
    assert inside < expected


def _fail(rank: int) -> None:
    if rank == 1:
        raise ZeroDivisionError("one over nothing")
    dist.barrier()


def _sleep(rank: int) -> None:
    time.sleep(60)


def _leave_a_child(rank: int) -> int:
    return subprocess.Popen(["sleep", "60"]).pid


def _are_gone(cluster: Cluster) -> bool:
    end = time.monotonic() + 5
    while cluster.processes() and time.monotonic() < end:
        time.sleep(0.05)
    return not cluster.processes()


@needs_namespaces
def test_nothing_is_left_after_errors_a_timeout_or_a_forgotten_child() -> None:
    with Cluster(2, 1, 1e8) as cluster:
        with pytest.raises(RankError, match=r"(?s)Rank 1 failed.*one over nothing"):
            cluster.run(_fail, timeout=60)
        with pytest.raises(RankError, match=r"Rank 0, 1 did not end within the 0\.5 s"):
            cluster.run(_sleep, timeout=0.5)
        children = cluster.run(_leave_a_child, timeout=60)
        assert {*children} <= {*cluster.processes()}
    assert _are_gone(cluster)
    assert not any("link" in line for line in Path("/proc/net/dev").read_text().splitlines())


@needs_namespaces
def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import os, time\nfrom benchmarks.emulated_cluster import Cluster\n"
        "with Cluster(2, 1, 1e8) as cluster:\n"
        "    print(*cluster._inodes, flush=True)\n"
        "    cluster.run(lambda rank: os.write(1, b'up\\n') and time.sleep(60), timeout=60)\n"
    )
    parent = Forked(tmp_path, "parent", ())
    cluster = Cluster(2, 1, 1e8)
    cluster._inodes = {int(word) for word in parent.stdout.readline().split()}
    assert parent.stdout.readline() == "up\n"
    assert cluster.processes()
    parent.send_signal(signal.SIGKILL)
    parent.communicate(HUNG_SECONDS)
    assert parent.returncode == -signal.SIGKILL and _are_gone(cluster)


@needs_namespaces
@pytest.mark.parametrize("strategy", ["data-parallel", "megatron"])
def test_a_plan_trains_as_on_one_device(strategy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    batch = (torch.randn(8, 16), torch.randn(8, 16))
    graph = capture(model, batch, functional.mse_loss)
    training = Training(model, batch, "adam", num_warmup=1, num_steps=3)
    with Cluster(2, 2, 2e7, 1e-4) as cluster:
        figures = run_plan(cluster, make_plan(graph, cluster.machine, strategy), training, timeout=120)
    assert figures.losses == pytest.approx(losses_alone(graph, training), rel=1e-5)
    assert len(figures.step_seconds) == 3 and figures.seconds_per_step > 2e-4
    whole = 4 * sum(x.numel() for x in model.parameters())
    for memory in figures.memory:
        assert memory.gradients == memory.parameters and memory.optimizer_state > 2 * memory.parameters
        assert memory.peak > memory.parameters + memory.gradients + memory.optimizer_state
        assert (memory.parameters == whole) == (strategy == "data-parallel")


def test_live_storages_are_counted_once_and_until_they_end() -> None:
    outside = torch.zeros(1000)
    with LiveStorages([outside]) as live:
        first = torch.zeros(100)
        views = first[:50], first.view(10, 10), outside[:10]
        assert live.now() == 400 and len(views) == 3
        second = torch.ones(50)
        del second
        assert (live.now(), live.peak) == (400, 600)
        live.start_anew()
        assert live.peak == 400
        del first, views
        assert live.now() == 0
