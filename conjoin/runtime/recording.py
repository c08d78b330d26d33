"""What a rank really did in a step, and when: by torch's own profiler, sorted into computing and communicating.

Collectives bear the words of routes and of predicted traces, whatever a backend calls them: `gloo:all_reduce`,
`nccl:_all_gather_base`, `ncclDevKernel_ReduceScatter_Sum_f32_RING_LL`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from conjoin.runtime.torch_private import is_profiling

COMPUTING, COMMUNICATING = "compute", "links"
_BACKWARD = "autograd::engine::evaluate_function: "
_SILENT = "99"
"""The profiler's library tells on stderr that it starts and stops, unless told otherwise before its first use."""
_PREFIXES = (_BACKWARD, "torch::autograd::", "aten::")
_MARK = "conjoin: "
_MESSAGES = ("gloo:send", "gloo:recv")
_numbers = count()
_SPAN, _KERNEL = "nccl:", "nccl"
"""On a GPU a collective is there as a span, and again as the kernels that carry it out."""
_COLLECTIVE = re.compile(r"(?:gloo:|nccl:|nccl(?:Dev)?Kernel_?)(\w*)")
_WORDS = {
    # What a backend's name has in it, without lines and capitals; the special stands before the general.
    "barrier": "barrier", "reducescatter": "reduce-scatter", "allreduce": "all-reduce", "allgather": "all-gather",
    "alltoall": "all-to-all", "broadcast": "broadcast", "sendrecv": "send and recv", "send": "send", "recv": "recv",
    "reduce": "reduce", "gather": "gather", "scatter": "scatter",
}  # fmt: skip


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
    found = _on_gpu(on_gpu) if on_gpu else _on_cpu(events)
    begin = min((entry.start for entry in found), default=0.0)
    shifted = (Recorded(e.stream, e.name, e.start - begin, e.duration) for e in found)
    return sorted(shifted, key=lambda entry: entry.start)


@dataclass(frozen=True, slots=True)
class CollectiveLabel:
    """The name of a collective that is carried out by single messages, and which one it is."""

    kind: str
    number: int

    @staticmethod
    def new(kind: str) -> CollectiveLabel:
        return CollectiveLabel(kind, next(_numbers))


def labelled(label: CollectiveLabel) -> AbstractContextManager[object]:
    """Around the start of a collective, and around the wait for it: a recording has it from the one to the other."""
    return record_function(f"{_MARK}{label.kind} {label.number}") if is_profiling() else nullcontext()


def collective_name(name: str) -> str | None:
    """The word for a collective that a backend names in its own way; None for what is none.

    >>> collective_name("gloo:all_reduce"), collective_name("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)")
    ('all-reduce', 'all-gather')
    """
    found = _COLLECTIVE.match(name)
    if found is None:
        return None
    plain = found[1].replace("_", "").lower()
    return next((word for part, word in _WORDS.items() if part in plain), "collective")


def _on_gpu(events: Sequence[Any]) -> list[Recorded]:
    """What ran on the GPU; a collective once."""
    spans = any(event.name.startswith(_SPAN) for event in events)
    kept = [e for e in events if e.name.startswith(_SPAN) or not (spans and e.name.startswith(_KERNEL))]
    return [_recorded(event, collective_name(event.name)) for event in kept]


def _on_cpu(events: Sequence[Any]) -> list[Recorded]:
    """What ran on the CPU, less what only carries a collective out, which is there under its own name."""
    marks = [event for event in events if event.name.startswith(_MARK)]
    found = _from_marks(marks)
    for event in events:
        if event.cpu_parent is None and not event.name.startswith((_MARK, "c10d::")) and not _is_part(event, marks):
            collective = collective_name(event.name)
            if collective is not None or not _in_backend(event):
                found.append(_recorded(event, collective))
    return found


def _is_part(event: Any, marks: Sequence[Any]) -> bool:
    """Whether it is a message of a collective that has a label."""
    start = event.time_range.start
    spans = (mark.time_range for mark in marks) if event.name in _MESSAGES else ()
    return any(span.start <= start <= span.end for span in spans)


def _from_marks(marks: Sequence[Any]) -> list[Recorded]:
    """Collectives by messages, each from its start to the end of the wait for it.

    Nobody notices when the last message comes: one waited for late may have been over long before.
    """
    spans: dict[str, list[Any]] = {}
    for mark in marks:
        spans.setdefault(mark.name, []).append(mark.time_range)
    found = []
    for name, both in spans.items():
        start, end = min(span.start for span in both), max(span.end for span in both)
        found.append(Recorded(COMMUNICATING, name.removeprefix(_MARK).rsplit(" ", 1)[0], start, end - start))
    return found


def _recorded(event: Any, collective: str | None) -> Recorded:
    name: str = event.name
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    span = event.time_range
    stream = COMPUTING if collective is None else COMMUNICATING
    return Recorded(stream, collective or name, span.start, span.end - span.start)


def _in_backend(event: Any) -> bool:
    """Whether a thread of the backend does it."""
    return bool(event.is_async) or event.thread > 1
