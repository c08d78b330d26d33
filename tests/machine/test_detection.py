"""Detection: from a real group of Gloo processes, which may pretend to stand on several hosts, else from this host."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from conjoin.errors import UsageError
from conjoin.machine import Machine
from tests.ir.wording import assert_three_sentences
from tests.waiting import HUNG_SECONDS


def _run_rank(rank: int, hosts: Sequence[str | None], folder: Path) -> None:
    """One process of the group: joins it, detects, and leaves its answer in a file."""
    torch.set_num_threads(1)
    host = hosts[rank]
    if host is not None:
        socket.gethostname = lambda: host
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=len(hosts),
        timeout=timedelta(seconds=HUNG_SECONDS),
    )
    try:
        Machine.detect().save(folder / f"{rank}.toml")
    except UsageError as error:
        (folder / f"{rank}.txt").write_text(str(error))
    dist.destroy_process_group()


def detect_on(hosts: Sequence[str | None], folder: Path) -> None:
    """Run one process a host name, None for this host's own; all must end well."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_run_rank, args=(rank, hosts, folder), daemon=True) for rank in range(len(hosts))]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + HUNG_SECONDS
    try:
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in ranks] == [0] * len(ranks)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()


def the_answer(folder: Path, num_ranks: int) -> Machine:
    """The machine that every rank found."""
    (machine,) = {Machine.load(folder / f"{rank}.toml") for rank in range(num_ranks)}
    return machine


def the_error(folder: Path, num_ranks: int) -> str:
    """The error that every rank raised."""
    (message,) = {(folder / f"{rank}.txt").read_text() for rank in range(num_ranks)}
    assert_three_sentences(message)
    return message


def test_four_processes_on_this_host(tmp_path: Path) -> None:
    detect_on([None] * 4, tmp_path)
    machine = the_answer(tmp_path, 4)
    assert (machine.num_nodes, machine.devices_per_node, machine.device, machine.backend) == (1, 4, "cpu", "gloo")
    assert machine.description == "A process group of 4 ranks on 1 node."


def test_four_processes_on_two_hosts(tmp_path: Path) -> None:
    detect_on(["b", "b", "a", "a"], tmp_path)
    machine = the_answer(tmp_path, 4)
    assert (machine.num_nodes, machine.devices_per_node, machine.device) == (2, 2, "cpu")
    assert str(machine.mesh) == "n0:2 d0:2"


@pytest.mark.parametrize(
    ("hosts", "pieces"),
    [
        ("abab", ["4 ranks on 2 nodes", "1 on 'a', 1 on 'b', 1 on 'a', 1 on 'b'", "consecutive ranks"]),
        ("aaab", ["4 ranks on 2 nodes", "3 on 'a', 1 on 'b'", "equally many processes"]),
    ],
)
def test_every_rank_is_told_what_no_machine_is(tmp_path: Path, hosts: str, pieces: list[str]) -> None:
    detect_on(hosts, tmp_path)
    message = the_error(tmp_path, 4)
    assert [piece for piece in pieces if piece not in message] == []


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A group that is only said to be there: the host and the kind of device of each rank."""
    ranks: list[tuple[str, str]] = []

    def gather(places: list[object], place: Any) -> None:
        places[:] = [replace(place, host=host, device=device) for host, device in ranks]

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: len(ranks))
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "all_gather_object", gather)
    return ranks


def test_many_hosts_are_not_all_listed(group: list[tuple[str, str]]) -> None:
    group += [(f"host{i}", "cpu") for i in range(1000) for _ in range(1 + i % 2)]
    with pytest.raises(UsageError) as caught:
        Machine.detect()
    assert "1,500 ranks on 1,000 nodes" in str(caught.value) and "2 on 'host7' and 992 more" in str(caught.value)


def test_devices_of_two_kinds_are_no_machine(group: list[tuple[str, str]]) -> None:
    group += [("a", "cuda"), ("a", "cuda"), ("b", "cuda"), ("b", "cpu")]
    with pytest.raises(UsageError) as caught:
        Machine.detect()
    assert_three_sentences(caught.value)
    assert "cpu (first at rank 3), cuda (first at rank 0)" in str(caught.value)


def test_a_group_of_gpus(group: list[tuple[str, str]]) -> None:
    group += [(host, "cuda") for host in "abcd" for _ in range(6)]
    assert Machine.detect().fingerprint() == Machine.preset("summit", nodes=4).fingerprint()


@pytest.mark.parametrize(
    ("config", "has_cuda", "device"),
    [
        ("cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),
    ],
)
def test_the_backend_tells_the_device(
    monkeypatch: pytest.MonkeyPatch, config: str, has_cuda: bool, device: str
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(dist, "all_gather_object", lambda places, place: places.__setitem__(0, place))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    call_devices(monkeypatch, ["Some GPU"])
    assert Machine.detect().device == device


@pytest.mark.parametrize(
    ("num_cuda_devices", "expected"), [(0, (1, 1, "cpu")), (1, (1, 1, "cuda")), (8, (1, 8, "cuda"))]
)
def test_without_a_group(
    monkeypatch: pytest.MonkeyPatch, num_cuda_devices: int, expected: tuple[int, int, str]
) -> None:
    call_devices(monkeypatch, ["Some GPU"] * num_cuda_devices)
    machine = Machine.detect()
    assert (machine.num_nodes, machine.devices_per_node, machine.device) == expected
    assert machine.name == "detected" and not machine.nodes


def call_devices(monkeypatch: pytest.MonkeyPatch, names: list[str], num_bytes: int = 150_109_880_320) -> None:
    """Have torch tell of CUDA devices of these names."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: names[index])
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=num_bytes - index)
    )


@pytest.mark.parametrize(("told", "preset"), [("NVIDIA H200", "dgx-h200"), ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
                                              ("Tesla T4", "g4dn.12xlarge")])  # fmt: skip
def test_known_devices_have_their_speeds(monkeypatch: pytest.MonkeyPatch, told: str, preset: str) -> None:
    call_devices(monkeypatch, [told] * 4)
    found, known = Machine.detect().device_type(3), Machine.preset(preset).device_type(0)
    assert (found.peak_flops, found.memory_bandwidth) == (known.peak_flops, known.memory_bandwidth)
    assert found.memory_bytes == 150_109_880_317, "the least of what is there"


def test_devices_of_one_host_are_joined_as_such_devices_are(monkeypatch: pytest.MonkeyPatch) -> None:
    call_devices(monkeypatch, ["NVIDIA H200"] * 8)
    found, known = Machine.detect(), Machine.preset("dgx-h200")
    assert found.has_links and [link.bandwidth for link in found.topology.path(0, 7)] == [
        link.bandwidth for link in known.topology.path(0, 7)
    ]
    call_devices(monkeypatch, ["NVIDIA H200"])
    assert Machine.detect().has_links, "one device sends nothing"


def test_devices_that_differ_have_no_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    call_devices(monkeypatch, ["NVIDIA H200", "NVIDIA L40S"])
    assert not Machine.detect().nodes
