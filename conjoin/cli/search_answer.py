"""How commands that search tell of it: a line while it runs, and the result as text and data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from shutil import get_terminal_size
from time import monotonic
from typing import TYPE_CHECKING, Any

from conjoin.cli import rooms
from conjoin.environment import costs_path

if TYPE_CHECKING:
    from conjoin.ir import Graph
    from conjoin.machine import Machine
    from conjoin.search import Progress, Row, SearchResult
    from conjoin.sim import PipelinePrediction, Prediction

_INTERVAL = 0.1
_LOG_INTERVAL = 10.0
_WIDTH = 118


@contextmanager
def progress_line() -> Iterator[Callable[[Progress], None]]:
    """How a search goes, on one line of the terminal; in a log a line from time to time."""
    with _line() as show:
        yield lambda progress: show(str(progress), progress.elapsed)


@contextmanager
def status_line() -> Iterator[Callable[[str], None]]:
    """What is being done, on one line of the terminal; in a log a line from time to time."""
    with _line() as show:
        begin = monotonic()
        yield lambda doing: show(doing, monotonic() - begin)


@contextmanager
def _line() -> Iterator[Callable[[str, float], None]]:
    """A line that is written over, told with its second; in a log one after the other, seconds after the last."""
    in_place, width = sys.stderr.isatty(), 0
    interval, last = (_INTERVAL, -_INTERVAL) if in_place else (_LOG_INTERVAL, 0.0)

    def show(text: str, elapsed: float) -> None:
        nonlocal last, width
        if elapsed - last < interval:
            return
        last = elapsed
        width = min(_WIDTH, get_terminal_size().columns - 1)  # a longer one goes on in a line that stays
        line = f"\r{text[:width]:<{width}}" if in_place else f"{text}\n"
        print(line, end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        if in_place:
            print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)


def costs_mark() -> str:
    """What tells one state of the measured costs of this host from another."""
    path = costs_path()
    return f"{path.stat().st_mtime_ns}:{path.stat().st_size}" if path.exists() else "none"


def result_to_json(result: SearchResult, notes: Notes) -> dict[str, Any]:
    """A result as plain data."""
    alone = notes.alone
    return {
        "strategy": result.plan.strategy,
        "seconds_per_step": result.seconds_per_step,
        "expected_error": result.error,
        "baseline": result.baseline,
        "baseline_seconds_per_step": result.baseline_seconds_per_step,
        "ratio": result.ratio,
        "peak_bytes": result.peak_bytes,
        "objective": result.objective,
        "machine": result.plan.machine.name,
        "num_devices": result.num_devices,
        "bound": None if result.certificate is None else {**asdict(result.certificate), "gap": result.certificate.gap},
        "search_seconds": result.search_seconds,
        "cpu_seconds": result.cpu_seconds,
        "num_plans": result.num_plans,
        "stopped": result.stopped.value,
        "dropped": dict(result.dropped),
        "history": [{"seconds": i.elapsed, "seconds_per_step": i.seconds, "by": i.name} for i in result.history],
        **({} if notes.prediction is None else rooms.report.notes_to_json(notes.prediction, notes.machine)),
        "alone": None if alone is None else {"device": alone[0], "seconds_per_step": alone[1]},
    }


@dataclass(frozen=True, slots=True)
class Notes:
    """What to know beside the seconds of a step on a machine."""

    machine: Machine
    prediction: Prediction | PipelinePrediction | None
    """Of the plan on the whole machine; None where it is for a part."""
    alone: tuple[str, float] | None
    """Where devices differ: a type of which one alone is predicted to be faster, and its seconds."""


def take_notes(graph: Graph, machine: Machine, found: Prediction | PipelinePrediction | None, optimizer: str) -> Notes:
    """What to know of a prediction, the best there is for the machine."""
    return Notes(machine, found, None if found is None else _faster_alone(graph, machine, found.seconds, optimizer))


def _faster_alone(graph: Graph, machine: Machine, seconds: float, optimizer: str) -> tuple[str, float] | None:
    """The device type of which one, alone, is predicted to take the least, if less than that and the model fits."""
    if len(machine.device_types) < 2:
        return None
    found: list[tuple[float, str]] = []
    for device in machine.device_types:
        kind = rooms.machine.NodeKind("node", 1, (device,))
        one = rooms.machine.Machine(device.name, 1, 1, machine.device, nodes=(kind,))
        step = rooms.api.simulate_plan(rooms.search.make_plan(graph, one, "single"), one, optimizer=optimizer)
        if step.fits and step.seconds < seconds:
            found.append((step.seconds, device.name))
    return min(found)[::-1] if found else None


def top_lines(notes: Notes) -> list[str]:
    """What stands above a result: what its prices rest on, and whether fewer devices would do."""
    found, alone = notes.prediction, notes.alone
    lines = [] if found is None else rooms.report.price_notes(found, notes.machine)
    if found is not None and alone is not None:
        name, seconds = alone
        lines.append(
            f"{'alone':<12} one {name} is predicted to take {rooms.report.format_seconds(seconds)} a step, "
            f"{found.seconds / seconds:.1f} times as fast as all {notes.machine.num_devices} devices"
        )
    return lines


def result_lines(result: SearchResult, notes: Notes) -> list[str]:
    """A result for people."""
    return [
        f"{'predicted':<12} {rooms.report.format_seconds(result.seconds_per_step)} a step, ± {result.error:.0%}, "
        f"{rooms.report.format_bytes(result.peak_bytes)} on the fullest device",
        *([] if notes.prediction is None else rooms.report.busy_notes(notes.prediction)),
        *([_devices_line(result)] if result.objective == "cost" else []),
        f"{'baseline':<12} {_baseline_text(result)}",
        f"{'bound':<12} {result.certificate if result.certificate is not None else 'none is known'}",
        f"{'search':<12} {result.num_plans} plans in {result.search_seconds:.1f} s, {result.stopped.value}",
        *(f"{'dropped':<12} {name}: {reason}" for name, reason in result.dropped.items()),
    ]


def _devices_line(result: SearchResult) -> str:
    """How many devices a plan takes where that was to be decided."""
    share = rooms.report.format_seconds(result.seconds_per_step * result.num_devices)
    return f"{'devices':<12} {result.num_devices}, {share} of devices a step; --machine {result.plan.machine.name}"


def _baseline_text(result: SearchResult) -> str:
    if not result.baseline:
        return "none: no named strategy fits the model, the machine and what was asked"
    found = f"{rooms.report.format_seconds(result.baseline_seconds_per_step)} by {result.baseline}"
    if result.objective == "cost":
        return f"{found} on {result.baseline_devices or result.num_devices}: {result.ratio:.2f} times as cheap"
    return f"{found}: {result.ratio:.2f} times as fast"


_HEADINGS = ("strategy or search", "step", "compute", "exposed", "waiting", "hidden", "memory", "fits", "search")


def comparison_lines(rows: Sequence[Row], notes: Notes) -> list[str]:
    """A table of strategies and searches; where devices differ, with the share of the step that each type computes."""
    types = [device.name for device in notes.machine.device_types]
    headings = (*_HEADINGS, *(f"busy {name}" for name in types)) if len(types) > 1 else _HEADINGS
    table = [headings, *(_cells(row, notes.machine) for row in rows if row.prediction is not None)]
    widths = [max(len(line[i]) for line in table) for i in range(len(headings))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
    refused = [f"{row.name}: {row.reason}" for row in rows if row.prediction is None]
    return [*top_lines(notes), *lines, *_alike(rows), *refused]


def _alike(rows: Sequence[Row]) -> list[str]:
    """What is too near to the fastest for a prediction to tell it apart."""
    timed = [(row.prediction.seconds, row) for row in rows if row.prediction is not None and row.fits]
    if not timed:
        return []
    least, first = min(timed, key=lambda found: found[0])
    assert first.prediction is not None
    near = [row.name for seconds, row in timed if row is not first and seconds <= (1 + rooms.sim.ALIKE) * least]
    told = [f"steps are expected within ± {first.prediction.error:.0%}"]
    if near:
        told.append(f"within {rooms.sim.ALIKE:.0%} of {first.name}, and so alike: {', '.join(near)}")
    return told


def row_to_json(row: Row, machine: Machine) -> dict[str, Any]:
    """A row as plain data."""
    found = row.prediction
    if found is None:
        return row.to_json()
    return {**row.to_json(), "recompute": found.breakdown.recompute, **rooms.report.notes_to_json(found, machine)}


def _cells(row: Row, machine: Machine) -> tuple[str, ...]:
    """Compute, exposed and waiting make up the step."""
    found = row.prediction
    assert found is not None
    parts = found.breakdown
    busy = [f"{dict(found.busy)[device.name]:.0%}" for device in machine.device_types]
    return (
        row.name,
        rooms.report.format_seconds(found.seconds),
        rooms.report.format_seconds(parts.forward + parts.backward + parts.recompute + parts.update),
        rooms.report.format_seconds(parts.exposed),
        rooms.report.format_seconds(parts.waiting),
        rooms.report.format_seconds(parts.hidden),
        rooms.report.format_bytes(found.memory.peak),
        "yes" if row.fits else "no",
        f"{row.search_seconds:.1f} s{', interrupted' if row.stopped is rooms.search.Stopped.INTERRUPTED else ''}",
        *(busy if len(busy) > 1 else ()),
    )
