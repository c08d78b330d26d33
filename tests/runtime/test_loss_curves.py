"""Loops that people have, over a hundred steps: whatever number of ranks takes them, the curves are the plain loops'.

Judged by the same loop on the plain model in one process, in float64. Ranks are processes with Gloo between them, and
each part of a curve goes on from the checkpoint that the ranks before it left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import conjoin
from conjoin.runtime import launch
from zoo.gpt import Gpt, GptConfig
from zoo.tokens import next_token_loss

NUM_STEPS = 100
PARTS = ((1, range(50)), (4, range(50, 70)), (2, range(70, NUM_STEPS)))
"""How many ranks take which steps; the first and the last also evaluate, and take smaller batches."""


def sentences(step: int, size: int) -> tuple[Tensor, Tensor]:
    """Numbers at equal distances, and those that follow."""
    starts = torch.randint(0, 16, (size, 1), generator=torch.Generator().manual_seed(step))
    tokens = (starts + 3 * torch.arange(9)) % 16
    return tokens[:, :-1], tokens[:, 1:]


def make_gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt(GptConfig(layers=1, width=16, heads=2, length=8, vocabulary=16, dropout=0.0)).double()


class Writing:
    """As nanoGPT does: groups, warmup and cosine, two batches a step, clipping, an evaluation of another size."""

    strategies: ClassVar = {1: "single", 2: "fsdp", 4: "megatron:tp=2,dp=2"}
    loss = staticmethod(next_token_loss)
    make = staticmethod(make_gpt)

    @staticmethod
    def batch() -> Any:
        return sentences(0, 8)

    def __init__(self, step: nn.Module, loss: Any = None) -> None:
        decayed = [p for p in step.parameters() if p.dim() >= 2]
        others = [p for p in step.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        self.step, self._loss = step, loss

    def held(self) -> dict[str, tuple[Any, Any]]:
        return {"kept": (self.step, self.optimizer)}

    def run(self, number: int) -> list[float]:
        factor = min((number + 1) / 5, 0.5 + 0.5 * math.cos(math.pi * number / NUM_STEPS))
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        total = 0.0
        for half in range(2):
            loss = self._of(*sentences(2 * number + half, 8)) / 2
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.step.parameters(), 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [total, self._judged()] if number % 10 == 9 else [total]

    def _judged(self) -> float:
        self.step.eval()
        with torch.no_grad():
            found = self._of(*sentences(-1, 6)).item()
        self.step.train()
        return found

    def _of(self, *batch: Tensor) -> Tensor:
        return self.step(*batch) if self._loss is None else self._loss(self.step(batch[0]), batch[1])


class Residual(nn.Module):
    """A ResNet in small."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.first = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        scores: Tensor = self.last((x + self.first(x)).relu().mean((2, 3)))
        return scores


def make_residual() -> nn.Module:
    torch.manual_seed(0)
    return Residual().double().to(memory_format=torch.channels_last)


def pictures(step: int, size: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    x = torch.randn(size, 3, 6, 6, generator=draws, dtype=torch.float64)
    return x.to(memory_format=torch.channels_last), x[:, 0, ::2, ::2].mean(2).argmax(1)


class Seeing:
    """As people train a ResNet: momentum, steps of the rate, an average of the weights, which is what is evaluated."""

    strategies: ClassVar = {1: "single", 2: "data-parallel", 4: "fsdp"}
    loss = staticmethod(nn.functional.cross_entropy)
    make = staticmethod(make_residual)

    @staticmethod
    def batch() -> Any:
        return pictures(0, 8)

    def __init__(self, step: nn.Module, loss: Any = None) -> None:
        self.optimizer = torch.optim.SGD(step.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        self.average = AveragedModel(step, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
        self.step, self._loss = step, loss

    def held(self) -> dict[str, tuple[Any, Any]]:
        return {"kept": (self.step, self.optimizer), "average": (self.average.module, None)}

    def run(self, number: int) -> list[float]:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * 0.5 ** (number // 12)
        x, y = pictures(number, 5 if number % 5 == 4 else 8)  # an epoch of five batches, the last one smaller
        loss = self._of(self.step, x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.n_averaged.fill_(number)  # from the second step on it averages, after a resume too
        self.average.update_parameters(self.step)
        if number % 10 != 9:
            return [loss.item()]
        self.average.eval()
        with torch.no_grad():
            judged = self._of(self.average, *pictures(-1, 8)).item()
        self.average.train()
        return [loss.item(), judged]

    def _of(self, module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = module(x, y) if self._loss is None else self._loss(module(x), y)
        return found


KINDS: tuple[type[Writing] | type[Seeing], ...] = (Writing, Seeing)


@dataclass(frozen=True)
class Part:
    """Some steps of both loops, by some ranks."""

    plans: tuple[Any, ...]
    """Of each loop."""
    steps: range
    folder: Path


def plan_for(kind: type[Writing] | type[Seeing], ranks: int) -> Any:
    chosen = kind.strategies[ranks]
    return conjoin.plan(kind.make(), kind.batch(), f"local:{ranks}", loss=kind.loss, strategy=chosen)


def take(rank: int, part: Part) -> list[list[float]]:
    """What each loop sees in its steps, from the checkpoints that are there to those that it leaves."""
    curves = []
    for kind, plan in zip(KINDS, part.plans, strict=True):
        loop = kind(conjoin.load(plan, kind.make(), loss=kind.loss, device="cpu"))
        for name, held in loop.held().items():
            if part.steps.start:
                conjoin.load_checkpoint(part.folder / f"{kind.__name__} {name}", *held)
        curves.append([value for number in part.steps for value in loop.run(number)])
        for name, held in loop.held().items():
            conjoin.save_checkpoint(part.folder / f"{kind.__name__} {name}", *held)
    return curves


def test_a_hundred_steps_by_one_rank_by_four_and_by_two_are_those_of_the_plain_loops(tmp_path: Path) -> None:
    plain = []
    for kind in KINDS:
        loop = kind(kind.make(), kind.loss)
        plain.append([value for number in range(NUM_STEPS) for value in loop.run(number)])
        assert len(plain[-1]) == NUM_STEPS + 10 and plain[-1][-2] != plain[-1][0]
    curves: list[list[float]] = [[], []]
    for ranks, steps in PARTS:
        part = Part(tuple(plan_for(kind, ranks) for kind in KINDS), steps, tmp_path)
        found = [take(0, part)] if ranks == 1 else launch(ranks, take, part)
        assert all(each == found[0] for each in found), "every rank sees the same"
        for curve, more in zip(curves, found[0], strict=True):
            curve += more
    for curve, expected in zip(curves, plain, strict=True):
        assert curve == pytest.approx(expected, rel=1e-9)
