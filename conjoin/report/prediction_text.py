"""A prediction for people, and as data for programs."""

from __future__ import annotations

from typing import Any

from conjoin.ir import Plan
from conjoin.machine import Machine
from conjoin.report.explanation import precision_text
from conjoin.report.prediction_notes import busy_notes, notes_to_json, price_notes
from conjoin.report.text import format_bytes
from conjoin.sim import Prediction


def format_seconds(seconds: float) -> str:
    """Seconds in the unit that suits them.

    >>> format_seconds(0.0123), format_seconds(4.5e-6), format_seconds(90.0)
    ('12.3 ms', '4.5 µs', '90.0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size or unit == "µs":
            return f"{seconds / size:.1f} {unit}"
    raise AssertionError


def prediction_text(found: Prediction, plan: Plan, machine: Machine) -> str:
    """A prediction in lines: what it rests on, the step, where it goes, throughput, memory, collectives."""
    parts, memory = found.breakdown, found.memory
    step = f"{format_seconds(found.seconds)} ± {found.error:.0%}"
    lines = [*price_notes(found, machine), f"{'plan':<12} {plan}", f"{'precision':<12} {precision_text(plan)}"]
    lines += [f"{'machine':<12} {machine}", f"{'step':<12} {step}"]
    for name, seconds in _shares(found).items():
        lines.append(f"  {name:<26} {format_seconds(seconds):>10} {seconds / max(found.seconds, 1e-30):>7.1%}")
    lines.append(f"{'hidden':<12} {format_seconds(parts.hidden)} of communication behind computation")
    lines += busy_notes(found)
    rate = found.samples_per_second
    use = f"{found.model_flops_utilization:.1%} of the devices' peak rate goes into the model (MFU)"
    lines.append(f"{'throughput':<12} {'' if rate is None else f'{rate:,.1f} samples/s, '}{use}")
    lines.append(f"{'memory':<12} {format_bytes(memory.peak)} of {format_bytes(found.capacity)} on the fullest device")
    for name, num_bytes in _memory_parts(found).items():
        lines.append(f"  {name:<26} {format_bytes(num_bytes):>10}")
    if free := _kept_free(found, machine):
        why = "context, communicators, what the allocator cannot use"
        lines.append(f"  {'kept free':<26} {format_bytes(free):>10}  {why}")
    if not found.fits:
        lines.append(f"  does not fit: {format_bytes(memory.peak - found.capacity)} too much")
    for kind, axes, count, seconds, sent in parts.collectives:
        what = f"{kind} over {' '.join(axes)}"
        lines.append(f"{'collectives':<12} {what}: {count}, {format_bytes(sent)} sent, {format_seconds(seconds)}")
    total = sum(seconds for _, seconds in parts.sources) or 1.0
    sources = ", ".join(f"{source.value} {seconds / total:.0%}" for source, seconds in parts.sources if seconds)
    lines.append(f"{'sources':<12} {sources or 'nothing takes time'}")
    return "\n".join(lines) + "\n"


def _shares(found: Prediction) -> dict[str, float]:
    parts = found.breakdown
    return {
        "forward": parts.forward,
        "backward": parts.backward,
        **({"recompute": parts.recompute} if parts.recompute else {}),
        "update": parts.update,
        "communication, exposed": parts.exposed,
        "waiting": parts.waiting,
    }


def _kept_free(found: Prediction, machine: Machine) -> int:
    """What plans leave of a device's memory."""
    return min(device.memory_bytes for device in machine.device_types) - found.capacity


def _memory_parts(found: Prediction) -> dict[str, int]:
    memory = found.memory
    return {
        "parameters": memory.parameters,
        "optimizer state": memory.optimizer_state,
        "buffers": memory.buffers,
        "inputs": memory.inputs,
        "activations and gradients": memory.activations,
    }


def prediction_to_json(found: Prediction, plan: Plan, machine: Machine) -> dict[str, Any]:
    """A prediction as plain data; seconds and bytes."""
    parts = found.breakdown
    return {
        "plan": plan.strategy,
        "precision": precision_text(plan),
        "model": plan.model.name,
        "machine": machine.name,
        "devices": machine.num_devices,
        "seconds_per_step": found.seconds,
        "expected_error": found.error,
        "seconds": {**_shares(found), "communication, hidden": parts.hidden},
        "samples_per_second": found.samples_per_second,
        "model_flops_utilization": found.model_flops_utilization,
        "memory": {
            "peak": found.memory.peak,
            "capacity": found.capacity,
            "kept_free": _kept_free(found, machine),
            "fits": found.fits,
            **_memory_parts(found),
        },
        "collectives": [
            {"kind": kind, "axes": list(axes), "count": count, "seconds": seconds, "bytes_sent": sent}
            for kind, axes, count, seconds, sent in parts.collectives
        ],
        "sources": {source.value: seconds for source, seconds in parts.sources},
        **notes_to_json(found, machine),
        "tasks": found.simulation.num_tasks,
    }
