"""From stages that were chosen to a pipeline: built for real, with the schedule that the timeline likes best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from conjoin.comm import Streams
from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.ir import (
    Accumulation,
    Graph,
    Mark,
    Pipeline,
    Stage,
    check_pipeline,
    cut_in_stages,
    model_mark,
    recomputed_segments,
    regathered_parameters,
    stage_edges,
)
from conjoin.machine import Machine
from conjoin.schedules import (
    Edge,
    Schedule,
    Times,
    chain,
    eager_one_f_one_b,
    gpipe,
    one_f_one_b,
    play,
    zero_bubble,
)
from conjoin.search.contest import SIMPLER
from conjoin.search.rewrites import RuleWay
from conjoin.search.stages.cells import Cells
from conjoin.search.stages.parts import Division
from conjoin.search.stages.programme import Cutting
from conjoin.search.stages.ways import Solver, lay_out_stage
from conjoin.sim import Crossing, Crossings, PipelinePrediction, predict_pipeline, rescheduled, with_fastest_chunks


@dataclass(frozen=True, slots=True)
class Model:
    """What is planned, and for what."""

    captured: Graph
    machine: Machine
    costs: CostModel
    optimizer: str
    capacity: int
    """Bytes that may be used of a device."""
    check: Callable[[str], None] = lambda doing: None
    """Called with what is done next; raises when there is no time."""
    rules: tuple[RuleWay, ...] = ()
    """Substitutions that may be used."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A pipeline and what the timeline says of it."""

    pipeline: Pipeline
    prediction: PipelinePrediction
    fits: bool

    @property
    def seconds(self) -> float:
        return self.prediction.seconds

    @property
    def peak_bytes(self) -> int:
        return self.prediction.peak

    @property
    def told(self) -> Pipeline:
        """The pipeline with what is predicted of it."""
        predictions = ("seconds_per_step", self.seconds), ("peak_bytes", float(self.peak_bytes))
        return replace(self.pipeline, predictions=predictions)


def build(
    model: Model, solver: Solver, cells: Cells, accumulation: Accumulation | None, division: Division, cut: Cutting
) -> Pipeline:
    """The pipeline of some stages, in the order of 1F1B; StrategyError where one of them cannot be made."""
    micro = 1 if accumulation is None else accumulation.steps
    graphs = cut_in_stages(cells.graph, cells.stages_of(tuple(slot.cells[0] for slot in cut.slots)))
    stages: list[Stage] = []
    for number, (slot, graph) in enumerate(zip(cut.slots, graphs, strict=True)):
        model.check(f"stage {number} of {len(cut.slots)}, {micro} micro-batches")
        part = division.machines[slot.part]
        laid_out = lay_out_stage(graph, part, slot.way, cells.graph, solver)
        if laid_out is None:
            raise StrategyError(
                f"Stage {number} was to be laid out on {part.num_devices} devices by {slot.way} here. Its operators "
                f"cannot be split so. Choose another way for it."
            )
        ranks = range(slot.granules[0] * division.granule, slot.granules[1] * division.granule)
        stages.append(laid_out.stage(number, model.machine, part, tuple(ranks)))
    schedule = one_f_one_b(len(stages), micro)
    edges = tuple(sorted({*chain(len(stages)), *stage_edges(tuple(stages))}))
    made = Pipeline(
        graph=cells.graph,
        stages=tuple(stages),
        schedule=replace(schedule, edges=edges),
        mesh=model.machine.mesh,
        model=model_mark(model.captured),
        machine=Mark(model.machine.name, model.machine.fingerprint()),
        strategy=_name(stages, micro),
        accumulation=accumulation,
    )
    return with_fastest_chunks(made, model.machine)


def _name(stages: Sequence[Stage], micro: int) -> str:
    sizes = {len(stage.ranks) for stage in stages}
    each = f" of {sizes.pop()} devices" if len(sizes) == 1 else ""
    return f"joint search, {len(stages)} stages{each}, {micro} micro-batches"


