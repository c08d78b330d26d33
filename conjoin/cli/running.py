"""`run` trains a plan on real ranks; `verify` compares it with one device, without a cluster or on real ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, LengthOption, SizeOption
from conjoin.cli.output import check_output, print_json
from conjoin.cli.quantities import parse_sizes
from conjoin.environment import machines_directory
from conjoin.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from conjoin.ir import Pipeline, Plan
    from conjoin.runtime import AgainstModel, ParallelModule, Recorded, Verdict

PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
StepsOption = Annotated[int, typer.Option("--steps", min=1, help="Training steps.")]
_MODEL_HELP = "The model the plan was made for: zoo name, file.py:function or module:function."
ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)]
_SEED = 0


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be run, as every rank is told it."""

    plan: str
    """Path of the plan file."""
    model: str
    batch_size: int | None
    num_steps: int
    imports: tuple[str, ...]
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    sizes: tuple[tuple[str, int], ...] = ()
    """Of the model, by name."""
    quiet: bool = False
    """Whether only the end is told."""
    weights: str | None = None
    """Path of the files that training begins with."""

    def read(self) -> Plan | Pipeline:
        """The plan; one that is not for the ranks torchrun started is refused before anything is built for it."""
        found = rooms.models.read_plan(self.plan, self.imports, self.model)
        if rooms.dist.is_torchelastic_launched():
            rooms.runtime.check_world(int(os.environ["WORLD_SIZE"]), found.mesh.size, found.model.name)
        return found

    def workload(self) -> tuple[nn.Module, Any, Any]:
        """The same model and batch on every rank, whatever process it is."""
        rooms.torch.manual_seed(_SEED)
        return rooms.models.load_workload(self.model, self.batch_size, dict(self.sizes))

    def case(self, plan: Plan | Pipeline) -> rooms.runtime.Case:
        """The plan with all that it is compared with."""
        model, batch, loss = self.workload()
        model, batch = _as_asked(plan, model, batch)
        return rooms.runtime.Case(
            plan,
            rooms.models.capture_model(model, batch, loss, precision=plan.precision or None),
            model,
            batch,
            rooms.runtime.PlainModel(model, loss, rooms.frontends.run_plainly),
        )


@dataclass(frozen=True, slots=True)
class _Trained:
    """What one rank saw."""

    losses: list[float]
    seconds: list[float]
    recorded: list[Recorded]
    """What it did in one more step, where that was asked for."""

    @property
    def usual_seconds(self) -> float:
        """Of a step; the first, in which much is done once, is left out where there are others."""
        return median(self.seconds[1:] or self.seconds)


_OPTIMIZERS = ("sgd", "sgd-momentum", "adam", "adamw")
OptimizerOption = Annotated[
    str, typer.Option("--optimizer", help=f"{', '.join(_OPTIMIZERS)}; or -fused, as in adamw-fused.")
]


