"""What a plan will cost on a machine: seconds a step and where they go, memory, throughput."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from conjoin.cost import CostModel, is_product, rate_name, work_of
from conjoin.errors import PlanError
from conjoin.ir import LeafKind, Plan
from conjoin.machine import Machine
from conjoin.ops import flops, spec_for
from conjoin.sim.breakdown import Breakdown, break_down, computing_shares
from conjoin.sim.expected_error import expected_error, is_all_estimated
from conjoin.sim.memory import check_optimizer, measure_memory
from conjoin.sim.memory_walk import Memory
from conjoin.sim.parts import part_spans
from conjoin.sim.prices import MachinePrices
from conjoin.sim.simulation import Simulation, simulate
from conjoin.sim.skeleton import Skeleton


@dataclass(frozen=True, slots=True)
class Prediction:
    """One training step of a plan on a machine."""

    simulation: Simulation
    breakdown: Breakdown
    memory: Memory
    capacity: int
    """Bytes of the device with the least memory."""
    num_samples: int | None
    """Samples in a batch; None where no input has a first dim to count."""
    step_flops: float
    """Floating-point operations of the model, forward and backward, however it is split."""
    peak_flops: float
    """What all devices together could do of this work in a second, each part of it at the peak rate of its dtype."""
    busy: tuple[tuple[str, float], ...] = ()
    """For every device type the share of the step in which such a device computes."""
    missing_rates: tuple[tuple[str, str], ...] = ()
    """Device types, and dtypes of the work that they have no rate for: these are reckoned at that of float32."""
    all_estimated: bool = False
    """Whether nothing of it rests on a measurement."""

    @property
    def seconds(self) -> float:
        return self.simulation.seconds

    @property
    def samples_per_second(self) -> float | None:
        return None if self.num_samples is None else self.num_samples / self.seconds

    @property
    def model_flops_utilization(self) -> float:
        """Which part of what the devices could do goes into the model (MFU)."""
        return self.step_flops / (self.peak_flops * self.seconds)

    @property
    def error(self) -> float:
        """The part by which the step may be off, by where its seconds come from."""
        return expected_error(self.breakdown.sources)

    @property
    def fits(self) -> bool:
        return self.memory.peak <= self.capacity


def predict(
    plan: Plan, machine: Machine, costs: CostModel, optimizer: str = "adam", *, unfold: bool = False
) -> Prediction:
    """Simulate a training step of a plan on a machine."""
    check_optimizer(optimizer)
    if plan.mesh != machine.mesh:
        raise PlanError(
            f"The plan is for {plan.mesh.told}, and the machine {machine.name} has {machine.mesh.told}. Their axes "
            f"must be the same. "
            f"Make the plan for this machine, or name the machine it was made for."
        )
    found = simulate(plan, MachinePrices.of(plan.graph, machine, costs, optimizer), unfold=unfold)
    breakdown = break_down(found.timeline)
    work = work_by_rate(found.program.skeleton, found.program.steps)
    return Prediction(
        found,
        breakdown,
        measure_memory(found.program, optimizer, machine.device),
        machine.usable_bytes,
        _num_samples(plan),
        sum(work.values()),
        peak_rate(work, machine),
        _busy(found, machine),
        missing_rates(work, machine),
        is_all_estimated(breakdown.sources, machine),
    )


def work_by_rate(skeleton: Skeleton, steps: int) -> dict[str, float]:
    """The floating-point operations of a step by the peak rate they are held against, as prices are.

    A backward pass is counted as once the forward for each operand that gets a gradient, at most two.
    """
    by_rate: dict[str, float] = {}
    often = {place: part.times for part in part_spans(skeleton.graph) for place in range(part.first, part.last + 1)}
    for place, operator in enumerate(skeleton.operators):
        spec = spec_for(operator.call)
        if spec is not None and operator.call.tensors:
            kernel = work_of(operator.call, ())
            rate = rate_name(kernel.family, kernel.dtype)
            if skeleton.graph.rounding.tf32 and is_product(operator.call, "float32"):
                rate = "tfloat32"
            work = flops(spec, operator.call) * (1 + min(2, len(operator.needs)))
            by_rate[rate] = by_rate.get(rate, 0.0) + steps * often.get(place, 1) * work
    return by_rate


def peak_rate(work: dict[str, float], machine: Machine) -> float:
    """Operations per second of all devices at their peak rates, for so much work of each rate."""
    devices = [machine.device_type(rank) for rank in range(machine.num_devices)]
    rates = {name: sum(device.flops_of(name) for device in devices) for name in ("float32", *work)}
    at_peak = sum(flops / rates[name] for name, flops in work.items())
    return sum(work.values()) / at_peak if at_peak else rates["float32"]


_FEW = 0.01
"""Of the work: what is less is not worth a line."""


def missing_rates(work: dict[str, float], machine: Machine) -> tuple[tuple[str, str], ...]:
    """Float32 on plain cores is what a device without tensor cores for it has, and is not missing."""
    total = sum(work.values())
    wanted = [name for name, flops in work.items() if flops > _FEW * total and name != "tfloat32"]
    return tuple(
        (device.name, name)
        for device in machine.device_types
        for name in wanted
        if ("float8" if name.startswith("float8") else name) not in dict(device.peak_flops)
    )


def _busy(found: Simulation, machine: Machine) -> tuple[tuple[str, float], ...]:
    shares: dict[str, list[float]] = defaultdict(list)
    for rank, share in zip(found.classes.ranks, computing_shares(found.timeline).ravel(), strict=True):
        shares[machine.device_type(rank).name].append(float(share))
    return tuple((name, fmean(those)) for name, those in shares.items())


def _num_samples(plan: Plan) -> int | None:
    shapes = [leaf.type.shape for leaf in plan.graph.leaves_of(LeafKind.INPUT)]
    steps = plan.accumulation.steps if plan.accumulation is not None else 1
    return next((steps * shape[0] for shape in shapes if shape), None)
