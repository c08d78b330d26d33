"""One set of weights, several shapes and both modes: each step is that of the plain model."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
from conjoin.errors import PlanError, RankError, UsageError
from conjoin.ir import Plan, Substitution, model_mark
from conjoin.machine import parse_machine
from conjoin.rules import Index, Library
from conjoin.runtime import launch, run_ranks
from conjoin.runtime.communicator import Communicator
from conjoin.runtime.other_programs import MAX_PROGRAMS
from conjoin.search import make_plan
from conjoin.search.contest import make_variant
from conjoin.search.rewrites import rewritten, ways_of
from tests.ir.wording import assert_three_sentences
from tests.runtime.side_by_side import Call, Case, check, module_of, others_of


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        b, length, width = x.shape
        q, k, v = (t.view(b, length, 4, width // 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, length, width))
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Words(nn.Module):
    """A small transformer over words, with dropout."""

    def __init__(self, width: int = 8, words: int = 12, length: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(2)), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def word_loss(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


class Pictures(nn.Module):
    """Convolutions with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.25), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


def words(batch: int, length: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(12, (2, batch, length), generator=generator)
    return ids[0], ids[1]


def pictures(batch: int, size: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, size, size, generator=generator).double(), torch.arange(batch) % 3


def case_of(kind: str, ranks: int, strategy: str) -> Case:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model: nn.Module = (Words() if kind == "words" else Pictures()).double()
    loss = word_loss if kind == "words" else functional.cross_entropy
    batch = words(8) if kind == "words" else pictures(8)
    graph = conjoin.capture(model.train(), batch, loss, check=False)
    return Case(model, loss, make_plan(graph, parse_machine(f"local:{ranks}"), strategy))


TEXT = [
    Call(True, words(8)),
    Call(True, words(5, seed=1)),
    Call(False, words(8, seed=2)),
    Call(True, words(3, 8, seed=3)),
    Call(False, words(1, 5, seed=4)),
    Call(True, words(8, seed=5)),
]


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, "single"), (2, "fsdp"), (4, "data-parallel"), (4, "fsdp+recompute=full"), (4, "megatron:tp=2,dp=2"),
        (2, "data-parallel+micro=2"),
    ],
)  # fmt: skip
def test_every_shape_and_mode_is_that_of_the_plain_model(ranks: int, strategy: str) -> None:
    case = case_of("words", ranks, strategy)
    calls = TEXT
    if "micro" in strategy:  # each draws for itself
        for part in case.model.modules():
            part.p = 0.0 if isinstance(part, nn.Dropout) else None
        batch = words(8)
        graph = conjoin.capture(case.model.train(), batch, word_loss, check=False)
        case = Case(case.model, word_loss, make_plan(graph, parse_machine(f"local:{ranks}"), strategy))
    check(case, calls)
