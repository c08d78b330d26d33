"""The commands that look: `inspect` shows what is in a model, `doctor` what this installation has."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, JsonOption, LengthOption, ModelArgument, SizeOption
from conjoin.cli.output import check_output, print_json
from conjoin.cli.quantities import parse_sizes
from conjoin.environment import cache_directory, installed_version

if TYPE_CHECKING:
    from conjoin.api import Inspection

_LEGEND = "S(d): split along dim d; P: partial sums of a split reduction; +: also by expansion into other operators."


def _show(found: Inspection) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    console.print(f"[bold]{escape(found.name)}[/bold]", highlight=False)
    for name, text in rooms.report.inspection_summary(found):
        console.print(f"  {name:<12} {escape(text)}", highlight=False)
    columns = ("operator", "calls", "flop", "bytes moved", "the output can be")
    table = Table(*columns, box=None, pad_edge=True, header_style="bold")
    for column in table.columns[1:4]:
        column.justify = "right"
    for row in rooms.report.inspection_table(found):
        table.add_row(*map(escape, row))
    console.print(table)
    console.print(f"  {_LEGEND}", highlight=False)


def inspect_command(
    model: ModelArgument,
    batch: Annotated[int | None, typer.Option("--batch", min=1, help="Samples in the batch.")] = None,
    train: Annotated[bool | None, typer.Option("--train/--eval", help="The mode to capture; default: train.")] = None,
    length: LengthOption = None,
    size: SizeOption = None,
    imports: ImportOption = None,
    as_json: JsonOption = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also save the graph as JSON here.")] = None,
) -> None:
    """Show what is in a model: operators, parameters, work, memory, what can be split, what is opaque."""
    check_output(output, "graph")
    rooms.models.import_modules(imports)
    sizes = parse_sizes(length, size)
    graph = rooms.models.load_model_graph(model, batch_size=batch, training=train, sizes=sizes)
    found = rooms.api.inspect(graph)
    if output is not None:
        rooms.api.save_graph(graph, output)
    if as_json:
        print_json({"model": model, **found.to_json()})
    else:
        _show(found)


def _devices() -> list[dict[str, Any]]:
    """CPU cores and memory, and every accelerator torch sees."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = platform.processor() or platform.machine()
    devices: list[dict[str, Any]] = [{"kind": "cpu", "name": name, "count": os.cpu_count(), "bytes": memory}]
    for i in range(rooms.torch.cuda.device_count() if rooms.torch.cuda.is_available() else 0):
        found = rooms.torch.cuda.get_device_properties(i)
        devices.append({"kind": "cuda", "name": found.name, "count": 1, "bytes": found.total_memory})
    return devices


def doctor_command(as_json: JsonOption = False) -> None:
    """Print versions, devices and where the cache is."""
    cache, devices = cache_directory(), _devices()
    facts = {
        "conjoin": installed_version(),
        "python": platform.python_version(),
        "torch": rooms.torch.__version__,
        "system": platform.platform(),
        "devices": devices,
        "distributed": rooms.torch.distributed.is_available(),
        "cache": str(cache),
        "cache_exists": cache.exists(),
    }
    if as_json:
        print_json(facts)
        return
    for name in ("conjoin", "python", "torch", "system"):
        typer.echo(f"{name:<12} {facts[name]}")
    for device in devices:
        what = f"{device['kind']}: {device['count']} x {device['name']}, {rooms.report.format_bytes(device['bytes'])}"
        typer.echo(f"{'device':<12} {what}")
    typer.echo(f"{'distributed':<12} {'available' if facts['distributed'] else 'not in this torch'}")
    typer.echo(f"{'cache':<12} {cache}{'' if cache.exists() else ' (not there yet)'}")
