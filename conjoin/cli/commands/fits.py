"""The command that tells what fits: `fits`, the largest batch on a machine, or the smallest machine for a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.options import (
    ImportOption,
    JsonOption,
    LengthOption,
    ModelArgument,
    PrecisionOption,
    SizeOption,
)
from conjoin.cli.output import print_json
from conjoin.cli.quantities import parse_sizes
from conjoin.cli.search_answer import status_line
from conjoin.environment import machines_directory
from conjoin.errors import UsageError

if TYPE_CHECKING:
    from conjoin.machine import Machine
    from conjoin.search import Fit

_STRATEGY_HELP = "Ask of this one only, as plan takes it; may be given several times."
_BATCH_HELP = "Samples in the batch: tells which size of the machine they need."


def fits_command(
    model: ModelArgument,
    machine: Annotated[str, typer.Option("--machine", help="A preset as dgx-h100:2, or machine.toml.")],
    batch: Annotated[int | None, typer.Option("--batch", min=1, help=_BATCH_HELP)] = None,
    strategy: Annotated[list[str] | None, typer.Option("--strategy", help=_STRATEGY_HELP)] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="sgd, sgd-momentum, adam, adamw; or -fused.")] = "adam",
    length: LengthOption = None,
    size: SizeOption = None,
    precision: PrecisionOption = None,
    imports: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tell the largest batch that fits a machine, by which micro-batches and recomputation; or which machine a batch
    needs."""
    rooms.models.import_modules(imports)
    for name in strategy or ():
        rooms.search.read_request(name)
    chosen = rooms.machine.parse_machine(machine, machines_directory())
    rooms.search.check_wish(rooms.search.Wish(optimizer=optimizer), rooms.search.search_names())
    _check_model(model)
    asked = rooms.api.precision_on(chosen, precision)
    load = partial(
        rooms.models.load_model_graph, model, training=None, precision=asked, sizes=parse_sizes(length, size)
    )
    with status_line() as show:
        question = rooms.search.FitQuestion(
            lambda samples, like: load(batch_size=samples, like=like), rooms.api.known_costs(), optimizer, show
        )
        if batch is None:
            found = rooms.search.largest_batches(question, chosen, strategy or ())
        else:
            found = rooms.search.least_machines(question, chosen, batch, strategy or ())
    if as_json:
        print_json({"model": model, "machine": chosen.name, "capacity": chosen.usable_bytes, "batch": batch,
                    "precision": None if asked is None else str(asked), "optimizer": optimizer,
                    "fits": [_to_json(fit) for fit in found]})  # fmt: skip
        return
    title = f"{model}{'' if asked is None else f' in {asked.title}'} with {optimizer}"
    for line in _largest_lines(title, chosen, found) if batch is None else _machine_lines(title, batch, chosen, found):
        typer.echo(line)


def _check_model(model: str) -> None:
    if model.endswith(".json"):
        raise UsageError(
            f"The batches of the saved graph {model} were asked for. Its batch was fixed at capture. Name the model "
            f"itself: a zoo name, file.py:function or module:function."
        )


def _to_json(fit: Fit) -> dict[str, Any]:
    found = fit.prediction
    beyond = None if fit.beyond is None else {"batch": fit.beyond[0], "peak_bytes": fit.beyond[1]}
    return {
        "machine": fit.machine.name,
        "devices": fit.machine.num_devices,
        "strategy": fit.strategy,
        "recompute": fit.recompute or None,
        "micro_batches": fit.micro,
        "fits": fit.fits,
        "batch": fit.batch,
        "peak_bytes": None if found is None else found.memory.peak,
        "capacity": fit.machine.usable_bytes,
        "seconds_per_step": None if found is None else found.seconds,
        "samples_per_second": fit.samples_per_second or None,
        "next_larger": beyond,
        "reason": fit.reason or None,
    }


_BATCH_TITLES = ("strategy", "largest batch", "memory", "step", "samples/s", "the next larger")
_MACHINE_TITLES = ("devices", "fits", "strategy", "memory", "step", "samples/s")


def _largest_lines(title: str, machine: Machine, found: Sequence[Fit]) -> Iterator[str]:
    have = rooms.report.format_bytes(machine.usable_bytes)
    yield f"{title}, {have} of each device of {machine}"
    fitting = [fit for fit in found if fit.fits]
    rows = [(fit.strategy, _batch(fit), *_figures(fit), _beyond(fit)) for fit in fitting]
    yield from _table(_BATCH_TITLES, rows) if rows else ()
    for fit in (fit for fit in found if not fit.fits):
        yield f"no batch by {fit.strategy}: {_why_not(fit)}"
    if not fitting:
        inside = machine.devices_per_node
        yield "Use more devices, another precision or --size." if inside == 1 else (
            f"Use more devices, another precision, --size, or split layers: --strategy megatron:tp={inside},sp,fsdp."
        )
    elif any(fit.micro > 1 for fit in fitting):
        yield "In micro-batches a batch may be as large as one likes: micro=4, micro=8 ..., each of so many samples."


def _machine_lines(title: str, batch: int, machine: Machine, found: Sequence[Fit]) -> Iterator[str]:
    have = rooms.report.format_bytes(machine.usable_bytes)
    yield f"{title}, a batch of {batch} on {machine.name}, {have} of each device"
    yield from _table(
        _MACHINE_TITLES,
        [(str(fit.machine.num_devices), "yes" if fit.fits else "no", fit.strategy, *_figures(fit)) for fit in found],
    )
    if not any(fit.fits for fit in found):
        yield "Use a smaller batch, another precision, or a machine whose devices have more memory."


def _batch(fit: Fit) -> str:
    return str(fit.batch) if fit.micro == 1 else f"micro-batches of {fit.batch // fit.micro}"


def _figures(fit: Fit) -> tuple[str, str, str]:
    found = fit.prediction
    if found is None:
        return fit.reason[:60], "", ""
    rate = f"{fit.samples_per_second:,.1f}" if fit.fits else ""
    step = rooms.report.format_seconds(found.seconds) if fit.fits else ""
    return rooms.report.format_bytes(found.memory.peak), step, rate


def _beyond(fit: Fit) -> str:
    if fit.beyond is None:
        return "not looked for"
    batch, peak = fit.beyond
    return f"{batch if fit.micro == 1 else batch // fit.micro} takes {rooms.report.format_bytes(peak)}"


def _why_not(fit: Fit) -> str:
    if fit.prediction is None:
        return fit.reason
    peak = rooms.report.format_bytes(fit.prediction.memory.peak)
    return f"{fit.prediction.num_samples} samples take {peak}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    table = [list(titles), *map(list, rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(titles))]
    for row in table:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