def run_command(
    plan: PlanArgument,
    model: ModelArgument,
    steps: StepsOption = 10,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")] = None,
    length: LengthOption = None,
    size: SizeOption = None,
    optimizer: OptimizerOption = "adamw",
    learning_rate: Annotated[float, typer.Option("--lr", min=0.0, max=1e6, help="The learning rate.")] = 1e-3,
    machine: Annotated[
        str | None, typer.Option("--machine", help="Tell what is predicted for this machine beside what is measured.")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Save a trace of one more step here.")] = None,
    weights: Annotated[
        str | None, typer.Option("--weights", metavar="PATH", help="Begin with these: safetensors or .pt, or a folder.")
    ] = None,
    imports: ImportOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a model by a plan: starts the ranks on this host, or is one of them under torchrun."""
    check_output(trace, "trace")
    _check_optimizer(optimizer)
    sizes = tuple(parse_sizes(length, size).items())
    asked = _Asked(
        str(plan), model, batch, steps, tuple(imports or ()), optimizer, learning_rate, sizes, as_json,
        None if weights is None else str(weights),
    )  # fmt: skip
    found = asked.read()
    _check_trains(found)
    if weights is not None:
        rooms.runtime.find_weights(weights)
    predicted = None if machine is None else _predict(found, machine, optimizer)
    if rooms.dist.is_torchelastic_launched() or found.mesh.size == 1:
        ranks = _gather(_train(0, asked, trace is not None))
    else:
        ranks = rooms.runtime.launch(found.mesh.size, _train, asked, trace is not None)
    if not _is_first():
        return
    if trace is not None:
        rooms.report.save_trace(_recorded_events([rank.recorded for rank in ranks]), trace)
    _tell(ranks[0], predicted, None if trace is None else str(trace), as_json)


def _tell(first: _Trained, predicted: float | None, trace: str | None, as_json: bool) -> None:
    """What came of it."""
    if as_json:
        print_json(
            {
                "losses": first.losses,
                "seconds": first.seconds,
                "median_seconds_per_step": first.usual_seconds,
                "predicted_seconds_per_step": predicted,
                "trace": trace,
            }
        )
        return
    if predicted is not None:
        told, seen = rooms.report.format_seconds(predicted), rooms.report.format_seconds(first.usual_seconds)
        typer.echo(f"predicted {told}, measured {seen} a step: {predicted / first.usual_seconds - 1:+.0%}")
    if trace is not None:
        typer.echo(f"trace of one step: {trace}; open it in ui.perfetto.dev")


def _predict(plan: Plan | Pipeline, machine: str, optimizer: str) -> float:
    """Seconds of a step."""
    where = rooms.machine.parse_machine(machine, machines_directory())
    return rooms.api.simulate_plan(plan, where, optimizer=optimizer).seconds


def _check_optimizer(name: str) -> None:
    if name.removesuffix("-fused") not in _OPTIMIZERS:
        raise UsageError(
            f"The optimizer {name[:40]!r} was asked for. Known are {', '.join(_OPTIMIZERS)}, each also with -fused. "
            f"Name one of them; with another, train the module that conjoin.load gives."
        )


def _make_optimizer(asked: _Asked, step: nn.Module) -> rooms.torch.optim.Optimizer:
    kind, fused = asked.optimizer.removesuffix("-fused"), asked.optimizer.endswith("-fused") or None
    optim, parameters, rate = rooms.torch.optim, step.parameters(), asked.learning_rate
    if kind.startswith("sgd"):
        return optim.SGD(parameters, lr=rate, momentum=0.9 if kind == "sgd-momentum" else 0.0, fused=fused)
    return (optim.Adam if kind == "adam" else optim.AdamW)(parameters, lr=rate, fused=fused)


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


def _is_first() -> bool:
    return not rooms.dist.is_initialized() or rooms.dist.get_rank() == 0


def _gather(mine: Any) -> list[Any]:
    """What every rank has, on every rank; alone what this one has."""
    if not rooms.dist.is_initialized():
        return [mine]
    answers: list[Any] = [None] * rooms.dist.get_world_size()
    rooms.dist.all_gather_object(answers, mine)
    return answers


def _recorded_events(ranks: list[list[Recorded]]) -> Iterator[rooms.report.Event]:
    for rank, entries in enumerate(ranks):
        for entry in entries:
            yield rooms.report.Event(f"measured: rank {rank}", entry.stream, entry.name, entry.start, entry.duration)


def _as_asked(plan: Plan | Pipeline, model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """The model and its batch in the dtypes that the precision of a plan has for them."""
    asked = rooms.frontends.Precision.parse(plan.precision) if plan.precision else None
    return (model, batch) if asked is None else asked.converted(model, batch)


def _train(rank: int, asked: _Asked, traced: bool) -> _Trained:
    """Train, telling the loss of every step."""
    plan = asked.read()
    model, batch, loss = asked.workload()
    model, batch = _as_asked(plan, model, batch)
    if asked.weights is None:
        rooms.runtime.check_init(model)
    graph = rooms.models.capture_model(model, batch, loss, precision=plan.precision or None)
    rooms.runtime.check_made_for(plan, graph)
    rooms.torch.manual_seed(_SEED)
    step = rooms.runtime.load(plan, model, weights=asked.weights)
    told = step.communicator.rank == 0 and not asked.quiet
    if told:
        typer.echo(f"{plan}")
    optimizer = _make_optimizer(asked, step)
    batch = _on_device(batch, step.store.device)

    def train_once() -> float:
        optimizer.zero_grad()
        value = _loss_of(step, batch)
        if not value.requires_grad:
            raise UsageError(
                f"The plan of {plan.model.name} was asked to train. No parameter reaches its loss with a gradient: it "
                f"is detached, or computed under no_grad. Let the gradient through, and make the plan again."
            )
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return value.item()

    losses, seconds = [], []
    for i in range(asked.num_steps):
        start = time.perf_counter()
        losses.append(train_once())
        seconds.append(time.perf_counter() - start)
        if told:
            typer.echo(f"step {i + 1:>4}   loss {losses[-1]:.6f}   {1e3 * seconds[-1]:9.1f} ms")
    return _Trained(losses, seconds, rooms.runtime.record(train_once) if traced else [])


def _loss_of(step: ParallelModule, batch: Any) -> rooms.torch.Tensor:
    index = step.plan.graph.loss
    assert index is not None
    outputs = step(*batch) if isinstance(batch, tuple | list) else step(batch)
    found: rooms.torch.Tensor = rooms.ir.flatten_tree(outputs)[0][index]
    return found


def verify_command(
    plan: PlanArgument,
    model: ModelArgument,
    steps: StepsOption = 5,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")] = None,
    length: LengthOption = None,
    size: SizeOption = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="On real processes, not only in this one.")] = False,
    imports: ImportOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a plan with one device: loss, gradients and weights in double precision; exit code 1 if they differ."""
    sizes = tuple(parse_sizes(length, size).items())
    asked = _Asked(str(plan), model, batch, steps, tuple(imports or ()), sizes=sizes)
    found = asked.read()
    with redirect_stdout(sys.stderr):  # where the model prints: stdout has the answer of the command
        if rooms.dist.is_torchelastic_launched():
            result = _gathered(_compare(0, asked))
        elif ranks and found.mesh.size > 1:
            answers = rooms.runtime.launch(found.mesh.size, _compare, asked)
            result = rooms.runtime.verdict(answers[0][0], [answer[1] for answer in answers], answers[0][2])
        else:
            result = rooms.runtime.verify_in_process(asked.case(found), steps)
    if _is_first():
        _show(found, result, as_json)
    if not result.passed:
        raise typer.Exit(1)


def _compare(rank: int, asked: _Asked) -> Any:
    given = asked.case(asked.read())
    rooms.runtime.check_made_for(given.plan, given.graph)
    case = given.widened()
    communicator, _ = rooms.runtime.connect(case.plan)
    against = rooms.runtime.compare_with_model(given, case, asked.num_steps) if communicator.rank == 0 else None
    reference = rooms.runtime.train_alone(case, asked.num_steps)
    return reference.losses, rooms.runtime.compare_rank(case, reference, communicator), against


def _gathered(mine: Any) -> Verdict:
    losses, compared, against = mine
    return rooms.runtime.verdict(losses, _gather(compared), _gather(against)[0])


def _show(plan: Plan | Pipeline, result: Verdict, as_json: bool) -> None:
    if as_json:
        shown = [asdict(difference) for difference in result.differences[:20]]
        facts = {
            "passed": result.passed, "ranks": result.num_ranks, "worst": result.worst,
            "tolerance": rooms.runtime.TOLERANCE,
            "losses": result.losses, "plan_losses": result.plan_losses, "differences": shown,
            "against_model": _facts_of(result.against_model),
        }  # fmt: skip
        print_json(facts)
        return
    typer.echo(f"{plan}")
    typer.echo("step        one device              plan")
    for i, (alone, planned) in enumerate(zip(result.losses, result.plan_losses, strict=True)):
        typer.echo(f"{i + 1:>4}   {alone:.12f}   {planned:.12f}")
    for difference in result.differences[: 1 if result.passed else 8]:
        what = f"{difference.what} on rank {difference.rank}"
        typer.echo(f"largest difference: {difference.relative:.1e} in {what}")
    for line in result.told:
        typer.echo(line)
    verb = "trains exactly like one device" if result.passed else "does NOT train like one device"
    tolerance = f"relative tolerance {rooms.runtime.TOLERANCE:.0e}"
    typer.echo(f"{'verified' if result.passed else 'refuted'}: the plan {verb} ({tolerance})")


def _facts_of(found: AgainstModel | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "passed": found.passed, "precision": found.precision, "batches": found.freshness.value,
        "changed": found.changed, "differences": [asdict(difference) for difference in found.differences[:20]],
    }  # fmt: skip


def _on_device(batch: Any, device: rooms.torch.device) -> Any:
    leaves, spec = rooms.ir.flatten_tree(batch)
    return rooms.ir.unflatten_tree([x.to(device) if isinstance(x, rooms.torch.Tensor) else x for x in leaves], spec)
