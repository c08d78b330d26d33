"""`calibrate`: how fast the running ranks communicate and compute, as a table and as a machine file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conjoin.cli import rooms
from conjoin.cli.options import ImportOption, JsonOption
from conjoin.cli.output import check_output, print_json
from conjoin.environment import costs_path, machines_directory
from conjoin.errors import UsageError

if TYPE_CHECKING:
    from conjoin.cli.device_probe import Speeds
    from conjoin.cost import Outcome
    from conjoin.machine import CollectiveFit, DeviceType
    from conjoin.runtime import Communication, Timed
    from conjoin.sim import Wanted

_COMMUNICATION_SHARE = 0.65
"""Of the time; the devices get the rest, and all of it where one rank has nobody to talk to."""
_WIDEST = 1e14
"""Bytes per second of a link whose time does not grow with size as far as was measured."""
_TRUSTED_FIT, _TRUSTED = 0.9, 0.5
"""The least R² of a fit, and the largest error, that is taken without a warning."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A machine with what was found, and the measurements behind it."""

    machine: rooms.machine.Machine
    communication: Communication
    speeds: Speeds
    operators: dict[str, list[Outcome]]
    """Of the plans that were to be measured too, by the name of the device."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be measured."""

    machine: str | None
    seconds: float
    plans: tuple[str, ...]
    """Paths of plan files."""
    optimizer: str
    imports: tuple[str, ...] = ()

    def wanted(self) -> Wanted:
        return rooms.sim.wanted_by(rooms.models.read_plan(path, self.imports) for path in self.plans)


