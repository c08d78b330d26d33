"""A timeline as a trace that Perfetto and Chrome show: one process a device, one row a stream."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conjoin.errors import UsageError
from conjoin.ir import write_file
from conjoin.sim import Instruction, Simulation, Ticks

_STREAMS = ("host", "compute", "links inside the node", "links between nodes")
_MAX_DEVICES = 64
"""More rows than that nobody reads; devices that behave alike are one row anyway."""
_TICKS_PER_MICROSECOND = 10**6


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time on a stream of a device; times in microseconds."""

    device: str
    stream: str
    name: str
    start: float
    duration: float
    details: tuple[tuple[str, str | int | float], ...] = ()


def simulated_events(simulation: Simulation, label: str = "predicted") -> Iterator[Event]:
    """Every task of a simulated step, on one device of each class that behaves alike."""
    classes = simulation.classes
    shape = classes.shape
    for which, rank in enumerate(classes.ranks[:_MAX_DEVICES]):
        device = f"{label}: rank {rank}" + ("" if len(classes.ranks) == classes.mesh.size else " and those like it")
        for task, start, end in simulation.timeline.times():
            begin, stop = _at(start, which, shape), _at(end, which, shape)
            if stop > begin:
                yield Event(device, _STREAMS[task.stream], task.name, begin, stop - begin, _details(task))


def _details(task: Instruction) -> tuple[tuple[str, str | int | float], ...]:
    found: list[tuple[str, str | int | float]] = [("phase", task.phase.value), ("source", task.source.value)]
    return (*found, ("axes", " ".join(task.axes)), ("bytes sent", task.sent)) if task.axes else tuple(found)


def _at(ticks: Ticks, which: int, shape: tuple[int, ...]) -> float:
    value = np.broadcast_to(ticks, shape).flat[which] if shape else ticks
    return int(value) / _TICKS_PER_MICROSECOND


def trace_json(events: Iterable[Event]) -> dict[str, Any]:
    """Events in the trace event format."""
    devices: dict[str, int] = {}
    streams: dict[tuple[str, str], int] = {}
    found: list[dict[str, Any]] = []
    for event in events:
        process = devices.setdefault(event.device, len(devices))
        thread = streams.setdefault((event.device, event.stream), len(streams))
        entry = {"ph": "X", "pid": process, "tid": thread, "name": event.name, "ts": event.start, "dur": event.duration}
        found.append({**entry, "args": dict(event.details)} if event.details else entry)
    names = [_named("process_name", process, 0, device) for device, process in devices.items()]
    names += [_named("thread_name", devices[device], thread, stream) for (device, stream), thread in streams.items()]
    return {"displayTimeUnit": "ms", "traceEvents": names + found}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def save_trace(events: Iterable[Event], path: str | Path) -> None:
    """Write a trace file, to be opened in ui.perfetto.dev or chrome://tracing."""
    write_file(path, json.dumps(trace_json(events)) + "\n", "trace", UsageError)
