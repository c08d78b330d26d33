"""What `run` tells of a training while it goes on: lines for people, and a file with one JSON object a line."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from statistics import median
from typing import TYPE_CHECKING, Any, TextIO

import typer

from conjoin.errors import UsageError

if TYPE_CHECKING:
    from conjoin.gnn import EpochTold

_ALL_LINES = 100
"""Trainings of so many steps have a line for each; longer ones one a second."""


@dataclass(frozen=True, slots=True)
class Foretold:
    """What is predicted of a step with one batch."""

    seconds: float
    utilization: float
    """Which part of what the devices could do goes into the model (MFU)."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A step that was done."""

    step: int
    """Its number, from 1 on."""
    loss: float
    learning_rate: float
    norm: float | None
    """Of all gradients, before they were clipped."""
    seconds: float
    accuracy: float | None = None
    """The share of vertices of a graph that are told rightly, before the step."""


@dataclass(slots=True)
class TrainingLog:
    """Where a rank writes down what it does: rank 0 tells it, the others say nothing."""

    num_steps: int
    samples_per_step: int | None
    foretold: Foretold | None
    """Of a whole step."""
    is_told: bool = True
    """Whether lines are printed."""
    file: TextIO | None = None
    _seconds: list[float] = field(default_factory=list)
    _last_line: float = 0.0

    def begin(self, title: str, step: int, num_ranks: int) -> None:
        if self.is_told:
            typer.echo(title)
            if step:
                typer.echo(f"goes on after step {step}" if step < self.num_steps else f"all {step} steps are done")
        predicted = None if self.foretold is None else self.foretold.seconds
        self._write(kind="start", plan=title, ranks=num_ranks, step=step, steps=self.num_steps, predicted=predicted)

    def step(self, done: Trained) -> None:
        self._seconds.append(done.seconds)
        rate = None if self.samples_per_step is None else self.samples_per_step / done.seconds
        self._write(
            kind="step", step=done.step, loss=done.loss, lr=done.learning_rate, norm=done.norm, seconds=done.seconds,
            samples_per_second=rate, mfu=self._utilization(done.seconds),
            **({} if done.accuracy is None else {"accuracy": done.accuracy}),
        )  # fmt: skip
        is_due = time.monotonic() - self._last_line > 1.0 or done.step in (1, self.num_steps)
        if not self.is_told or not (is_due or self.num_steps <= _ALL_LINES):
            return
        self._last_line = time.monotonic()
        words = [f"step {done.step:>4}   loss {done.loss:.6f}   {1e3 * done.seconds:9.1f} ms"]
        words += [] if done.accuracy is None else [f"accuracy {done.accuracy:.4f}"]
        words += [f"lr {done.learning_rate:.2e}"]
        words += [] if done.norm is None else [f"norm {done.norm:.4g}"]
        words += [] if rate is None else [f"{rate:.4g} samples/s"]
        words += [] if done.step == self.num_steps else [f"{_clock(self._left(done.step))} left"]
        typer.echo("   ".join(words))

    def learned(self, step: int, told: EpochTold) -> None:
        """What the parts of a graph took, what is predicted of that, and whether they were cut anew."""
        moved = None if told.moved is None else str(told.moved)
        self._write(
            kind="parts", step=step, seconds=told.seconds, predicted=told.predicted, weights=told.weights, moved=moved
        )  # fmt: skip
        if not self.is_told or not (self.num_steps <= _ALL_LINES or moved is not None or step == self.num_steps):
            return
        seen, spread = max(told.seconds), max(told.seconds) * len(told.seconds) / max(sum(told.seconds), 1e-9)
        words = f"parts{step:>4}   slowest {1e3 * seen:.4g} ms, {spread:.3f} times the mean"
        if told.predicted is not None and told.weights is not None:
            costs = ", ".join(f"{name} {1e9 * weight:.3g}" for name, weight in told.weights.items())
            words += f"; learned {1e3 * max(told.predicted):.4g} ms (ns: {costs})"
        typer.echo(words)
        if moved is not None:
            typer.echo(f"{'':9}   {moved}")

    def evaluated(self, step: int, loss: float, seconds: float) -> None:
        self._write(kind="eval", step=step, loss=loss, seconds=seconds)
        if self.is_told:
            typer.echo(f"eval {step:>4}   loss {loss:.6f}   {1e3 * seconds:9.1f} ms")

    def saved(self, step: int, path: str, seconds: float) -> None:
        self._write(kind="checkpoint", step=step, path=path, seconds=seconds)
        if self.is_told:
            typer.echo(f"kept {step:>4}   {path}")

    def stopped(self, step: int) -> None:
        """It was asked to stop after this step."""
        self._write(kind="stopped", step=step)

    def end(self, step: int) -> None:
        usual = usual_seconds(self._seconds) if self._seconds else None
        mfu = None if usual is None else self._utilization(usual)
        self._write(kind="end", step=step, seconds=usual, mfu=mfu)

    def _utilization(self, seconds: float) -> float | None:
        return None if self.foretold is None else self.foretold.utilization * self.foretold.seconds / seconds

    def _left(self, step: int) -> float:
        return usual_seconds(self._seconds[-_ALL_LINES:]) * (self.num_steps - step)

    def _write(self, **facts: Any) -> None:
        """One line, there at once: whoever reads along sees it, and a training that is killed has told what it did."""
        if self.file is None:
            return
        plain = {key: None if isinstance(x, float) and not isfinite(x) else x for key, x in facts.items()}
        try:
            self.file.write(json.dumps(plain) + "\n")
            self.file.flush()
        except OSError as error:
            file, self.file = self.file, None
            with suppress(OSError):  # what it still holds cannot be written either
                file.close()
            raise UsageError(
                f"The log {file.name} could not be written: {error.strerror}. What was trained until the last "
                f"checkpoint is kept. Make room, or name another file, and go on with --resume."
            ) from None


def usual_seconds(seconds: list[float]) -> float:
    """Of a step; the first, in which much is done once, is left out where there are others."""
    return median(seconds[1:] or seconds)


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(75.4), _clock(3661)
    ('1:15', '1:01:01')
    """
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
