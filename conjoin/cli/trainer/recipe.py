"""How `run` trains: the optimizer, what becomes of the learning rate, clipping, how many batches make a step."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from math import cos, pi
from typing import TYPE_CHECKING

from conjoin.errors import UsageError

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of every step, as a part of the one that was asked for.

    It rises from nothing over `warmup` steps, and then falls to nothing over the others, along a line or half a cosine,
    or stays: what transformers' schedules of these names do.

    >>> [round(Schedule.parse("cosine:2").factor(step, 6), 2) for step in range(6)]
    [0.0, 0.5, 1.0, 0.85, 0.5, 0.15]
    """

    kind: str
    warmup: int = 0

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """From `cosine`, or `cosine:100` with a warmup of 100 steps."""
        kind, colon, steps = text.partition(":")
        if kind not in SCHEDULES or (colon and not (steps.isascii() and steps.isdigit() and len(steps) < 10)):
            near = get_close_matches(kind, SCHEDULES, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"Write {SCHEDULES[-1]}:100."
            raise UsageError(
                f"The schedule {text[:40]!r} was asked for. Known are {', '.join(SCHEDULES)}, each also with the steps "
                f"of its warmup, as cosine:100. {hint}"
            )
        return cls(kind, int(steps) if colon else 0)

    def factor(self, step: int, num_steps: int) -> float:
        """Of the step with this number, counted from 0, of so many."""
        if step < self.warmup:
            return step / self.warmup
        done = (step - self.warmup) / max(1, num_steps - self.warmup)
        match self.kind:
            case "linear":
                return max(0.0, 1.0 - done)
            case "cosine":
                return max(0.0, 0.5 * (1.0 + cos(pi * done)))
        return 1.0


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is done in a step, and how often."""

    num_steps: int
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float | None = None
    """None: what torch has for this optimizer."""
    schedule: Schedule = Schedule("constant")
    clip: float | None = None
    """The largest norm that all gradients together may have."""
    accumulate: int = 1
    """Batches whose gradients make a step."""
    seed: int = 0

    def check(self) -> None:
        """Refuse what is no recipe."""
        if self.optimizer.removesuffix("-fused") not in OPTIMIZERS:
            raise UsageError(
                f"The optimizer {self.optimizer[:40]!r} was asked for. Known are {', '.join(OPTIMIZERS)}, each also "
                f"with -fused. Name one of them; with another, train the module that conjoin.load gives."
            )
        if self.clip == 0:
            raise UsageError(
                "Gradients were to be clipped to a norm of 0. Nothing would be left of them, and nothing be learned. "
                "Give --clip a norm as 1.0, or leave it out."
            )
        if self.schedule.warmup >= self.num_steps and self.schedule.warmup:
            raise UsageError(
                f"A warmup of {self.schedule.warmup} steps was asked for in a training of {self.num_steps}. The "
                f"learning rate would never come. Give more steps, or a shorter warmup."
            )

    def make_optimizer(self, step: nn.Module) -> Optimizer:
        """The optimizer of a module's parameters."""
        from torch import optim

        kind, fused = self.optimizer.removesuffix("-fused"), self.optimizer.endswith("-fused") or None
        parameters, rate = step.parameters(), self.learning_rate
        if kind.startswith("sgd"):
            momentum = 0.9 if kind == "sgd-momentum" else 0.0
            return optim.SGD(
                parameters, lr=rate, momentum=momentum, weight_decay=self.weight_decay or 0.0, fused=fused
            )
        if kind == "adam":
            return optim.Adam(parameters, lr=rate, weight_decay=self.weight_decay or 0.0, fused=fused)
        decay = 1e-2 if self.weight_decay is None else self.weight_decay  # torch's own
        return optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=fused)
