"""Ranks without a plan: joining them, and a common clock that reads the same on each."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch

from conjoin.errors import UsageError
from conjoin.machine import Mesh
from conjoin.runtime.ranks.communicator import Communicator, World
from conjoin.runtime.ranks.session import shared_session


def join_ranks() -> torch.device:
    """The device of this rank, in a process group set up from the launcher's environment unless there is one."""
    return shared_session().device


def communicator_over(mesh: Mesh) -> World:
    """What carries tensors between the running ranks, which stand on this mesh."""
    session = shared_session()
    if session.num_ranks != mesh.size:
        raise UsageError(
            f"The calibration of a machine with {mesh.size} devices was asked for, and {session.num_ranks} ranks are "
            f"running. Each rank drives one device. Start as many ranks as devices, or name a machine with "
            f"{session.num_ranks}."
        )
    return session.communicator(mesh)


class Pace:
    """The common clock of all ranks: what it reads is the same on each."""

    def __init__(self, communicator: Communicator, device: torch.device | None = None) -> None:
        self.communicator = communicator
        self.device = device or communicator.device
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
