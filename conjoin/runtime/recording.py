"""What a rank really did in a step, and when: by torch's own profiler, sorted into computing and communicating."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

COMPUTING, COMMUNICATING = "compute", "links"
_BACKWARD = "autograd::engine::evaluate_function: "
_SILENT = "99"
"""The profiler's library tells on stderr that it starts and stops, unless told otherwise before its first use."""
_PREFIXES = (_BACKWARD, "torch::autograd::", "aten::")


@dataclass(frozen=True, slots=True)
class Recorded:
    """Something a rank did; times in microseconds since the step began."""

    stream: str
    name: str
    start: float
    duration: float


def record(step: Callable[[], Any]) -> list[Recorded]:
    """Run a step and tell what it did, in the order it began; on a GPU that is what its kernels did."""
    os.environ.setdefault("KINETO_LOG_LEVEL", _SILENT)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        step()
    events = list(profiler.events() or ())
    on_gpu = [event for event in events if event.device_type.name == "CUDA"]
    found = [_recorded(event) for event in on_gpu or (e for e in events if e.cpu_parent is None)]
    kept = [entry for entry in found if entry is not None]
    begin = min((entry.start for entry in kept), default=0.0)
    shifted = (Recorded(e.stream, e.name, e.start - begin, e.duration) for e in kept)
    return sorted(shifted, key=lambda entry: entry.start)


def _recorded(event: Any) -> Recorded | None:
    """An event of the profiler; None for what only carries a collective out, which is there under its own name."""
    name: str = event.name
    collective = name.startswith(("gloo:", "nccl:", "nccl"))
    if not collective and (name.startswith("c10d::") or _in_collective(event)):
        return None
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    span = event.time_range
    return Recorded(COMMUNICATING if collective else COMPUTING, name, span.start, span.end - span.start)


def _in_collective(event: Any) -> bool:
    """Whether a thread of the backend does it, on the CPU."""
    return bool(event.device_type.name == "CPU" and event.is_async) or event.thread > 1
