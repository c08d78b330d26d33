"""What to know before reading a prediction: what its prices rest on, and which devices stand idle."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from conjoin.machine import Machine
from conjoin.sim import PipelinePrediction, Prediction, published_for


def price_notes(found: Prediction | PipelinePrediction, machine: Machine) -> list[str]:
    """A line where no price rests on a measurement, and one for every rate that a device type does not have."""
    told = f"{'prices':<12} all estimated from data sheets; {_published_text(machine)}"
    lines = [told] if found.all_estimated else []
    flops = {device.name: device for device in machine.device_types}
    for name, dtype in found.missing_rates:
        rate = flops[name].flops_of(dtype)
        part = "float32" if rate == flops[name].flops_of("float32") else "half of float32"
        lines.append(f"{'rates':<12} {name} has none for {dtype}: reckoned as {part}, {rate / 1e12:g} teraflops")
    return lines


def _published_text(machine: Machine) -> str:
    found = published_for(machine)
    known = [f"on {x.gpu} were off by {x.median_error:.0%} in the median, {x.worst_error:.0%} at worst" for x in found]
    names = [device.name for device in machine.device_types]
    others = [name for name in names if not name.startswith(tuple(one.gpu for one in found))]
    rest = [f"no step on {', '.join(others)} was ever compared"] if others else []
    return "; ".join([*([f"published steps {', '.join(known)}"] if known else []), *rest])


def busy_notes(found: Prediction | PipelinePrediction) -> list[str]:
    """Where devices differ: how much of the step those of each type compute."""
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.busy)
    return [f"{'busy':<12} computing of the step: {shares}"] if len(found.busy) > 1 else []


def notes_to_json(found: Prediction | PipelinePrediction, machine: Machine) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "all_estimated": found.all_estimated,
        "published_steps": [asdict(one) for one in published_for(machine)] if found.all_estimated else [],
        "missing_rates": [{"device": name, "dtype": dtype} for name, dtype in found.missing_rates],
        "busy": dict(found.busy),
    }
