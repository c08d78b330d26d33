"""Loss curves of a plan in mixed precision against one device in float32, on text that a small grammar writes.

    python -m benchmarks.precision_curves [--steps 200] [--seeds 5] [--plan-seeds 1] [--output FILE]

A GPT of two layers learns to continue the text, letter by letter. One device trains it in float32 from several seeds:
how far their curves lie apart is the noise that a change of seed makes. Then plans of two ranks (Gloo) train it from
the first of these seeds in other precisions. A curve is the mean loss of each tenth of the run. It is within the noise
when it is nearer to that of one device with the same seed than the standard deviation over seeds, in every tenth but
the first, in which all seeds fall alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import conjoin
from conjoin.runtime import launch
from zoo.gpt import Gpt, GptConfig
from zoo.tokens import next_token_loss

LETTERS = " .abcdefghijklmnopqrstuvwxyz,;:!"
LENGTH, BATCH = 32, 16
CONFIG = GptConfig(layers=2, width=32, heads=2, length=LENGTH, vocabulary=len(LETTERS), dropout=0.0)
PLANS = (("bf16-mixed", "fsdp"), ("bf16-mixed,reduce=bf16", "data-parallel"), ("fp8-mixed", "fsdp"))
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


def batches(steps: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """For every step windows of the text, and the same a letter further."""
    letters = torch.tensor([LETTERS.index(letter) for letter in text(2000, seed=0)])
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(letters) - LENGTH - 1, (steps, BATCH), generator=generator)
    windows = letters[starts.unsqueeze(-1) + torch.arange(LENGTH + 1)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in windows]


def model_of(seed: int) -> nn.Module:
    """The model with its first values."""
    torch.manual_seed(seed)
    return Gpt(CONFIG).train()


def trained(step: Any, parameters: Any, given: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    """The loss of every step."""
    optimizer, losses = torch.optim.AdamW(parameters, lr=3e-3), []
    for batch in given:
        optimizer.zero_grad()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(seed: int, steps: int) -> list[float]:
    """One device, by plain torch."""
    model = model_of(seed)
    return trained(lambda x, y: next_token_loss(model(x), y), model.parameters(), batches(steps, seed))


def by_plan(precision: str, strategy: str, seeds: Sequence[int], steps: int) -> list[list[float]]:
    """Two ranks, for every seed."""
    example = batches(1, 0)[0]
    plan = conjoin.plan(model_of(0), example, "local:2", loss=next_token_loss, strategy=strategy, precision=precision)

    def program(rank: int) -> list[list[float]]:
        torch.set_num_threads(1)
        found = []
        for seed in seeds:
            step = conjoin.load(plan, model_of(seed), device="cpu")
            found.append(trained(step, step.parameters(), batches(steps, seed)))
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
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--plan-seeds", type=int, default=1)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    own = [alone(seed, asked.steps) for seed in range(asked.seeds)]
    rows = {}
    for precision, strategy in PLANS:
        found = compared(own, by_plan(precision, strategy, range(asked.plan_seeds), asked.steps))
        rows[f"{precision} {strategy}"] = found
        ends = f"{found['curve'][-1]:.4f} against {found['one device'][-1]:.4f}"
        print(f"{precision:<24} {strategy:<14} {ends}, {found['worst off / noise']:.2f} of the noise", flush=True)
    if asked.output is not None:
        where = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        command = " ".join(["python -m benchmarks.precision_curves", *sys.argv[1:]])
        about = {"command": command, "date": date.today().isoformat(), **where}
        told = {**about, "steps": asked.steps, "seeds": asked.seeds, "rows": rows}
        asked.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
