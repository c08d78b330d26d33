"""`verify` compares a plan with one device, without a cluster or on real ranks."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, LengthOption, SizeOption
from conjoin.cli.output import print_json
from conjoin.cli.quantities import parse_sizes
from conjoin.cli.trained_weights import trained_weights
from conjoin.cli.workload import Asked, BatchOption, ModelArgument, PlanArgument, StepsOption, gathered, is_first_rank

if TYPE_CHECKING:
    from conjoin.ir import Pipeline, Plan
    from conjoin.runtime import AgainstModel, Case, Verdict


def verify_command(
    plan: PlanArgument,
    model: ModelArgument,
    steps: StepsOption = 5,
    batch: BatchOption = None,
    length: LengthOption = None,
    size: SizeOption = None,
    ranks: Annotated[bool, typer.Option("--ranks", help="On real processes, not only in this one.")] = False,
    imports: ImportOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare a plan with one device: loss, gradients and weights in double precision; exit code 1 if they differ."""
    sizes = tuple(parse_sizes(length, size).items())
    asked = Asked(str(plan), model, batch, tuple(imports or ()), sizes)
    found = asked.read()
    with redirect_stdout(sys.stderr):  # where the model prints: stdout has the answer of the command
        if rooms.dist.is_torchelastic_launched():
            result = _verdict_of_all(_compare(0, asked, steps))
        elif ranks and found.mesh.size > 1:
            answers = rooms.runtime.launch(found.mesh.size, _compare, asked, steps)
            result = rooms.runtime.verdict(answers[0][0], [answer[1] for answer in answers], answers[0][2])
        else:
            result = rooms.runtime.verify_in_process(_case(asked, found), steps)
    if is_first_rank():
        _show(found, result, as_json)
    if not result.passed:
        raise typer.Exit(1)


def _case(asked: Asked, plan: Plan | Pipeline) -> Case:
    """The plan with all that it is compared with."""
    model, batch, loss = asked.workload(plan)
    return rooms.runtime.Case(
        plan,
        rooms.models.capture_model(model, batch, loss, precision=plan.precision or None),
        model,
        batch,
        rooms.runtime.PlainModel(model, loss, rooms.frontends.run_plainly),
    )


def _compare(rank: int, asked: Asked, num_steps: int) -> Any:
    given = _case(asked, asked.read())
    rooms.runtime.check_made_for(given.plan, given.graph)
    case = given.widened()
    communicator, _ = rooms.runtime.connect(case.plan)
    against = rooms.runtime.compare_with_model(given, case, num_steps) if communicator.rank == 0 else None
    reference = rooms.runtime.train_alone(case, num_steps)
    return reference.losses, rooms.runtime.compare_rank(case, reference, communicator), against


def _verdict_of_all(mine: Any) -> Verdict:
    losses, compared, against = mine
    return rooms.runtime.verdict(losses, gathered(compared), gathered(against)[0])


def _show(plan: Plan | Pipeline, result: Verdict, as_json: bool) -> None:
    if as_json:
        shown = [asdict(difference) for difference in result.differences[:20]]
        facts = {
            "passed": result.passed, "has_loss": plan.graph.loss is not None, "ranks": result.num_ranks,
            "worst": result.worst, "tolerance": rooms.runtime.TOLERANCE,
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
    if plan.graph.loss is None:
        typer.echo("the model has no loss: compared was the mean of its squared outputs, with its gradients")
    trains = bool(trained_weights(plan))
    if plan.graph.loss is not None and not trains:
        typer.echo("the model has no weights to train, or its loss no gradient for them: compared was its loss")
    does, can = ("trains", "train") if trains else ("computes", "compute")
    verb = f"{does} exactly like one device" if result.passed else f"does NOT {can} like one device"
    tolerance = f"relative tolerance {rooms.runtime.TOLERANCE:.0e}"
    typer.echo(f"{'verified' if result.passed else 'refuted'}: the plan {verb} ({tolerance})")


def _facts_of(found: AgainstModel | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "passed": found.passed, "precision": found.precision, "batches": found.freshness.value,
        "changed": found.changed, "differences": [asdict(difference) for difference in found.differences[:20]],
    }  # fmt: skip
