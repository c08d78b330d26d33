"""Models that are called in several shapes and both modes, their batches, and plans for one shape of them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
from conjoin.ir import Graph, Pipeline, Plan
from conjoin.machine import parse_machine
from conjoin.runtime.program.other_plans import Key
from conjoin.search import make_plan
from tests.runtime.side_by_side import Call, Case, others_of


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, length, width = x.shape
        q, k, v = (t.view(b, length, 4, width // 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, length, width))
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Words(nn.Module):
    """A small transformer over words, with dropout."""

    def __init__(self, dropout: float, depth: int, width: int = 8, words: int = 12, length: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks, self.head = nn.ModuleList(Block(width, dropout) for _ in range(depth)), nn.Linear(width, words)

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
    model, loss, graph = captured(kind)
    return Case(model, loss, make_plan(graph, parse_machine(f"local:{ranks}"), strategy))


_WORDS = {"words": (0.25, 1), "more words": (0.25, 2), "words without dropout": (0.0, 2)}
"""Dropout and depth: segments are found where blocks are repeated, and stages need several."""


@cache
def captured(kind: str) -> tuple[nn.Module, Any, Graph]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made: nn.Module = Pictures() if kind == "pictures" else Words(*_WORDS[kind])
    model, batch = made.double().train(), pictures(8) if kind == "pictures" else words(8)
    loss = functional.cross_entropy if kind == "pictures" else word_loss
    return model, loss, conjoin.capture(model, batch, loss, check=False)


TEXT = [
    Call(True, words(8)),
    Call(True, words(5, seed=1)),
    Call(False, words(8, seed=2)),
    Call(True, words(3, 8, seed=3)),
    Call(False, words(1, 5, seed=4)),
    Call(True, words(8, seed=5)),
]


def plan_for(case: Case, batch: tuple[Tensor, Tensor]) -> Plan | Pipeline:
    dealt = [batch[:1], {}, batch[1:], {}]
    return others_of(case).find(Key.of(True, dealt), dealt).plan


class TwoHeads(nn.Module):
    """Two layers on one input, which a rule makes one of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.a(x)) + self.b(x))


def numbers(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed)).double()
    return drawn[:, :4], drawn[:, 4:]
