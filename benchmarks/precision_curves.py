"""Loss curves of plans in mixed precision against one device, on text that a small grammar writes.

    python -m benchmarks.precision_curves [--models gpt,...] [--steps 200] [--seeds 5] [--plan-seeds 1] [--output FILE]

Six kinds of models of two layers learn from the text: to continue it letter by letter (GPT, LLaMA and one with
experts), to find letters that are hidden and to tell whether the second half follows the first (BERT), or to tell the
next letter from a picture of those before it (ViT, ResNet). One device trains each by plain torch from several seeds:
how far their curves lie apart is the noise that a change of seed makes. Then plans of two ranks (Gloo) train it from
the first of these seeds in other precisions, by strategies that are dealt to them in turn. One device does so in
float32, but for `bf16`, which rounds the parameters themselves: there it is in bfloat16, too. A curve is the mean loss
of each tenth of the run. It is within the noise when it is nearer to that of one device with the same seed than the
standard deviation over seeds, in every tenth but the first, in which all seeds fall alike.

The file is read first, and rows of other models in it are kept.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

import conjoin
from conjoin.errors import ConjoinError
from conjoin.runtime import launch
from zoo.bert import Bert, BertConfig, pretraining_loss
from zoo.gpt import Gpt, GptConfig
from zoo.llama import Llama, LlamaConfig
from zoo.moe import Mixtral, MoeConfig, moe_loss
from zoo.resnet import ResNet, ResNetConfig
from zoo.tokens import next_token_loss
from zoo.vit import VisionTransformer, ViTConfig

LETTERS = " .abcdefghijklmnopqrstuvwxyz,;:!"
LENGTH, BATCH = 32, 16
HIDDEN = 5
"""Letters of a window that BERT has to find."""
PRECISIONS = ("bf16", "bf16-mixed", "bf16-mixed,reduce=bf16", "fp16-mixed", "fp8-mixed")
PARTS = 10
_WORDS = {
    "who": ("the cat", "a dog", "my old friend", "the king", "nobody"),
    "does": ("sees", "hears", "follows", "forgets"),
    "whom": ("the moon", "a small bird", "the long road", "every song"),
    "where": ("", " by the river", " in the rain", " at night"),
}


def text(num_sentences: int, seed: int) -> str:
    """Sentences of the grammar: who does whom where.

    >>> text(2, seed=1)
    'a dog sees the long road. the king forgets every song at night. '
    """
    rng = random.Random(seed)
    pick = lambda part: rng.choice(_WORDS[part])
    return "".join(f"{pick('who')} {pick('does')} {pick('whom')}{pick('where')}. " for _ in range(num_sentences))


def windows(steps: int, seed: int) -> Tensor:
    """For every step as many windows of the text as a batch has samples, each a letter longer than what is read."""
    letters = torch.tensor([LETTERS.index(letter) for letter in text(2000, seed=0)])
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(letters) - LENGTH - 1, (steps, BATCH), generator=generator)
    return letters[starts.unsqueeze(-1) + torch.arange(LENGTH + 1)]


def continued(window: Tensor) -> tuple[Tensor, ...]:
    """Letters, and the same a letter further."""
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def hidden(window: Tensor) -> tuple[Tensor, ...]:
    """Letters of which some are hidden, the second half of every other sample from another one; which half each is of;
    the letters that are hidden; and whether the halves belong together."""
    letters, half = window[:, :-1].clone(), LENGTH // 2
    follows = torch.arange(BATCH) % 2
    letters[::2, half:] = letters[::2, half:].roll(1, 0)
    places = torch.rand(letters.shape, generator=torch.Generator().manual_seed(0)).argsort(1) < HIDDEN
    words = letters.where(places, torch.tensor(-100))
    halves = (torch.arange(LENGTH) >= half).long().expand_as(letters).contiguous()
    return letters.masked_fill(places, LETTERS.index("!")), halves, words, follows


def pictured(window: Tensor) -> tuple[Tensor, ...]:
    """A picture in which every column has a dot at its letter, and the letter after it."""
    return one_hot(window[:, :-1], len(LETTERS)).float().unsqueeze(1), window[:, -1].contiguous()


@dataclass(frozen=True, slots=True)
class Task:
    """A model, what it learns, and strategies of two ranks that are dealt to precisions in turn."""

    make: Callable[[], nn.Module]
    batch: Callable[[Tensor], tuple[Tensor, ...]]
    loss: Callable[..., Tensor]
    num_targets: int = 1
    strategies: tuple[str, ...] = ("data-parallel", "fsdp", "megatron:tp=2,sp", "pipeline:pp=2,micro=2")

    def batches(self, steps: int, seed: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, ...]]:
        made = (self.batch(window) for window in windows(steps, seed))
        return [tuple(x.to(dtype) if x.is_floating_point() else x for x in batch) for batch in made]

    def model(self, seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with its first values."""
        torch.manual_seed(seed)
        return self.make().train().to(dtype)

    def plans(self) -> list[tuple[str, str]]:
        """Every precision with two strategies, one further each time."""
        dealt = zip(cycle(PRECISIONS), cycle(self.strategies), strict=True)
        return list(islice(dealt, 2 * len(PRECISIONS)))