def calibrate_command(
    machine: Annotated[
        str | None, typer.Option("--machine", help="local:4, or a machine file; otherwise what is found here.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Save the machine here, as .toml.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, max=86_400, help="How long to measure.")] = 30.0,
    plan: Annotated[
        list[Path] | None, typer.Option("--plan", help="Measure all operators of this plan too, and keep them.")
    ] = None,
    optimizer: Annotated[str, typer.Option("--optimizer", help="Whose step is measured with --plan.")] = "adam",
    imports: ImportOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure collectives and operators on ranks started here, or on all ranks under torchrun; write a machine file."""
    _check_output(output)
    rooms.models.import_modules(imports)
    asked = _Asked(machine, seconds, tuple(str(path) for path in plan or ()), optimizer, tuple(imports or ()))
    _check_plans(asked)
    if rooms.dist.is_torchelastic_launched():
        found = calibrate_rank(0, asked)
        first = rooms.dist.get_rank() == 0
    else:
        found, first = _calibrate_here(asked), True
    if not first:
        return
    if output is not None:
        found.machine.save(output)
    if found.operators:
        with rooms.cost.MeasurementStore(costs_path()) as store:
            for device, outcomes in found.operators.items():
                store.add(device, rooms.torch.__version__, outcomes)
    _show(found, output, as_json)


def _check_output(output: Path | None) -> None:
    """Refuse before measuring what could not be saved after it."""
    check_output(output, "machine")
    if output is not None and output.suffix != ".toml":
        raise UsageError(
            f"The machine was to be saved as {str(output)!r}. The name of a machine file ends in .toml. "
            f"Choose another path."
        )


def _check_plans(asked: _Asked) -> None:
    """Refuse before measuring what could not be measured or kept."""
    if asked.optimizer not in rooms.cost.OPTIMIZERS:
        raise UsageError(
            f"The optimizer {asked.optimizer[:60]!r} was to be measured. Known are {', '.join(rooms.cost.OPTIMIZERS)}. "
            f"Name one of them."
        )
    if asked.plans:
        rooms.cost.MeasurementStore(costs_path()).close()
    for path in asked.plans:
        rooms.ir.check_registered(rooms.models.read_plan(path, asked.imports).graph)


def _calibrate_here(asked: _Asked) -> Calibration:
    """Start the ranks on this host; one rank needs no process of its own."""
    machine = _machine(asked.machine)
    if machine.num_nodes > 1:
        raise UsageError(
            f"The calibration of {machine.name} was asked for, which has {machine.num_nodes} nodes. From here only "
            f"ranks on this host can be started. Run `conjoin calibrate` under torchrun on all of its nodes."
        )
    if machine.device == "cuda" and rooms.torch.cuda.device_count() < machine.num_devices:
        raise UsageError(
            f"The calibration of {machine.name} was asked for, which has {machine.num_devices} CUDA devices. This "
            f"host has {rooms.torch.cuda.device_count()}. Run it there, or calibrate processes on the CPU "
            f"with --machine local:4."
        )
    if machine.num_devices == 1:
        return calibrate_rank(0, asked)
    found: Calibration = rooms.runtime.launch(machine.num_devices, calibrate_rank, asked)[0]
    return found


def _machine(word: str | None) -> rooms.machine.Machine:
    return rooms.machine.Machine.detect() if word is None else rooms.machine.parse_machine(word, machines_directory())


def calibrate_rank(rank: int, asked: _Asked) -> Calibration:
    """What every rank does; all get the same answer."""
    rooms.models.import_modules(asked.imports)
    device = rooms.runtime.join_ranks()
    machine = _machine(asked.machine)
    communicator = rooms.runtime.communicator_over(machine.mesh)
    machine = _on(machine, device.type)
    told = _Progress(machine, asked.seconds) if communicator.rank == 0 else None
    share = _COMMUNICATION_SHARE if machine.num_devices > 1 else 0.0
    communication = rooms.runtime.measure_communication(communicator, share * asked.seconds, told)
    pace = rooms.runtime.Pace(communicator, device)
    speeds = rooms.device_probe.probe_devices(machine, pace, (1 - share) * asked.seconds)
    described = describe(machine, communication, speeds.devices)
    operators = rooms.device_probe.probe_wanted(asked.wanted(), asked.optimizer, described, pace) if asked.plans else {}
    if told is not None:
        told.end()
    return Calibration(described, communication, speeds, operators)


def _on(machine: rooms.machine.Machine, kind: str) -> rooms.machine.Machine:
    """The machine with devices of the kind that its ranks really run on."""
    if machine.device == kind:
        return machine
    if machine.nodes:
        raise UsageError(
            f"The calibration of {machine.name} was asked for, whose devices are {machine.device}. The ranks run on "
            f"{kind}. Run it where its devices are, or name a machine without device types, as local:4."
        )
    return replace(machine, device=kind)


class _Progress:
    """One line on a terminal that says how far it is; elsewhere the line stands once."""

    def __init__(self, machine: rooms.machine.Machine, seconds: float) -> None:
        self._line = f"calibrating {machine} for about {seconds:g} s"
        self._rewrites = sys.stderr.isatty()
        typer.echo(self._line, err=True, nl=not self._rewrites)

    def __call__(self, part: float) -> None:
        if self._rewrites:
            typer.echo(f"\r{self._line}: {part:.0%} of collectives", err=True, nl=False)

    def end(self) -> None:
        if self._rewrites:
            typer.echo("", err=True)


# The machine.


def describe(
    machine: rooms.machine.Machine, communication: Communication, devices: Sequence[DeviceType]
) -> rooms.machine.Machine:
    """The machine with what was measured: a device type for each rank, fits, and links where it had none."""
    fits = tuple(timed.fit() for timed in communication.collectives)
    if machine.nodes:
        known = {device.name: device for device in devices}
        kinds = [replace(kind, devices=tuple(known[d.name] for d in kind.devices)) for kind in machine.nodes]
        return replace(machine, nodes=tuple(kinds), fits=fits)
    places = [machine.location(rank) for rank in range(machine.num_devices)]
    nodes = [tuple(devices[rank] for _, rank in found) for found in _by_node(places)]
    links, switches = _measured_links(machine, communication.point_to_point)
    runs = [(node, len(list(run))) for node, run in groupby(nodes)]
    names = ["node"] if len(runs) == 1 else [f"node-{i}" for i in range(len(runs))]
    kinds = [
        rooms.machine.NodeKind(name, n, node, links, switches) for name, (node, n) in zip(names, runs, strict=True)
    ]
    return replace(machine, nodes=tuple(kinds), fits=fits)


def _by_node(places: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Position and rank of the devices of each node, in the order of nodes and positions."""
    found = sorted((node, position, rank) for rank, (node, position) in enumerate(places))
    return [[(position, rank) for _, position, rank in node] for _, node in groupby(found, key=lambda place: place[0])]


def _measured_links(
    machine: rooms.machine.Machine, pairs: Sequence[Timed]
) -> tuple[tuple[rooms.machine.Link, ...], tuple[str, ...]]:
    """Every device on one switch, and the switch on the network: as fast as one pair was in a node and between two."""
    fits = {timed.axes[0]: timed.fit() for timed in pairs}
    inside, across = (
        next((fits[axis.name] for axis in machine.mesh.axes if axis.between_nodes == way and axis.name in fits), None)
        for way in (False, True)
    )
    if inside is None:
        return ((), ()) if across is None else ((_link(("0", rooms.machine.NETWORK), across, across.latency / 2),), ())
    links = [_link((str(i), "host"), inside, inside.latency / 2) for i in range(machine.devices_per_node)]
    if across is not None:
        links.append(_link(("host", rooms.machine.NETWORK), across, max(0.0, across.latency - inside.latency) / 2))
    return tuple(links), ("host",)


def _link(ends: tuple[str, str], fit: CollectiveFit, latency: float) -> rooms.machine.Link:
    return rooms.machine.Link(ends, 1 / max(fit.seconds_per_byte, 1 / _WIDEST), latency, "measured")


# What is shown.


def _show(found: Calibration, output: Path | None, as_json: bool) -> None:
    if as_json:
        print_json({"saved": None if output is None else str(output), **_facts(found)})
        return
    for line in _table(found):
        typer.echo(line)
    for device, outcomes in found.operators.items():
        number = sum(isinstance(outcome, rooms.cost.Measurement) for outcome in outcomes)
        typer.echo(f"{'measured':<12} {number} of {len(outcomes)} calls of the plans on {device}; kept")
    typer.echo(f"{'saved':<12} {output if output is not None else 'no; -o machine.toml saves the machine'}")


def _table(found: Calibration) -> list[str]:
    lines = [str(found.machine)]
    timed = (*found.communication.collectives, *found.communication.point_to_point)
    if timed:
        lines.append(f"{'axes':<12} {'collective':<15} {'α (µs)':>10} {'GB/s':>9} {'R²':>7} {'largest error':>14}")
    lines += [line for each in timed for line in _row(each)]
    together = found.communication.concurrency
    if together is not None:
        first, second = (" ".join(axes) for axes in together.axes)
        lines.append(f"all-reduces over {first} and over {second} at once take {together.slowdown:.2f}× the longer one")
    for device in dict.fromkeys(found.speeds.devices):
        lines += _device_lines(device)
    lines.append(f"{'operators':<12} estimated from these figures within {found.speeds.error:.0%} in the median")
    return lines + [f"{'warning':<12} {told}" for told in _doubts(found)]


def _doubts(found: Calibration) -> list[str]:
    """What of the figures is not to be trusted, and what to do."""
    timed = (*found.communication.collectives, *found.communication.point_to_point)
    poor = [each for each in timed if each.fit().r_squared < _TRUSTED_FIT or _worst_error(each, each.fit()) > _TRUSTED]
    told = []
    if poor:
        worst = max(poor, key=lambda each: _worst_error(each, each.fit()))
        told.append(
            f"{len(poor)} of {len(timed)} fits are poor (R² below {_TRUSTED_FIT}, or off by more than {_TRUSTED:.0%}): "
            f"{worst.kind} over {' '.join(worst.axes)} is off by {_worst_error(worst, worst.fit()):.0%} at worst. "
            f"Something else used the links or the cores; calibrate again when they are free."
        )
    if found.speeds.error > _TRUSTED:
        told.append(
            f"operators are off by {found.speeds.error:.0%} in the median, and so will be predictions of what was not "
            f"measured. Calibrate again when the devices are free, or with the plans to be run."
        )
    return told


def _row(timed: Timed) -> list[str]:
    fit = timed.fit()
    axes, worst = " ".join(timed.axes), _worst_error(timed, fit)
    numbers = f"{1e6 * fit.latency:>10.1f} {_rate(fit.seconds_per_byte):>9} {fit.r_squared:>7.4f} {worst:>13.0%}"
    row = f"{axes:<12} {timed.kind:<15} {numbers}"
    if not fit.break_bytes:
        return [row]
    small = f"{1e6 * fit.small_latency:>10.1f} {_rate(fit.small_seconds_per_byte):>9}"
    return [row, f"{'':<12} {'  small':<15} {small}         below {fit.break_bytes:,} bytes"]


def _rate(seconds_per_byte: float) -> str:
    return f"{1e-9 / seconds_per_byte:.3f}" if seconds_per_byte > 1 / _WIDEST else "–"


def _worst_error(timed: Timed, fit: CollectiveFit) -> float:
    return max(abs(fit.seconds(size) / seconds - 1) for size, seconds in timed.points)


def _device_lines(device: DeviceType) -> list[str]:
    rates = ", ".join(f"{dtype} {flops / 1e12:.4g}" for dtype, flops in device.peak_flops)
    shares = ", ".join(f"{family} {share:.0%}" for family, share in device.efficiency if " " not in family)
    memory = f"{device.memory_bytes / 1e9:.1f} GB at {device.memory_bandwidth / 1e9:.1f} GB/s"
    is_gpu = device.kind == "cuda"
    return [
        f"{'device':<12} {device.name}: memory {memory}, TFLOP/s {rates}",
        f"{'efficiency':<12} {shares or 'not enough time to tell'}; {1e6 * device.overhead_seconds:.1f} µs a call",
        *([f"{'host':<12} takes {device.host_factor:.2f} times as long for a call as prices say"] * is_gpu),
    ]


def _facts(found: Calibration) -> dict[str, Any]:
    together = found.communication.concurrency
    return {
        "machine": str(found.machine),
        "collectives": [_timed_facts(timed) for timed in found.communication.collectives],
        "point_to_point": [_timed_facts(timed) for timed in found.communication.point_to_point],
        "concurrency": None if together is None else {**asdict(together), "slowdown": together.slowdown},
        "devices": [
            {**asdict(device), "peak_flops": dict(device.peak_flops), "efficiency": dict(device.efficiency)}
            for device in dict.fromkeys(found.speeds.devices)
        ],
        "operator_error": found.speeds.error,
        "warnings": _doubts(found),
        "measured_calls": {
            device: sum(isinstance(outcome, rooms.cost.Measurement) for outcome in outcomes)
            for device, outcomes in found.operators.items()
        },
    }


def _timed_facts(timed: Timed) -> dict[str, Any]:
    fit = timed.fit()
    points = [{"bytes": x, "seconds": y, "fitted_seconds": fit.seconds(x)} for x, y in timed.points]
    return {**asdict(fit), "largest_error": _worst_error(timed, fit), "points": points}
