"""What takes part in a contest: variants of a model, entries, which are these in layouts, and what came of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from conjoin.ir import (
    REGATHER,
    Accumulation,
    Graph,
    Mark,
    MemoryAction,
    Plan,
    Segment,
    Substitution,
    asked_segments,
    check_plan,
    computation_digest,
    fingerprint,
    model_mark,
    offload_actions,
    recompute_actions,
    recomputed_segments,
    regathered_parameters,
)
from conjoin.machine import Machine
from conjoin.ops import At
from conjoin.search.bundle_size import choose_bundle_bytes
from conjoin.search.exact.space import Objective
from conjoin.sim import (
    Layouts,
    Offloads,
    Prices,
    Simulation,
    Skeleton,
    offloads_of,
    put_together,
    take_apart,
    take_graph_apart,
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A model as a graph without layouts, and how it was made from the captured one."""

    graph: Graph
    skeleton: Skeleton
    substitutions: tuple[Substitution, ...] = ()
    accumulation: Accumulation | None = None
    """Where the graph is that of a micro-batch."""

    @property
    def steps(self) -> int:
        """Micro-batches in a step."""
        return 1 if self.accumulation is None else self.accumulation.steps


def make_variant(
    graph: Graph, substitutions: tuple[Substitution, ...] = (), accumulation: Accumulation | None = None
) -> Variant:
    """The variant that a graph without layouts is."""
    return Variant(graph, take_graph_apart(graph)[0], substitutions, accumulation)


@lru_cache(64)
def name_of(graph: Graph) -> str:
    """What tells a graph from others, whatever its constants are: the same in every process."""
    return fingerprint(graph, constants=False)


def digest(variant: Variant, layouts: Layouts | None = None) -> str:
    """A short name of a variant, perhaps in layouts: the same in every process."""
    text = name_of(variant.graph)
    if layouts is not None:
        text += repr((sorted(layouts.leaves.items()), layouts.choices, layouts.results))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seconds_alone(variant: Variant, prices: Prices) -> float:
    """Computing forward and backward on one device."""
    costs = [prices.operator(op.call, op.needs, 0) for op in variant.skeleton.operators]
    return sum(cost.forward.value + cost.backward.value for cost in costs)


NOTHING_OFFLOADED = Offloads()


@dataclass(frozen=True, slots=True)
class Entry:
    """A plan as it takes part: a variant in layouts."""

    name: str
    variant: Variant
    layouts: Layouts
    regathered: frozenset[str] = frozenset()
    segments: tuple[Segment, ...] = ()
    """What the backward pass runs again."""
    offloads: Offloads = NOTHING_OFFLOADED
    """What lies on the host."""
    plan: Plan | None = None
    """Where there is one already."""
    objective: Objective | None = None
    """What the exact core counted when it found the layouts, where it did."""
    chunks: int = 1
    """In how many chunks products go that collectives are next to."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An entry with what the simulation says."""

    entry: Entry
    simulation: Simulation
    seconds: float
    peak_bytes: int | None
    """None where memory was not asked: the entry is slower than one that fits."""


@dataclass(frozen=True, eq=False)
class Heavy:
    """An outcome beside others where memory decides."""

    outcome: Outcome
    seconds: float
    peak_bytes: int
    ask: Callable[[Outcome], bool]

    @cached_property
    def can_fit(self) -> bool:
        """Whether it fits once all is on the host that can be: what is there for a moment cannot."""
        return self.ask(self.outcome)

    def beats(self, other: Heavy) -> bool:
        """Whether it is as fast and as small, and can be made to fit if the other one can."""
        is_less = self.seconds <= other.seconds and self.peak_bytes <= other.peak_bytes
        return is_less and (self.can_fit or not other.can_fit)


def add_to_front(front: Sequence[Heavy], new: Heavy) -> list[Heavy]:
    """The fastest first, with a new one unless it is beaten, and without those that it beats."""
    if any(old.beats(new) for old in front):
        return list(front)
    return sorted([*(old for old in front if not new.beats(old)), new], key=lambda heavy: heavy.seconds)


def with_asked_segments(entry: Entry) -> Entry:
    """An entry that runs again what the model asks for, unless it says itself what is run again.

    Where operators run at one place of an axis only, nothing can be.
    """
    if entry.plan is not None or entry.segments:
        return entry
    layouts = (layout for choice in entry.layouts.choices for layout in (*choice.operands, *choice.outputs))
    asked = asked_segments(entry.variant.skeleton.graph)
    if not asked or any(isinstance(placement, At) for layout in layouts for _, placement in layout):
        return entry
    return replace(entry, segments=asked)


def entry_of(plan: Plan) -> Entry:
    """The entry of a plan that somebody made."""
    skeleton, layouts = take_apart(plan)
    variant = Variant(plan.graph, skeleton, plan.substitutions, plan.accumulation)
    segments, regathered = recomputed_segments(plan), regathered_parameters(plan)
    return Entry(plan.strategy, variant, layouts, regathered, segments, offloads_of(plan), plan)


def plan_of(outcome: Outcome, captured: Graph, machine: Machine) -> Plan:
    """The plan that an outcome stands for, checked."""
    entry = outcome.entry
    predictions = (("seconds_per_step", outcome.seconds), ("peak_bytes", float(outcome.peak_bytes or 0)))
    mark = Mark(machine.name, machine.fingerprint())
    if entry.plan is not None:
        return replace(entry.plan, machine=mark, predictions=predictions)
    graph = put_together(entry.variant.skeleton, entry.layouts)
    regathered = tuple(MemoryAction(REGATHER, name) for name in sorted(entry.regathered))
    plan = Plan(
        graph=graph,
        mesh=machine.mesh,
        model=model_mark(captured),
        machine=mark,
        strategy=entry.name,
        memory=(
            *regathered,
            *recompute_actions(graph, entry.segments),
            *offload_actions(graph, entry.offloads.tensors, entry.offloads.states, entry.offloads.inputs),
        ),
        substitutions=entry.variant.substitutions,
        accumulation=entry.variant.accumulation,
        predictions=predictions,
        computes=computation_digest(graph, entry.variant.accumulation),
        bundle_bytes=choose_bundle_bytes(captured, machine),
        chunks=entry.chunks,
    )
    return check_plan(plan)