def _tasks() -> dict[str, Task]:
    letters = len(LETTERS)
    gpt = GptConfig(layers=2, width=32, heads=2, length=LENGTH, vocabulary=letters, dropout=0.0)
    llama = LlamaConfig(layers=2, width=32, feed_forward=64, heads=2, kv_heads=1, vocabulary=letters, length=LENGTH)
    experts = MoeConfig(width=32, expert_width=48, experts=4, choices=2, gated=True)
    bert = BertConfig(layers=2, width=32, heads=2, vocabulary=letters, positions=LENGTH, dropout=0.0)
    vit = ViTConfig(2, 32, 64, 2, patch=8, dropout=0.0, channels=1, image=LENGTH, classes=letters)
    resnet = ResNetConfig((1, 1), group_width=8, stem=8, channels=1, image=LENGTH, classes=letters)
    by_expert, by_sample = ("data-parallel", "fsdp", "expert:ep=2"), ("data-parallel", "fsdp", "zero1")
    return {
        "gpt": Task(lambda: Gpt(gpt), continued, next_token_loss),
        "llama": Task(lambda: Llama(llama), continued, next_token_loss),
        "bert": Task(lambda: Bert(bert), hidden, pretraining_loss, num_targets=2),
        "vit": Task(lambda: VisionTransformer(vit), pictured, cross_entropy),
        "resnet": Task(lambda: ResNet(resnet), pictured, cross_entropy, strategies=by_sample),
        "moe": Task(lambda: Mixtral(llama, experts), continued, moe_loss, strategies=by_expert),
    }


TASKS = _tasks()


def trained(step: Any, parameters: Any, given: Sequence[tuple[Tensor, ...]], scaled: bool = False) -> list[float]:
    """The loss of every step."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=3e-3), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scaled)
    for batch in given:
        optimizer.zero_grad()
        loss = step(*batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses


def alone(task: Task, seed: int, steps: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """One device, by plain torch."""
    model, num_inputs = task.model(seed, dtype), -task.num_targets
    step = lambda *batch: task.loss(model(*batch[:num_inputs]), *batch[num_inputs:])
    return trained(step, model.parameters(), task.batches(steps, seed, dtype))


def by_plan(task: Task, precision: str, strategy: str, seeds: Sequence[int], steps: int) -> list[list[float]]:
    """Two ranks, for every seed."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    example = task.batches(1, 0)[0]
    plan = conjoin.plan(task.model(0), example, "local:2", loss=task.loss, strategy=strategy, precision=precision)

    def program(rank: int) -> list[list[float]]:
        torch.set_num_threads(1)
        found = []
        for seed in seeds:
            step = conjoin.load(plan, task.model(seed, dtype), device="cpu")
            scaled = precision.startswith("fp16")
            found.append(trained(step, step.parameters(), task.batches(steps, seed, dtype), scaled))
        return found

    one, other = launch(2, program)
    assert one == other, "the loss is that of the whole batch on every rank"
    return one


def curve(losses: Sequence[float], parts: int = PARTS) -> list[float]:
    """The mean loss of each part of a run."""
    size = len(losses) // parts
    return [fmean(losses[i * size : (i + 1) * size]) for i in range(parts)]


def compared(own: Sequence[Sequence[float]], plan: Sequence[Sequence[float]], parts: int = PARTS) -> dict[str, Any]:
    """How far the curves of a plan are from those of one device, and how far seeds are from each other."""
    mine, theirs = _columns(plan, parts), _columns(own[: len(plan)], parts)
    noise = [stdev(column) for column in _columns(own, parts)]
    off = [fmean(found) - fmean(wanted) for found, wanted in zip(mine, theirs, strict=True)]
    worst = max(abs(distance) / spread for distance, spread in list(zip(off, noise, strict=True))[1:])
    return {
        "curve": [round(fmean(column), 4) for column in mine],
        "one device": [round(fmean(column), 4) for column in theirs],
        "off": [round(distance, 4) for distance in off],
        "noise of seeds": [round(spread, 4) for spread in noise],
        "worst off / noise": round(worst, 2),
        "within noise": worst < 1,
    }


def _columns(runs: Sequence[Sequence[float]], parts: int) -> list[tuple[float, ...]]:
    """For each part of a run its mean loss with every seed."""
    return list(zip(*(curve(losses, parts) for losses in runs), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(TASKS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plan-seeds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    path: Path | None = asked.output
    rows: dict[str, Any] = {} if path is None or not path.exists() else json.loads(path.read_text("utf-8"))["rows"]
    for name in asked.models.split(","):
        task = TASKS[name]
        own = [alone(task, seed, asked.steps) for seed in range(asked.seeds)]
        narrow = [alone(task, seed, asked.steps, torch.bfloat16) for seed in range(asked.seeds)]
        for precision, strategy in task.plans():
            try:
                made = by_plan(task, precision, strategy, range(asked.plan_seeds), asked.steps)
            except ConjoinError as error:
                print(f"{name:<7} {precision:<24} {strategy:<22} refused: {str(error)[:80]}", flush=True)
                continue
            found = rows[f"{name} {precision} {strategy}"] = compared(narrow if precision == "bf16" else own, made)
            ends = f"{found['curve'][-1]:.4f} against {found['one device'][-1]:.4f}"
            worst = f"{found['worst off / noise']:.2f} of the noise"
            print(f"{name:<7} {precision:<24} {strategy:<22} {ends}, {worst}", flush=True)
    if path is not None:
        where = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        command = " ".join(["python -m benchmarks.precision_curves", *sys.argv[1:]])
        about = {"command": command, "date": date.today().isoformat(), **where}
        told = {**about, "steps": asked.steps, "seeds": asked.seeds, "rows": rows}
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
