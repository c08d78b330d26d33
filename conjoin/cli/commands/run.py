"""`run` trains a model by a plan on real ranks: a complete small trainer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, LengthOption, SizeOption
from conjoin.cli.output import check_directory, check_output, print_json
from conjoin.cli.quantities import parse_sizes
from conjoin.cli.trained_weights import trained_weights
from conjoin.cli.trainer.recipe import OPTIMIZERS, SCHEDULES, Recipe, Schedule
from conjoin.cli.trainer.stop_request import STOPPED
from conjoin.cli.trainer.training_log import Foretold, usual_seconds
from conjoin.cli.workload import Asked, BatchOption, ModelArgument, PlanArgument, StepsOption, gathered, is_first_rank
from conjoin.environment import machines_directory
from conjoin.errors import ConjoinError, UsageError

if TYPE_CHECKING:
    from conjoin.cli.trainer.training import Done, Files
    from conjoin.ir import Pipeline, Plan

_DATA_HELP = "Train on this: tokens in .txt, .bin or .npy, or file.py:function that returns a dataset."
_LOG_HELP = "Append a line of JSON for every step, evaluation and checkpoint."


def run_command(
    plan: PlanArgument,
    model: ModelArgument,
    steps: StepsOption = 10,
    batch: BatchOption = None,
    length: LengthOption = None,
    size: SizeOption = None,
    optimizer: Annotated[
        str, typer.Option("--optimizer", help=f"{', '.join(OPTIMIZERS)}; or -fused, as in adamw-fused.")
    ] = "adamw",
    learning_rate: Annotated[float, typer.Option("--lr", min=0.0, max=1e6, help="The learning rate.")] = 1e-3,
    weight_decay: Annotated[
        float | None, typer.Option("--weight-decay", min=0.0, max=1e6, help="Without it as torch has it.")
    ] = None,
    schedule: Annotated[
        str, typer.Option("--schedule", help=f"{', '.join(SCHEDULES)}; cosine:100 with a warmup of 100 steps.")
    ] = "constant",
    clip: Annotated[float | None, typer.Option("--clip", min=0.0, help="The largest norm of all gradients.")] = None,
    accumulate: Annotated[int, typer.Option("--accumulate", min=1, help="Batches whose gradients make a step.")] = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**31, help="Of values, order and draws.")] = 0,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="PATH", help="Begin with these: safetensors or .pt, or a folder.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", help=_DATA_HELP)] = None,
    eval_data: Annotated[str | None, typer.Option("--eval-data", help="Evaluate on this, at the end too.")] = None,
    eval_every: Annotated[int | None, typer.Option("--eval-every", min=1, help="In steps.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="FOLDER", help="Save here, at the end too.")
    ] = None,
    save_every: Annotated[int | None, typer.Option("--save-every", min=1, help="In steps.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint, if it is there.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="Write the weights here in the end.")
    ] = None,
    log: Annotated[Path | None, typer.Option("--log", metavar="FILE", help=_LOG_HELP)] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Tell what is predicted for this machine beside what is measured.")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Save a trace of one more step here.")] = None,
    imports: ImportOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a model by a plan: starts the ranks on this host, or is one of them under torchrun."""
    check_output(trace, "trace")
    check_output(log, "log")
    recipe = Recipe(steps, optimizer, learning_rate, weight_decay, Schedule.parse(schedule), clip, accumulate, seed)
    recipe.check()
    asked = Asked(str(plan), model, batch, tuple(imports or ()), tuple(parse_sizes(length, size).items()))
    files = rooms.training.Files(
        weights, data, eval_data, eval_every, _text(checkpoint), save_every, resume, _text(output), _text(log)
    )
    found = asked.read()
    _check_trains(found)
    _check_files(files, isinstance(found, rooms.ir.Pipeline))
    foretold = None if machine is None else _foretell(found, machine, optimizer)
    training = rooms.training.Training(asked, recipe, files, foretold, as_json, trace is not None)
    if rooms.dist.is_torchelastic_launched() or found.mesh.size == 1:
        ranks = gathered(_as_rank(training))
    else:
        ranks = rooms.runtime.launch(found.mesh.size, rooms.training.train, training, may_finish=True)
    after = ranks[0].stopped_after
    if not is_first_rank():
        raise typer.Exit(0 if after is None else STOPPED)
    if trace is not None and after is None:
        rooms.report.save_trace(_recorded_events(ranks), trace)
    _tell(ranks[0], foretold, accumulate, _text(trace) if after is None else None, as_json)
    if after is not None:
        typer.echo(_how_to_go_on(after, steps, files), err=True)
        raise typer.Exit(STOPPED)


def _as_rank(training: rooms.training.Training) -> Done:
    """Train in this process; what it refuses, and the command catches, the watch tells the others under torchrun."""
    try:
        return rooms.training.train(0, training)
    except ConjoinError as error:
        if rooms.dist.is_torchelastic_launched():
            sys.last_value = error
        raise


