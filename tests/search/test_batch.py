"""Data parallelism splits samples, wherever a model has them: torch's own transformers have positions first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.api import verify_plan
from conjoin.frontends import capture
from conjoin.ir import LeafKind, Plan
from conjoin.machine import parse_machine
from conjoin.ops import Split
from conjoin.report import explain
from conjoin.search import make_plan

SAMPLES, WORDS, WIDTH = 4, 11, 8


class Translating(nn.Module):
    """A sequence looks at another one, of any length; of the other, only so many words count."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.look = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=batch_first)

    def forward(self, ids: Tensor, other: Tensor, lengths: Tensor, wanted: Tensor) -> Tensor:
        x, y = self.table(ids), self.table(other)
        places = torch.arange(other.shape[1 if self.look.batch_first else 0])
        found = self.look(x, y, y, key_padding_mask=places >= lengths[:, None], need_weights=False)[0]
        return functional.cross_entropy(self.head(self.layer(x + found)).flatten(0, 1), wanted.flatten())


def case(batch_first: bool, length: int, other: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(1)

    def ids(positions: int) -> Tensor:
        return torch.randint(WORDS, (SAMPLES, positions) if batch_first else (positions, SAMPLES))

    batch = ids(length), ids(other), torch.randint(1, other, (SAMPLES,)), ids(length)
    return Translating(batch_first).double(), batch


def planned(model: nn.Module, batch: Any, strategy: str) -> Plan:
    return make_plan(capture(model, batch), parse_machine("local:2"), strategy)


@pytest.mark.parametrize("lengths", [(5, 7), (SAMPLES, SAMPLES)], ids=str)
def test_samples_behind_positions_are_split_at_no_more_bytes(lengths: tuple[int, int]) -> None:
    found = [planned(*case(batch_first, *lengths), "data-parallel") for batch_first in (False, True)]
    dims = [[dict(leaf.type.layout)["d0"] for leaf in plan.graph.leaves_of(LeafKind.INPUT)] for plan in found]
    assert dims == [[Split(1), Split(1), Split(0), Split(1)], [Split(0)] * 4]
    assert explain(found[0]).bytes_of(0) == explain(found[1]).bytes_of(0)


def test_they_are_trained_as_on_one_device() -> None:
    model, batch = case(False, SAMPLES, SAMPLES)
    assert verify_plan(planned(model, batch, "fsdp"), model, batch, num_steps=2).passed


def test_features_are_no_samples() -> None:
    """What a loss takes over the whole batch is gathered, and the batch stays the first dim."""

    def contrast(y: Tensor) -> Tensor:
        return functional.cross_entropy(y @ y.T, torch.arange(6))

    model, batch = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(6, 4)
    plan = make_plan(capture(model, batch, contrast), parse_machine("local:2"), "data-parallel")
    assert [dict(leaf.type.layout) for leaf in plan.graph.leaves_of(LeafKind.INPUT)] == [{"d0": Split(0)}]
