"""How commands that search tell of it: a line while it runs, and the result as text and data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any

from conjoin.cli import rooms
from conjoin.environment import costs_path

if TYPE_CHECKING:
    from conjoin.search import Progress, Row, SearchResult

_INTERVAL = 0.1
_LOG_INTERVAL = 10.0
_WIDTH = 118


@contextmanager
def progress_line() -> Iterator[Callable[[Progress], None]]:
    """A line on the terminal that is written over; in a log a line from time to time."""
    if not sys.stderr.isatty():
        yield _log_progress()
        return
    last, width = -1.0, 0

    def show(progress: Progress) -> None:
        nonlocal last, width
        if progress.elapsed - last >= _INTERVAL:
            last = progress.elapsed
            width = min(_WIDTH, get_terminal_size().columns - 1)  # a longer one goes on in a line that stays
            print(f"\r{str(progress)[:width]:<{width}}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)


def _log_progress() -> Callable[[Progress], None]:
    last = 0.0

    def show(progress: Progress) -> None:
        nonlocal last
        if progress.elapsed - last >= _LOG_INTERVAL:
            last = progress.elapsed
            print(progress, file=sys.stderr, flush=True)

    return show


def costs_mark() -> str:
    """What tells one state of the measured costs of this host from another."""
    path = costs_path()
    return f"{path.stat().st_mtime_ns}:{path.stat().st_size}" if path.exists() else "none"


def result_to_json(result: SearchResult) -> dict[str, Any]:
    """A result as plain data."""
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
    }


def result_lines(result: SearchResult) -> list[str]:
    """A result for people."""
    return [
        f"{'predicted':<12} {rooms.report.format_seconds(result.seconds_per_step)} a step, ± {result.error:.0%}, "
        f"{rooms.report.format_bytes(result.peak_bytes)} on the fullest device",
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


_HEADINGS = ("strategy or search", "step", "compute", "exposed", "hidden", "memory", "fits", "search")


def comparison_lines(rows: Sequence[Row]) -> list[str]:
    """A table of strategies and searches."""
    table = [_HEADINGS, *(_cells(row) for row in rows if row.prediction is not None)]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEADINGS))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
    return [*lines, *_alike(rows), *(f"{row.name}: {row.reason}" for row in rows if row.prediction is None)]


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


def _cells(row: Row) -> tuple[str, ...]:
    found = row.prediction
    assert found is not None
    parts = found.breakdown
    return (
        row.name,
        rooms.report.format_seconds(found.seconds),
        rooms.report.format_seconds(parts.forward + parts.backward + parts.update),
        rooms.report.format_seconds(parts.exposed + parts.waiting),
        rooms.report.format_seconds(parts.hidden),
        rooms.report.format_bytes(found.memory.peak),
        "yes" if row.fits else "no",
        f"{row.search_seconds:.1f} s{', interrupted' if row.stopped is rooms.search.Stopped.INTERRUPTED else ''}",
    )