def _how_to_go_on(after: int, steps: int, files: Files) -> str:
    """The line of a training that was asked to stop."""
    if files.checkpoint is None:
        return f"stopped after step {after} of {steps}; nothing is kept, for want of --checkpoint FOLDER"
    again = "the same command" if files.resume else "the same command with --resume"
    return f"stopped after step {after} of {steps}, kept in {files.checkpoint}; {again} goes on"


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _check_files(files: Files, is_pipeline: bool) -> None:
    """Refuse before any rank is started what could not be read, or not be written in the end."""
    if files.weights is not None:
        rooms.runtime.find_weights(files.weights)
    if files.output is not None:
        rooms.runtime.check_weights_target(files.output)
    for given, option, needed in (
        (files.eval_every, "--eval-every", files.eval_data),
        (files.save_every, "--save-every", files.checkpoint),
        (files.resume or None, "--resume", files.checkpoint),
    ):
        if given is not None and needed is None:
            what = "--eval-data" if option == "--eval-every" else "--checkpoint FOLDER"
            lacks = "from where" if option == "--resume" else "what"
            raise UsageError(f"{option} was given without {what}. It does not say {lacks}. Give {what} as well.")
    if files.eval_data is not None and is_pipeline:
        raise UsageError(
            "A pipeline was asked to evaluate. It is for one mode, that of training, and others are not planned on the "
            "spot. Evaluate its checkpoint with a plan of one stage, or leave --eval-data out."
        )
    if files.checkpoint is not None:
        check_directory(Path(files.checkpoint).parent, "checkpoint")
        rooms.runtime.check_target(files.checkpoint)
        if not files.resume and rooms.runtime.has_checkpoint(files.checkpoint):
            raise UsageError(
                f"A training was to begin that keeps its checkpoints in {files.checkpoint}. There is one already, "
                f"which would be lost. Go on from it with --resume, or name another folder."
            )
    if files.output is not None:
        check_directory(Path(files.output).parent, "weights")


def _tell(first: Done, foretold: Foretold | None, accumulate: int, trace: str | None, as_json: bool) -> None:
    """What came of it."""
    usual = usual_seconds(first.seconds) if first.seconds else None
    predicted = None if foretold is None else accumulate * foretold.seconds
    rate = None if usual is None or first.samples_per_step is None else first.samples_per_step / usual
    if as_json:
        print_json(
            {
                "losses": first.losses,
                "seconds": first.seconds,
                "median_seconds_per_step": usual,
                "samples_per_second": rate,
                "predicted_seconds_per_step": predicted,
                "mfu": None if foretold is None or usual is None else _utilization(foretold, predicted, usual),
                "predicted_mfu": None if foretold is None else foretold.utilization,
                "trace": trace,
            }
        )
        return
    if foretold is not None and usual is not None and predicted is not None:
        seen = f"{_utilization(foretold, predicted, usual):.1%} of the peak rate (MFU)"
        used = f"{seen}, predicted {foretold.utilization:.1%}"
        typer.echo(used if rate is None else f"{rate:,.4g} samples/s, {used}")
        told, seen = rooms.report.format_seconds(predicted), rooms.report.format_seconds(usual)
        typer.echo(f"predicted {told}, measured {seen} a step: {predicted / usual - 1:+.0%}")
    if trace is not None:
        typer.echo(f"trace of one step: {trace}; open it in ui.perfetto.dev")


def _utilization(foretold: Foretold, predicted: float | None, usual: float) -> float:
    return foretold.utilization * (predicted or 0.0) / usual


def _foretell(plan: Plan | Pipeline, machine: str, optimizer: str) -> Foretold:
    where = rooms.machine.parse_machine(machine, machines_directory())
    found = rooms.api.simulate_plan(plan, where, optimizer=optimizer)
    return Foretold(found.seconds, found.model_flops_utilization)


def _check_trains(plan: Plan | Pipeline) -> None:
    """Refuse what has nothing to differentiate, or nothing to differentiate it by."""
    if plan.graph.loss is None:
        raise UsageError(
            f"The plan of {plan.model.name} has no loss, and was asked to train. None of its outputs is called loss, "
            f"nor is one alone a number that the batch and the parameters decide. Let the model's function return "
            f"(model, batch, loss), or the model such an output, and make the plan again."
        )
    if not any(leaf.trainable for leaf in plan.graph.leaves):
        raise UsageError(
            f"The plan of {plan.model.name} was asked to train. The model has no parameter that is trained: it has "
            f"none, or all of them are frozen. Set requires_grad on some, and make the plan again."
        )
    if not trained_weights(plan):
        raise UsageError(
            f"The plan of {plan.model.name} was asked to train. No parameter reaches its loss with a gradient: it is "
            f"detached, computed under no_grad, or a count as argmax makes it. Let the gradient through, and make the "
            f"plan again."
        )


def _recorded_events(ranks: list[Done]) -> Iterator[rooms.report.Event]:
    for rank, done in enumerate(ranks):
        for entry in done.recorded:
            yield rooms.report.Event(f"measured: rank {rank}", entry.stream, entry.name, entry.start, entry.duration)
