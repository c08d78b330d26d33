"""The trainer behind `run`: what a rank does, from loading the plan to the last checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from conjoin.api import load
from conjoin.cli.models import capture_model, own_words
from conjoin.cli.trainer.folder_hold import FolderHold
from conjoin.cli.trainer.graph_training import GraphParts, graded_plan, is_on_a_graph, share_of_right
from conjoin.cli.trainer.recipe import Recipe
from conjoin.cli.trainer.stop_request import StopRequest
from conjoin.cli.trainer.training_data import digest_of_tokens, make_dataset
from conjoin.cli.trainer.training_log import Foretold, Trained, TrainingLog
from conjoin.cli.workload import Asked, gathered
from conjoin.errors import CheckpointError, ConjoinError, UsageError
from conjoin.frontends import Precision
from conjoin.ir import Pipeline, Plan, flatten_tree
from conjoin.runtime import (
    Loader,
    ParallelModule,
    Recorded,
    check_init,
    check_made_for,
    collate_samples,
    has_checkpoint,
    is_any,
    load_checkpoint,
    place_of_failure,
    record,
    save_checkpoint,
    save_weights,
)

_STEP_SEEDS = 1_000_003
"""Between the seeds of two trainings: those of their steps do not meet before so many steps."""


@dataclass(frozen=True, slots=True)
class Files:
    """What a training reads and leaves behind."""

    weights: str | None = None
    """What it begins with."""
    data: str | None = None
    """Without it every step takes the batch that comes with the model."""
    eval_data: str | None = None
    eval_every: int | None = None
    """In steps; None: at the end only."""
    checkpoint: str | None = None
    save_every: int | None = None
    resume: bool = False
    output: str | None = None
    """Where the weights are written in the end."""
    log: str | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """All that every rank is told."""

    asked: Asked
    recipe: Recipe
    files: Files
    foretold: Foretold | None = None
    """Of a step with one batch."""
    is_quiet: bool = False
    is_traced: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """What one rank saw."""

    losses: list[float]
    seconds: list[float]
    recorded: list[Recorded]
    """What it did in one more step, where that was asked for."""
    samples_per_step: int | None
    stopped_after: int | None = None
    """The last step of a training that was asked to stop before its end."""


def train(rank: int, training: Training) -> Done:
    """Train on this rank, as one of those of the plan."""
    asked, recipe, files = training.asked, training.recipe, training.files
    plan = asked.read()
    model, batch, loss = asked.workload(plan, recipe.seed)
    if files.weights is None:
        check_init(model)
    graph = capture_model(model, batch, loss, precision=plan.precision or None)
    check_made_for(plan, graph)
    datasets = [None if name is None else make_dataset(name, batch, graph) for name in (files.data, files.eval_data)]
    chosen: Plan | Pipeline | str = asked.plan
    is_graph = loss is not None and files.data is None and is_on_a_graph(graph)
    if is_graph and isinstance(plan, Plan):
        chosen, loss = graded_plan(plan, model, batch, loss)
    torch.manual_seed(recipe.seed)
    step = load(chosen, model, loss=loss, weights=files.weights, seed=recipe.seed)
    del model
    parts = GraphParts.of(step, graph, batch) if is_graph else None
    precision = Precision.parse(plan.precision) if plan.precision else None

    def collated(samples: list[Any]) -> Any:
        made = collate_samples(samples)
        return made if precision is None else precision.converted(torch.nn.Identity(), made)[1]

    loaders = [
        None if dataset is None else Loader(
            dataset, step, shuffle=not is_eval, seed=recipe.seed, drop_last=not is_eval, collate_fn=collated
        )
        for is_eval, dataset in enumerate(datasets)
    ]  # fmt: skip
    given = parts if parts is not None else step.placed(batch)
    trainer = _Trainer(training, step, given, loaders[0], loaders[1])
    with StopRequest() as stop, trainer:
        return trainer.run(stop)


class _Trainer:
    """A module with everything that is done around its steps."""

    def __init__(
        self, training: Training, step: ParallelModule, batch: Any, data: Loader | None, eval_data: Loader | None
    ) -> None:
        self._training, self._recipe, self._files = training, training.recipe, training.files
        self._step, self._batch, self._data, self._eval_data = step, batch, data, eval_data
        self._parts = batch if isinstance(batch, GraphParts) else None
        self._accuracy: float | None = None
        self._optimizer = self._recipe.make_optimizer(step)
        is_half = step.plan.precision.startswith("fp16")
        self._scaler = torch.amp.GradScaler(step.store.device.type, enabled=is_half)
        self._batches = self._endless()
        self._is_first = step.communicator.rank == 0
        self._hold = FolderHold(self._files.checkpoint) if self._is_first and self._files.checkpoint else None
        self._log = self._make_log()
        self._done = 0
        self._kept: int | None = None
        """After which step the checkpoint that is there was saved."""
        self._tokens = None if self._files.data is None else digest_of_tokens(self._files.data)

    def __enter__(self) -> _Trainer:
        obstacle = gathered(None if self._hold is None else self._hold.take())[0]
        if obstacle is not None:
            why, advice = obstacle
            raise CheckpointError(
                f"The training was to keep its checkpoints in {self._files.checkpoint}. {why}. {advice}."
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._hold is not None:
            self._hold.let_go()
        if self._log.file is not None:
            self._log.file.close()

    def _make_log(self) -> TrainingLog:
        training, times = self._training, self._recipe.accumulate
        sizes = [part.shape[0] for part in self._step.input_parts() if part.shape]
        foretold = training.foretold
        whole = None if foretold is None else Foretold(times * foretold.seconds, foretold.utilization)
        file = _appending(self._files.log) if self._is_first and self._files.log is not None else None
        is_told = self._is_first and not training.is_quiet
        return TrainingLog(self._recipe.num_steps, times * sizes[0] if sizes else None, whole, is_told, file)

    def run(self, stop: StopRequest) -> Done:
        """All steps that are left, and what is done between them; fewer where any rank is asked to stop."""
        self._resume()
        if self._eval_data is not None:
            next(iter(self._eval_data))  # what does not fit is told now and not after hours
        self._log.begin(str(self._step.plan), self._done, self._step.communicator.mesh.size)
        losses, seconds = [], []
        while self._done < self._recipe.num_steps:
            start = time.perf_counter()
            loss, norm = self._train_once()
            self._done += 1
            losses.append(loss)
            seconds.append(time.perf_counter() - start)
            rate = self._learning_rate(self._done - 1)
            self._log.step(Trained(self._done, loss, rate, norm, seconds[-1], self._accuracy))
            self._between()
            if self._done < self._recipe.num_steps and is_any(stop.is_made, self._step.store.device):
                return self._stopped(losses, seconds)
        if not losses:  # all was done before
            self._write_weights()
        self._log.end(self._done)
        recorded = record(lambda: self._train_once()[0]) if self._training.is_traced else []
        return Done(losses, seconds, recorded, self._log.samples_per_step)

    def _between(self) -> None:
        """Learn from what parts of a graph took; save and evaluate where it is time to, in this order.

        An evaluation that fails costs nothing of what was trained.
        """
        if self._parts is not None:
            self._log.learned(self._done, self._parts.learn(self._recipe.num_steps - self._done))
        if self._files.checkpoint is not None and self._is_due(self._files.save_every):
            self._save(self._files.checkpoint)
        if self._done == self._recipe.num_steps:
            self._write_weights()
        if self._eval_data is not None and self._is_due(self._files.eval_every):
            start = time.perf_counter()
            self._log.evaluated(self._done, self._evaluate(self._eval_data), time.perf_counter() - start)

    def _write_weights(self) -> None:
        if self._files.output is not None:
            self._check_weights()
            save_weights(self._files.output, self._step)

    def _stopped(self, losses: list[float], seconds: list[float]) -> Done:
        """Keep what was done, where it is not kept already."""
        if self._files.checkpoint is not None and not self._is_due(self._files.save_every):
            self._save(self._files.checkpoint)
        self._log.stopped(self._done)
        return Done(losses, seconds, [], self._log.samples_per_step, self._done)

    def _save(self, path: str) -> None:
        self._check_weights()
        start = time.perf_counter()
        state = {
            "step": self._done,
            "data": None if self._data is None else self._data.state_dict(),
            "scaler": self._scaler.state_dict(),
            "tokens": self._tokens,
        }
        save_checkpoint(path, self._step, self._optimizer, extra={"conjoin run": state})
        self._kept = self._done
        self._log.saved(self._done, path, time.perf_counter() - start)

    def _is_due(self, every: int | None) -> bool:
        return self._done == self._recipe.num_steps or (every is not None and self._done % every == 0)

    def _resume(self) -> None:
        path = self._files.checkpoint
        if path is None or not self._files.resume or not gathered(has_checkpoint(path))[0]:
            return
        kept = load_checkpoint(path, self._step, self._optimizer).get("conjoin run")
        data = None if kept is None else kept.get("data")
        if kept is None or (data is None) != (self._data is None):
            has = "nothing of a training" if kept is None else "a training on data" if data else "one without data"
            raise CheckpointError(
                f"The training was to go on from {path}. It has {has}, and this one was asked for "
                f"{'without' if self._data is None else 'with'} --data. Go on as it began, or begin with its weights."
            )
        self._done = self._kept = int(kept["step"])
        self._check_same(path, data or {}, kept.get("tokens"))
        if self._data is not None and data is not None:
            self._data.load_state_dict(data)
        if kept["scaler"] and self._scaler.is_enabled():
            self._scaler.load_state_dict(kept["scaler"])

    def _check_same(self, path: str, data: Mapping[str, Any], tokens: str | None) -> None:
        """Refuse to go on with what would be another training."""
        recipe, name = self._recipe, self._files.data
        differing = ""
        if self._done > recipe.num_steps:
            differing = f"It has done {self._done} steps already, and {recipe.num_steps} were asked for"
        elif data and data.get("seed") != recipe.seed:
            differing = f"It began with --seed {data.get('seed')}, and {recipe.seed} was asked for"
        elif self._data is not None and data.get("num_samples") != self._data.num_samples:
            differing = f"It began with {data.get('num_samples')} samples, and {name} has {self._data.num_samples}"
        elif tokens is not None and tokens != self._tokens:
            differing = f"The tokens in {name} are not those that it began with"
        if differing:
            raise CheckpointError(
                f"The training was to go on from {path}. {differing}: it would be no training that can be made again. "
                f"Go on as it began, or begin another one, with its weights if you like (-o, --weights)."
            )

    def _endless(self) -> Iterator[Any]:
        """One batch after the other, epoch after epoch."""
        while True:
            if self._data is None:
                yield self._batch if self._parts is None else self._parts.batch
            else:
                yield from self._data

    def _learning_rate(self, step: int) -> float:
        recipe = self._recipe
        return recipe.learning_rate * recipe.schedule.factor(step, recipe.num_steps)

    def _train_once(self) -> tuple[float, float | None]:
        """A step of the optimizer: the loss, and the norm of the gradients where they are clipped."""
        recipe, total = self._recipe, 0.0
        # What is drawn hangs on the step alone: a training that was resumed draws as one that was not.
        torch.manual_seed(recipe.seed * _STEP_SEEDS + self._done)
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(self._done)
        self._optimizer.zero_grad()
        for _ in range(recipe.accumulate):
            batch = next(self._batches)
            with nullcontext() if self._parts is None else self._parts.timed() as turn:
                try:
                    loss = self._loss_of(batch) / recipe.accumulate
                    self._check(loss)
                    _ = None if turn is None else turn()
                    self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                except Exception as error:
                    self._tell_failure(f"Step {self._done + 1} of the training", error)
                    raise
            total += loss.item()
        norm = None
        if recipe.clip is not None:
            self._scaler.unscale_(self._optimizer)
            norm = float(self._step.clip_grad_norm_(recipe.clip))
        self._check_finite(total, norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return total, norm

    def _tell_failure(self, what: str, error: Exception) -> None:
        """Refuse what an operator of the model, or the user's own code in it, has refused."""
        place = None if isinstance(error, ConjoinError) else place_of_failure(error)
        if place is not None:
            rank, kept = self._step.communicator.rank, self._kept_words()
            raise UsageError(
                f"{what} failed on rank {rank} with {type(error).__name__}: {own_words(error)}. The model itself "
                f"failed, not conjoin; {kept}. Look at that place, and at the data of this step.\n  {place}"
            ) from error

    def _check(self, loss: Tensor) -> None:
        if not loss.requires_grad:
            raise UsageError(
                f"The plan of {self._step.plan.model.name} was asked to train. No parameter reaches its loss with a "
                f"gradient: it is detached, or computed under no_grad. Let the gradient through, and make the plan "
                f"again."
            )

    def _check_finite(self, loss: float, norm: float | None) -> None:
        """Stop before a step that no weight would survive; half precision leaves some out by itself."""
        if isfinite(loss) and (norm is None or isfinite(norm)):
            return
        if self._scaler.is_enabled() and self._scaler.get_scale() >= 1.0:
            return
        what, value = ("loss", loss) if norm is None or not isfinite(loss) else ("norm of the gradients", norm)
        raise UsageError(
            f"The {what} of step {self._done + 1} is {value}. No weight would be a number after it, so the training "
            f"ended before it; {self._kept_words()}. Lower --lr, give --clip or a warmup, or look at the data of this "
            f"step."
        )

    def _check_weights(self) -> None:
        """Keep nothing that no training can go on from, over what is good."""
        is_wrong = any(not x.isfinite().all() for x in self._step.parameters() if x.requires_grad)
        if is_any(is_wrong, self._step.store.device):
            raise UsageError(
                f"The weights after step {self._done} are not all numbers: a gradient was infinite, or the steps were "
                f"too large. They were not kept; {self._kept_words()}. Lower --lr, or give --clip, which tells the "
                f"step in which it begins."
            )

    def _kept_words(self) -> str:
        if self._kept is None:
            return "nothing is kept"
        return f"{self._files.checkpoint} has what was there after step {self._kept}"

    def _evaluate(self, data: Loader) -> float:
        """The mean loss over all samples, without dropout and the like."""
        total, left = 0.0, data.num_samples
        self._step.eval()
        with torch.no_grad():
            for batch in data:
                size = min(left, data.batch_size)
                left -= size
                try:
                    total += size * self._loss_of(batch).item()
                except Exception as error:
                    self._tell_failure(f"The evaluation after step {self._done}", error)
                    raise
        self._step.train()
        return total / data.num_samples

    def _loss_of(self, batch: Any) -> Tensor:
        index = self._step.plan.graph.loss
        assert index is not None
        outputs = self._step(*batch) if isinstance(batch, tuple | list) else self._step(batch)
        self._accuracy = share_of_right(outputs)
        found: Tensor = flatten_tree(outputs)[0][index]
        return found


def _appending(path: str) -> TextIO:
    try:
        return Path(path).open("a", encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"The log {path} could not be opened: {error.strerror}. Nothing was trained yet. Name another file."
        ) from None
