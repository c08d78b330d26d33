"""What is drawn for a tensor goes by how it lies in memory: layers taken apart, dims parted and stages keep that order.

The plain model is the judge, with the numbers that it draws itself.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.api import make_named, verify_plan
from conjoin.frontends import capture
from tests.fuzz.comparing import machine_of

HEADS, STAGES = 4, "pipeline:pp=2"
Cut = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def copied(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Samples × heads × positions × features, side by side in memory, then cut."""
    b, t, w = y.shape
    q, k, v = y.view(b, t, 3, HEADS, w // 3 // HEADS).permute(2, 0, 3, 1, 4).contiguous()
    return q, k, v


def in_one_dim(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Samples and heads in one dim for a while, positions before them."""
    b, t, w = y.shape
    q, k, v = y.transpose(0, 1).split(w // 3, -1)
    return tuple(x.reshape(t, b * HEADS, -1).transpose(0, 1).reshape(b, HEADS, t, -1) for x in (q, k, v))


def turned(y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads before positions, then query, key and value of each."""
    b, t, _ = y.shape
    q, k, v = y.view(b, t, HEADS, -1).transpose(1, 2).chunk(3, -1)
    return q, k, v


class Attending(nn.Module):
    """Attention in which queries and keys are dropped at random. All sizes are alike, so that any order would fit."""

    def __init__(self, cut: Cut, width: int = 4 * HEADS) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(11, width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head, self._cut = nn.Linear(width, 11), cut

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = self._cut(self.mix(x))
        scores = functional.dropout(q, 0.3) @ functional.dropout(k, 0.2).transpose(-1, -2)
        y = functional.dropout(scores.softmax(-1), 0.2) @ v
        y = self.head(x + self.out(y.transpose(1, 2).contiguous().view(x.shape)))
        return functional.cross_entropy(functional.dropout(y, 0.1).flatten(0, 1), wanted.flatten())


@pytest.mark.parametrize(
    ("cut", "strategy"), [(copied, "megatron"), (in_one_dim, "megatron"), (in_one_dim, STAGES), (turned, STAGES)]
)
def test_plans_draw_what_one_device_does(cut: Cut, strategy: str) -> None:
    torch.manual_seed(1)
    model, batch = Attending(cut).double(), (torch.randint(11, (4, 4)), torch.randint(11, (4, 4)))
    plan = make_named(capture(model, batch), machine_of(2), strategy)
    assert verify_plan(plan, model, batch, num_steps=2).passed
