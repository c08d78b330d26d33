"""Small models and plans for the tests of this room."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import parse_machine
from conjoin.search import make_plan

Batch = tuple[Tensor, Tensor]


class Mlp(nn.Module):
    """Two layers, wide in the middle; with dropout where asked."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(torch.relu(self.up(x))))


def mlp(width: int = 8, batch: int = 8, dropout: float = 0.0) -> tuple[nn.Module, Batch]:
    """The model and a batch, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mlp(width, dropout).train(), (torch.randn(batch, width), torch.randn(batch, width))


def captured(model: nn.Module, batch: Any) -> Graph:
    return capture(model, batch, functional.mse_loss)


def plan_of(model: nn.Module, batch: Any, ranks: int, strategy: str = "data-parallel") -> Plan:
    return make_plan(captured(model, batch), parse_machine(f"local:{ranks}"), strategy)
