"""Devices that are emulated like links: an operator sleeps for as long as it is to take, and needs no core.

Importing this module registers the operator. Ranks import it too, for the block or the function that they are given.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import conjoin
from benchmarks.prediction import time_operators
from conjoin.cost import Outcome
from conjoin.machine import Mesh
from conjoin.sim import Wanted


class Asleep(torch.autograd.Function):
    """Its input again, after so many seconds; in the backward pass after twice as many."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds)
        return gradient.clone(), None


conjoin.register_operator(Asleep, "... -> ...", terms="x", sample={"seconds": (1e-6, 1e-5)})


class PacedBlock(nn.Module):
    """Some weights, and next to nothing to compute beside the sleep."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.down, self.up, self.seconds = nn.Linear(width, width // 16), nn.Linear(width // 16, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.up(torch.relu(self.down(Asleep.apply(x, self.seconds))))  # type: ignore[no-untyped-call]
        return made


def time_paced(rank: int, wanted: Wanted, mesh: Mesh) -> list[Outcome]:
    """As `time_operators`, also of calls that sleep."""
    return time_operators(rank, wanted, mesh)
