"""Ranks without a plan: joining them, and a common clock that reads the same on each."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist

from conjoin.errors import UsageError
from conjoin.machine import Mesh
from conjoin.runtime.communicator import Communicator, ProcessGroups
from conjoin.runtime.threads import alone


def join_ranks() -> torch.device:
    """The device of this rank, in a process group set up from the launcher's environment unless there is one."""
    if not dist.is_initialized() and dist.is_torchelastic_launched():
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if not torch.cuda.is_available() or (dist.is_initialized() and dist.get_backend() == dist.Backend.GLOO):
        return torch.device("cpu")
    index = dist.get_node_local_rank(dist.get_rank()) if dist.is_initialized() else torch.cuda.current_device()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def communicator_over(mesh: Mesh) -> Communicator:
    """What carries tensors between the running ranks, which stand on this mesh."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1
    if num_ranks != mesh.size:
        raise UsageError(
            f"The calibration of a machine with {mesh.size} devices was asked for, and {num_ranks} ranks are running. "
            f"Each rank drives one device. Start as many ranks as devices, or name a machine with {num_ranks}."
        )
    return ProcessGroups(mesh) if dist.is_initialized() else alone(mesh)


class Pace:
    """The common clock of all ranks: what it reads is the same on each."""

    def __init__(self, communicator: Communicator, device: torch.device | None = None) -> None:
        self.communicator = communicator
        self.device = device or _device_of(communicator)
        """Where work has to be over before a clock is read: that of the collectives unless told otherwise."""
        self._everyone = communicator.mesh.names
        communicator.prepare(self._everyone)
        self._start = time.perf_counter()

    def largest(self, *values: float) -> list[float]:
        """The largest of the ranks' values, for each of them."""
        held = torch.tensor(values, dtype=torch.float64, device=self.device)
        self.communicator.all_reduce(held, self._everyone, largest=True).wait()
        return held.tolist()

    def together(self) -> None:
        """Return when all ranks have come here."""
        self.largest(0.0)

    def elapsed(self) -> float:
        """Seconds since the slowest rank began."""
        return self.largest(time.perf_counter() - self._start)[0]

    def time(self, call: Callable[[], object], repeats: int = 1) -> float:
        """Seconds of one call on the slowest rank, from a block of calls that starts together.

        On the CPU each call is looked at and the median taken, so that a rank put aside for a moment spoils one call.
        On other devices calls only queue up, and what the whole queue took is divided by their number.
        """
        self._finish()
        self.together()
        marks = [time.perf_counter()]
        for _ in range(repeats):
            call()
            marks.append(time.perf_counter())
        self._finish()
        if self.device.type == "cpu":
            return median(self.largest(*(after - before for before, after in pairwise(marks))))
        return self.largest((time.perf_counter() - marks[0]) / repeats)[0]

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _device_of(communicator: Communicator) -> torch.device:
    on_cuda = isinstance(communicator, ProcessGroups) and dist.get_backend() == dist.Backend.NCCL
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu")
