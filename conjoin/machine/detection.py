"""The machine this program runs on: from the running process group, else from the devices of this host."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist

from conjoin.errors import UsageError

_MAX_SHOWN = 8
"""Nodes that an error lists."""


@dataclass(frozen=True, slots=True)
class Detected:
    """What was found, the same on every rank."""

    num_nodes: int
    devices_per_node: int
    device: str
    description: str
    told: str = ""
    """What the driver calls the devices, where all are alike."""
    memory_bytes: int = 0
    """The least of them."""


@dataclass(frozen=True, slots=True)
class RankLocation:
    """Where one rank runs: the name of its host, the kind of its device, what that is called and its memory."""

    host: str
    device: str
    told: str = ""
    memory_bytes: int = 0


def find_machine() -> Detected:
    """The machine of the running process group, whose ranks must all call this; without one, that of this host."""
    if dist.is_available() and dist.is_initialized():
        return shape_of(_gather_locations())
    num_cuda_devices = torch.cuda.device_count()
    if num_cuda_devices:
        told = {torch.cuda.get_device_name(i) for i in range(num_cuda_devices)}
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(num_cuda_devices))
        name = told.pop() if len(told) == 1 else ""
        return Detected(1, num_cuda_devices, "cuda", "The CUDA devices of one host.", name, memory)
    return Detected(1, 1, "cpu", "The CPU of one host.")


def _gather_locations() -> list[RankLocation]:
    """The location of every rank, in the order of the ranks."""
    locations: list[RankLocation] = [RankLocation("", "")] * dist.get_world_size()
    device = _device_of_group()
    told = torch.cuda.get_device_name() if device == "cuda" else ""
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory if told else 0
    dist.all_gather_object(locations, RankLocation(socket.gethostname(), device, told, memory))
    return locations


def _device_of_group() -> str:
    """The kind of device that the group's fastest backend serves: a config reads `cpu:gloo,cuda:nccl`."""
    return "cuda" if "cuda:nccl" in dist.get_backend_config().split(",") and torch.cuda.is_available() else "cpu"


def shape_of(locations: Sequence[RankLocation]) -> Detected:
    """Nodes and devices from the locations of the ranks: each node has equally many, numbered without a gap.

    >>> found = shape_of([RankLocation(host, "cpu") for host in "aabb"])
    >>> found.num_nodes, found.devices_per_node
    (2, 2)
    """
    runs = [(host, len(list(run))) for host, run in groupby(location.host for location in locations)]
    _check_contiguous(runs)
    _check_equal(runs)
    device = _one_device(locations)
    told = {location.told for location in locations}
    name = told.pop() if len(told) == 1 else ""
    memory = min(location.memory_bytes for location in locations)
    return Detected(len(runs), runs[0][1], device, f"A process group of {_ranks_on_nodes(runs)}.", name, memory)


def _check_contiguous(runs: Sequence[tuple[str, int]]) -> None:
    if len({host for host, _ in runs}) < len(runs):
        raise UsageError(
            f"The machine of {_ranks_on_nodes(runs)} was asked for, and the ranks of a node do not follow each other: "
            f"in the order of ranks there are {_listed(runs)}. "
            f"Devices are numbered node by node, and a plan would take slow links for fast ones. "
            f"Start the processes so that each node gets consecutive ranks, as torchrun does."
        )


def _check_equal(runs: Sequence[tuple[str, int]]) -> None:
    if len({count for _, count in runs}) > 1:
        raise UsageError(
            f"The machine of {_ranks_on_nodes(runs)} was asked for, and the nodes have unequal numbers of ranks: "
            f"there are {_listed(runs)}. "
            f"A machine has the same number of devices in every node. Start equally many processes on each node."
        )


def _one_device(locations: Sequence[RankLocation]) -> str:
    ranks = {location.device: rank for rank, location in reversed(list(enumerate(locations)))}
    if len(ranks) > 1:
        found = ", ".join(f"{device} (first at rank {rank})" for device, rank in sorted(ranks.items()))
        raise UsageError(
            f"The machine of {_plural(len(locations), 'rank')} was asked for, and the ranks have devices of several "
            f"kinds: {found}. A machine has devices of one kind. Start the processes on nodes that are alike."
        )
    return locations[0].device


def _ranks_on_nodes(runs: Sequence[tuple[str, int]]) -> str:
    num_ranks, num_nodes = sum(count for _, count in runs), len({host for host, _ in runs})
    return f"{_plural(num_ranks, 'rank')} on {_plural(num_nodes, 'node')}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _listed(runs: Sequence[tuple[str, int]]) -> str:
    more = f" and {len(runs) - _MAX_SHOWN} more" if len(runs) > _MAX_SHOWN else ""
    return ", ".join(f"{count} on {host[:60]!r}" for host, count in runs[:_MAX_SHOWN]) + more