def judge(model: Model, pipeline: Pipeline) -> Judged:
    """A pipeline with the schedule by which it fits and is fastest; of those that are about alike the simplest."""
    told = predict_pipeline(pipeline, model.machine, model.costs, model.optimizer)
    best = Judged(pipeline, told, told.peak <= model.capacity)
    for schedule in _schedules(pipeline):
        told = rescheduled(best.prediction, schedule, model.machine)
        fits = told.peak <= model.capacity
        if fits and (not best.fits or told.seconds * SIMPLER < best.seconds):
            best = Judged(told.pipeline, told, fits)
    return best


def _schedules(pipeline: Pipeline) -> Iterator[Schedule]:
    plans = [stage.plan for stage in pipeline.stages]  # of these some make both gradients at once
    apart = not any(recomputed_segments(plan) or regathered_parameters(plan) for plan in plans)
    return _others(len(plans), pipeline.num_micro_batches, pipeline.schedule.edges, apart)


def _others(stages: int, micro: int, edges: tuple[Edge, ...], apart: bool) -> Iterator[Schedule]:
    """Other orders than 1F1B, the simplest first; those with input and weight gradients apart where they can be."""
    for made in (gpipe(stages, micro), eager_one_f_one_b(stages, micro)):
        yield replace(made, edges=edges)
    if apart:
        yield replace(_zero_bubble(stages, micro), edges=edges)


_zero_bubble = lru_cache(16)(zero_bubble)


def crossings_of(cut: Cutting, sent: Sequence[float], granule: int, machine: Machine) -> Crossings:
    """What goes into every stage but the first, of some bytes each, in even pieces from the granule before it; and its
    gradient back."""
    found: list[Crossing] = []
    for i, (slot, num_bytes) in enumerate(zip(cut.slots[1:], sent, strict=True)):
        begin, each = slot.granules[0] * granule, -(-int(num_bytes) // granule)
        ranks = range(begin, begin + granule) if each else ()
        found.append(((i, i + 1), Streams.at_once((rank - granule, rank, each) for rank in ranks)))
        found.append(((i + 1, i), Streams.at_once((rank, rank - granule, each) for rank in ranks)))
    return Crossings(chain(len(cut.slots)), range(len(cut.slots)), found, machine)


def least_of_cutting(cut: Cutting, micro: int) -> float:
    """What a step takes at least, whatever the schedule: every stage waits for the first micro-batch, and then has all
    of them to run."""
    found = before = 0.0
    for slot in cut.slots:
        forward, backward, finish, *_ = slot.figures
        found = max(found, before + micro * (forward + backward) + finish)
        before += forward
    return found


def played(cut: Cutting, micro: int, capacity: float, crossings: Crossings, limit: float = inf) -> float:
    """What a step takes by the figures of a cutting, by the best of the schedules with which it fits; infinity where
    that is no less than a limit."""
    stages, edges = len(cut.slots), chain(len(cut.slots))
    forward, backward, finish, peak, kept = zip(*(slot.figures for slot in cut.slots), strict=True)
    if least_of_cutting(cut, micro) >= limit:
        return inf
    half = tuple(seconds / 2 for seconds in backward)
    times = Times(forward, half, half, crossings.activations, crossings.gradients, links=crossings.links)
    found = [inf]
    apart = not any(slot.way.recompute or "fsdp" in slot.way.strategy for slot in cut.slots)
    for schedule in (one_f_one_b(stages, micro), *_others(stages, micro, edges, apart)):
        timeline = play(schedule, times)
        held = [p + (n - 1) * k for p, n, k in zip(peak, timeline.peaks.in_flight, kept, strict=True)]
        if max(held) <= capacity:
            found.append(max(float(ends[-1]) + more for ends, more in zip(timeline.ends, finish, strict=True)))
    return min(found)


def checked(model: Model, judged: Judged) -> Judged:
    """The same, after all that a pipeline must be was checked."""
    name = f"{judged.pipeline.strategy}, {judged.pipeline.schedule.name}"
    pipeline = check_pipeline(replace(judged.pipeline, strategy=name))
    return replace(judged, pipeline=pipeline, prediction=replace(judged.prediction, pipeline=pipeline))
