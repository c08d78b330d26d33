"""The commands about machines: `machine list`, `machine show`, `machine check`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, JsonOption
from conjoin.cli.output import print_json
from conjoin.environment import machines_directory
from conjoin.errors import UsageError

if TYPE_CHECKING:
    from conjoin.machine import DeviceType, Link, NodeKind

machine_app = typer.Typer(
    help="Show the machines that are known, and check descriptions of them.", no_args_is_help=True
)


@machine_app.command("list")
def list_command(imports: ImportOption = None, as_json: JsonOption = False) -> None:
    """List the machines that a name stands for: presets, and your own files in $CONJOIN_MACHINES."""
    if imports:
        rooms.models.import_modules(imports)
    entries = [*_own_machines(), *_presets()]
    if as_json:
        print_json(entries)
        return
    for entry in entries:
        typer.echo(f"{entry['name']:<14} {entry['summary']}")
    typer.echo(
        "\nlocal:4 is four processes on this host; NAME:NODES sizes a machine; `conjoin machine show NAME` tells more."
    )


def _own_machines() -> Iterator[dict[str, str]]:
    directory = machines_directory()
    for name, path in rooms.machine.find_machine_files(directory).items() if directory is not None else ():
        try:
            summary = _summary(rooms.machine.Machine.load(path))
        except UsageError:
            summary = f"cannot be read; `conjoin machine check {path}` tells why"
        yield {"name": name, "source": str(path), "summary": summary}


def _presets() -> Iterator[dict[str, str]]:
    own = {name: "registered" for name in rooms.machine.registered_names()}
    for name, source in {**own, **dict.fromkeys(rooms.machine.preset_names(), "preset")}.items():
        yield {"name": name, "source": source, "summary": _summary(rooms.machine.Machine.preset(name))}


def _summary(machine: rooms.machine.Machine) -> str:
    nodes = "1 node" if machine.num_nodes == 1 else f"{machine.num_nodes} nodes"
    devices = ", ".join(device.name for device in machine.device_types) or f"{machine.device}, speeds not known"
    return f"{nodes} × {machine.devices_per_node} {devices}"


@machine_app.command("show")
def show_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="local:4, a name as summit:4, or machine.toml.")],
    imports: ImportOption = None,
    as_json: JsonOption = False,
    as_toml: Annotated[bool, typer.Option("--toml", help="Print the machine file.")] = False,
) -> None:
    """Show a machine: its devices and their rates, its links, what was measured on it, and where it is all from."""
    if imports:
        rooms.models.import_modules(imports)
    machine = rooms.machine.parse_machine(name, machines_directory())
    if as_toml:
        typer.echo(machine.to_toml(), nl=False)
    elif as_json:
        print_json(_to_json(machine))
    else:
        for line in _text(machine):
            typer.echo(line)


@machine_app.command("check")
def check_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A machine file.")], as_json: JsonOption = False
) -> None:
    """Check a machine file: OK, or every problem with the path of its key; the exit code is then 2."""
    problems = rooms.machine.machine_file_problems(file)
    if as_json:
        print_json({"file": str(file), "ok": not problems, "problems": list(problems)})
    elif problems:
        typer.echo(f"{file}: {len(problems)} {'problem' if len(problems) == 1 else 'problems'}")
        for problem in problems:
            typer.echo(f"- {problem}")
    else:
        typer.echo(f"OK: {rooms.machine.Machine.load(file)}")
    if problems:
        raise typer.Exit(2)


def _to_json(machine: rooms.machine.Machine) -> dict[str, Any]:
    facts = asdict(machine)
    kinds = [{**kind, "devices": [device["name"] for device in kind["devices"]]} for kind in facts.pop("nodes")]
    return {
        **facts,
        "axes": [asdict(axis) for axis in machine.mesh.axes],
        "device_types": [asdict(device) for device in machine.device_types],
        "nodes": kinds,
        "fingerprint": machine.fingerprint(),
        "speed_fingerprint": machine.speed_fingerprint(),
    }


def _text(machine: rooms.machine.Machine) -> Iterator[str]:
    yield str(machine)
    if machine.description:
        yield f"  {machine.description}"
    if not machine.nodes:
        yield "  Speeds and links are not known. Measure them with `conjoin calibrate`, or add them to its .toml file."
    if machine.device_types:
        yield "\ndevice types"
        yield from _columns(
            ["name", "memory", "memory bandwidth", "peak rates"], map(_device_row, machine.device_types)
        )
    first = 0
    for kind in machine.nodes:
        yield from _node_text(kind, first)
        first += kind.count
    if machine.num_nodes > 1 and machine.nodes:
        yield "\nbetween nodes" if machine.links else "\nbetween nodes: every node has its full rate to every other"
        yield from _columns(_LINK_TITLES, map(_link_row, machine.links)) if machine.links else ()
    if machine.fits:
        yield "\nmeasured collectives"
        rows = (
            [f.kind, " ".join(f.axes), _micro(f.latency), _rate(f.seconds_per_byte), f"{f.r_squared:.3f}"]
            for f in machine.fits
        )
        yield from _columns(["collective", "axes", "latency", "rate", "R²"], rows)


def _node_text(kind: NodeKind, first: int) -> Iterator[str]:
    which = f"node {first}" if kind.count == 1 else f"nodes {first} to {first + kind.count - 1}"
    yield f"\nnode kind {kind.name}: {which}"
    names = [device.name for device in kind.devices]
    if len(set(names)) == 1:
        yield f"  devices 0 to {len(names) - 1}: {names[0]}" if len(names) > 1 else f"  device 0: {names[0]}"
    else:
        yield from (f"  device {i}: {name}" for i, name in enumerate(names))
    if kind.links:
        yield from _columns(_LINK_TITLES, map(_link_row, kind.links))


_LINK_TITLES = ["between", "kind", "each way", "latency", ""]


def _link_row(link: Link) -> list[str]:
    notes = ["both directions take turns"] * (not link.duplex) + ["every message has all"] * (not link.shared)
    return [" – ".join(link.ends), link.kind, f"{link.bandwidth / 1e9:g} GB/s", _micro(link.latency), ", ".join(notes)]


def _device_row(device: DeviceType) -> list[str]:
    rates = ", ".join(f"{dtype} {flops / 1e12:g}" for dtype, flops in device.peak_flops)
    memory = f"{device.memory_bytes / 1e9:.1f} GB"
    return [device.name, memory, f"{device.memory_bandwidth / 1e9:g} GB/s", f"{rates} teraflops"]


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:g} µs"


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.4g} GB/s" if seconds_per_byte else "no limit seen"


def _columns(titles: Sequence[str], rows: Iterator[list[str]]) -> Iterator[str]:
    table = [list(titles), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(titles))]
    for row in table:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
