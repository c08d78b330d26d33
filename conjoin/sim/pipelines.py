"""A pipeline on a machine: what its stages take by themselves, and their schedule played with what goes between them.

A stage is simulated like a plan in micro-batches: from the middle of these come the seconds of a forward and of a
backward pass, from the end what is summed up and updated once in a step. Where gradients of weights are made apart from
those of inputs, they take half of a backward pass; a stage that makes something again makes both at once. The schedule
is then played row by row, every transfer with its own time on the links between the ranks of its stages, which it may
have to wait for. A stage holds what stays and what its fullest micro-batch needs, and for every other one in flight
what is kept from its forward to its backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from conjoin.comm import makes_again
from conjoin.cost import CostModel, Source
from conjoin.errors import PlanError
from conjoin.ir import LeafKind, Pipeline, Plan, Segment, Stage, graph_form, recomputed_segments, regathered_parameters
from conjoin.machine import Machine, devices_of
from conjoin.schedules import Schedule, Timeline, Times, play
from conjoin.sim.breakdown import Breakdown, break_down
from conjoin.sim.crossings import Crossings
from conjoin.sim.expected_error import expected_error, is_all_estimated
from conjoin.sim.fragments import Drafts
from conjoin.sim.memory import check_optimizer, measure_memory
from conjoin.sim.memory_walk import Memory
from conjoin.sim.offloads import Offloads
from conjoin.sim.prediction import missing_rates, peak_rate, work_by_rate
from conjoin.sim.prices import MachinePrices, Prices
from conjoin.sim.program import NOTHING_OFFLOADED, Program
from conjoin.sim.simulation import Simulation, new_drafts, offloads_of, simulate_in_full
from conjoin.sim.skeleton import Layouts, Skeleton, take_apart

STAGE_STEPS = 3
"""Micro-batches that a stage is simulated with: one has others before and after it."""


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """One stage: seconds of a micro-batch, and of what is done once in a step; bytes of its fullest device."""

    forward: float
    backward: float
    finish: float
    """Sums over the ranks of the stage that are left for the end, and the update."""
    start: float
    """Casts of parameters for all micro-batches."""
    memory: Memory
    """With one micro-batch."""
    kept: int
    """What every further micro-batch in flight keeps."""
    in_flight: int
    sources: tuple[tuple[Source, float], ...]

    @property
    def peak(self) -> int:
        return self.memory.peak + (self.in_flight - 1) * self.kept


@dataclass(frozen=True, slots=True)
class PipelinePrediction:
    """One training step of a pipeline on a machine."""

    pipeline: Pipeline
    stages: tuple[StagePrediction, ...]
    times: Times
    """What rows and transfers take."""
    timeline: Timeline
    """Of the schedule; sums and updates come after it."""
    capacity: int
    num_samples: int | None
    step_flops: float
    peak_flops: float
    busy: tuple[tuple[str, float], ...] = ()
    """For every device type the share of the step in which such a device computes."""
    missing_rates: tuple[tuple[str, str], ...] = ()
    """Device types, and dtypes of the work that they have no rate for."""
    all_estimated: bool = False
    """Whether nothing of it rests on a measurement."""

    @property
    def seconds(self) -> float:
        """How long a step takes: until the last owner has summed up and updated what it has."""
        return max(self._ends())

    def _ends(self) -> list[float]:
        """When each owner is done; one that starts with more than the others wait for it holds up all."""
        starts = [0.0] * len(self.timeline.ends)
        for owner, stage in zip(self.pipeline.schedule.owners, self.stages, strict=True):
            starts[owner] += stage.start
        firsts = (float(rows[0]) for rows in self.timeline.starts)
        late = max(0.0, *(start - first for start, first in zip(starts, firsts, strict=True)))
        ends = [late + float(ends[-1]) for ends in self.timeline.ends]
        for owner, stage in zip(self.pipeline.schedule.owners, self.stages, strict=True):
            ends[owner] += stage.finish
        return ends

    @property
    def breakdown(self) -> Breakdown:
        """Where the time of the owner goes that is done last; what it waits for is the bubble and transfers."""
        ends = self._ends()
        last = ends.index(max(ends))
        mine = [s for owner, s in zip(self.pipeline.schedule.owners, self.stages, strict=True) if owner == last]
        times = self.pipeline.num_micro_batches
        forward, backward = times * sum(s.forward for s in mine), times * sum(s.backward for s in mine)
        update = sum(s.finish for s in mine)
        exposed = min(self.timeline.exposed_seconds, max(0.0, ends[last] - forward - backward - update))
        waiting = max(0.0, ends[last] - forward - backward - update - exposed)
        hidden = self.timeline.hidden_seconds
        return Breakdown(forward, backward, 0.0, update, exposed, waiting, hidden, (), self._sources())

    @property
    def memory(self) -> Memory:
        """Of the fullest stage, with all micro-batches that are in flight there."""
        fullest = max(self.stages, key=lambda stage: stage.peak)
        return replace(fullest.memory, peak=self.peak)

    @property
    def samples_per_second(self) -> float | None:
        return None if self.num_samples is None else self.num_samples / self.seconds

    @property
    def model_flops_utilization(self) -> float:
        """Which part of what the devices could do goes into the model (MFU)."""
        return self.step_flops / (self.peak_flops * self.seconds)

    @property
    def owner_peaks(self) -> tuple[int, ...]:
        """By owner, the bytes that its fullest device holds: its stages one beside the other."""
        held = dict.fromkeys(sorted(set(self.pipeline.schedule.owners)), 0)
        for owner, stage in zip(self.pipeline.schedule.owners, self.stages, strict=True):
            held[owner] += stage.peak
        return tuple(held.values())

    @property
    def peak(self) -> int:
        return max(self.owner_peaks)

    @property
    def fits(self) -> bool:
        return self.peak <= self.capacity

    @property
    def error(self) -> float:
        """The part by which the step may be off, by where its seconds come from."""
        return expected_error(self._sources())

    def _sources(self) -> tuple[tuple[Source, float], ...]:
        totals: dict[Source, float] = defaultdict(float)
        for stage in self.stages:
            for source, seconds in stage.sources:
                totals[source] += seconds
        totals[Source.ESTIMATED] += self.timeline.exposed_seconds
        return tuple(totals.items())


def predict_pipeline(
    pipeline: Pipeline, machine: Machine, costs: CostModel, optimizer: str = "adam"
) -> PipelinePrediction:
    """Simulate a training step of a pipeline on a machine."""
    check_optimizer(optimizer)
    if pipeline.mesh != machine.mesh:
        raise PlanError(
            f"The pipeline is for {pipeline.mesh.told}, and the machine {machine.name} has {machine.mesh.told}. Their "
            f"axes must be the same. "
            f"Make the plan for this machine, or name the machine it was made for."
        )
    once: dict[Hashable, tuple[Simulation, StagePrediction]] = {}
    alike = []
    for stage in pipeline.stages:  # those that are alike are simulated once
        form = _form(stage, machine)
        if form not in once:
            simulation = _simulated(stage, machine, costs, optimizer)
            once[form] = simulation, _predict_stage(simulation, optimizer, machine)
        alike.append(once[form])
    crossings = Crossings.of(pipeline, machine)
    later = [0.0 if makes_again(stage.plan) else 0.5 for stage in pipeline.stages]
    times = Times(
        tuple(stage.forward for _, stage in alike),
        tuple((1 - part) * stage.backward for part, (_, stage) in zip(later, alike, strict=True)),
        tuple(part * stage.backward for part, (_, stage) in zip(later, alike, strict=True)),
        crossings.activations,
        crossings.gradients,
        links=crossings.links,
    )
    timeline = play(pipeline.schedule, times)
    in_flight = timeline.peaks.in_flight
    stages = tuple(replace(stage, in_flight=in_flight[i]) for i, (_, stage) in enumerate(alike))
    work: dict[str, float] = defaultdict(float)
    for simulation, _ in alike:
        for rate, flops in work_by_rate(simulation.program.skeleton, pipeline.num_micro_batches).items():
            work[rate] += flops
    sources = tuple(entry for stage in stages for entry in stage.sources)
    return PipelinePrediction(
        pipeline, stages, times, timeline, machine.usable_bytes, _num_samples(pipeline), sum(work.values()),
        peak_rate(dict(work), machine), _busy(pipeline, timeline, machine), missing_rates(dict(work), machine),
        is_all_estimated(sources, machine),
    )  # fmt: skip


def rescheduled(told: PipelinePrediction, schedule: Schedule, machine: Machine) -> PipelinePrediction:
    """What a pipeline would take by another schedule of the same stages."""
    pipeline, timeline = replace(told.pipeline, schedule=schedule), play(schedule, told.times)
    in_flight = timeline.peaks.in_flight
    stages = tuple(replace(stage, in_flight=in_flight[i]) for i, stage in enumerate(told.stages))
    busy = _busy(pipeline, timeline, machine)
    return replace(told, pipeline=pipeline, timeline=timeline, stages=stages, busy=busy)


def _busy(pipeline: Pipeline, timeline: Timeline, machine: Machine) -> tuple[tuple[str, float], ...]:
    shares: dict[str, list[float]] = defaultdict(list)
    for owner, stage in zip(pipeline.schedule.owners, pipeline.stages, strict=True):
        for rank in stage.ranks:
            shares[machine.device_type(rank).name].append(timeline.busy[owner] / max(timeline.seconds, 1e-30))
    return tuple((name, fmean(those)) for name, those in shares.items())


def _simulated(stage: Stage, machine: Machine, costs: CostModel, optimizer: str) -> Simulation:
    part = devices_of(machine, stage.ranks)
    return stage_simulation(stage.plan, MachinePrices.of(stage.plan.graph, part, costs, optimizer))


def stage_simulation(plan: Plan, prices: Prices) -> Simulation:
    """Time some micro-batches of the plan of a stage."""
    skeleton, layouts = take_apart(plan)
    drafts = new_drafts(skeleton, layouts, plan.mesh, prices)
    drafts.bundle_bytes, drafts.chunks = plan.bundle_bytes, plan.chunks
    again = recomputed_segments(plan)
    regathered, offloads = regathered_parameters(plan), offloads_of(plan)
    return simulate_stage(skeleton, layouts, drafts, regathered, again, offloads)


def simulate_stage(
    skeleton: Skeleton,
    layouts: Layouts,
    drafts: Drafts,
    regathered: frozenset[str],
    segments: tuple[Segment, ...],
    offloads: Offloads = NOTHING_OFFLOADED,
) -> Simulation:
    """Time `STAGE_STEPS` micro-batches of a stage: in full, since its passes are read from the timeline."""
    return simulate_in_full(Program(skeleton, layouts, drafts, regathered, segments, STAGE_STEPS, offloads))


def _form(stage: Stage, machine: Machine) -> Hashable:
    """What stages share that take and hold the same: all but the names of their tensors and the ranks they run on."""
    plan = stage.plan
    gathered, offloads = regathered_parameters(plan), offloads_of(plan)
    leaves = tuple((leaf.name in gathered, leaf.name in offloads.states) for leaf in plan.graph.leaves)
    devices = tuple(machine.device_type(rank) for rank in stage.ranks) if len(machine.device_types) > 1 else ()
    again = tuple((*segment, frozenset(segment.kept)) for segment in recomputed_segments(plan))
    how = again, offloads.tensors, plan.bundle_bytes, plan.chunks
    return graph_form(plan.graph), leaves, plan.mesh, devices, how


def _predict_stage(simulation: Simulation, optimizer: str, machine: Machine) -> StagePrediction:
    """What a stage takes and holds that was simulated with `STAGE_STEPS` micro-batches, one of them in flight."""
    memory, kept = stage_memory(simulation, optimizer, machine)
    return StagePrediction(*stage_spans(simulation), memory, kept, 1, break_down(simulation.timeline).sources)


def stage_memory(found: Simulation, optimizer: str, machine: Machine) -> tuple[Memory, int]:
    """What a stage holds with one micro-batch in flight, and the bytes that every further one keeps."""
    memory = measure_memory(found.program, optimizer, machine.device)
    middle = 1 + len(found.program.skeleton.operators)
    return memory, max(0, memory.curve[middle] - memory.curve[0])


def stage_spans(found: Simulation) -> tuple[float, float, float, float]:
    """Seconds of a forward and of a backward pass of a micro-batch, of what is done once at the end, and at the start.

    A pass takes the host two launches more, of what comes and of what goes, as in the middle of a pipeline.
    """
    program, timeline = found.program, found.timeline
    length, operators = len(program.fragments) - 2, len(program.skeleton.operators)

    def computed(fragment: int) -> float:
        return float(np.max(timeline.computed[fragment]) + int(timeline.shifts[fragment])) / 1e12

    start = 1 + length
    middle, end = start + operators + 1, start + length
    forward, backward = computed(middle) - computed(start), computed(end) - computed(middle)
    between = 2 * program.drafts.prices.launch()
    once = max(timeline.seconds - computed(1 + STAGE_STEPS * length), 0.0)
    return forward + between, backward + between, once, computed(1)


def _num_samples(pipeline: Pipeline) -> int | None:
    shapes = [leaf.type.shape for leaf in pipeline.graph.leaves_of(LeafKind.INPUT)]
    return next((pipeline.num_micro_batches * shape[0] for shape in shapes if shape), None)
