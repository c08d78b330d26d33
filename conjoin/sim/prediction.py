"""What a plan will cost on a machine: seconds a step and where they go, memory, throughput."""

from __future__ import annotations

from dataclasses import dataclass

from conjoin.cost import CostModel
from conjoin.errors import PlanError, UsageError
from conjoin.ir import LeafKind, Plan
from conjoin.machine import Machine
from conjoin.ops import flops, spec_for
from conjoin.sim.breakdown import Breakdown, break_down
from conjoin.sim.expected_error import expected_error
from conjoin.sim.memory import OPTIMIZER_COPIES, Memory, measure_memory
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
    """What all devices together could do in a second, in the dtype of most of the work."""

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
    if optimizer not in OPTIMIZER_COPIES:
        raise UsageError(
            f"The optimizer {optimizer[:40]!r} was asked for. Known are {', '.join(OPTIMIZER_COPIES)}. "
            f"Name the one that remembers as many tensors for a parameter as yours."
        )
    if plan.mesh != machine.mesh:
        raise PlanError(
            f"The plan is for {plan.mesh.size} devices ({plan.mesh}), and the machine {machine.name} has "
            f"{machine.num_devices} ({machine.mesh}). Their axes must be the same. "
            f"Make the plan for this machine, or name the machine it was made for."
        )
    found = simulate(plan, MachinePrices(machine, costs, optimizer), unfold=unfold)
    work, dtype = _work(found.program.skeleton, found.program.steps)
    devices = [machine.device_type(rank) for rank in range(machine.num_devices)]
    return Prediction(
        found,
        break_down(found.timeline),
        measure_memory(found.program, optimizer, machine.device),
        machine.usable_bytes,
        _num_samples(plan),
        work,
        sum(device.flops_of(dtype) for device in devices),
    )


def _work(skeleton: Skeleton, steps: int) -> tuple[float, str]:
    """The floating-point operations of a step, and the dtype that most of them are done in.

    A backward pass is counted as once the forward for each operand that gets a gradient, at most two.
    """
    by_dtype: dict[str, float] = {"float32": 0.0}
    for operator in skeleton.operators:
        spec = spec_for(operator.call)
        if spec is not None and operator.call.tensors:
            dtype = str(operator.call.tensors[0].dtype).removeprefix("torch.")
            work = flops(spec, operator.call) * (1 + min(2, len(operator.needs)))
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + work
    return steps * sum(by_dtype.values()), max(by_dtype, key=by_dtype.__getitem__)


def _num_samples(plan: Plan) -> int | None:
    shapes = [leaf.type.shape for leaf in plan.graph.leaves_of(LeafKind.INPUT)]
    steps = plan.accumulation.steps if plan.accumulation is not None else 1
    return next((steps * shape[0] for shape in shapes if shape), None)
