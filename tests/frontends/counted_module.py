"""A layer with buffers whose forward is given as a function of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Counted(nn.Module):
    """A layer with a buffer, and a forward given as a function of the module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("hidden", torch.zeros(2, 4), persistent=False)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)
