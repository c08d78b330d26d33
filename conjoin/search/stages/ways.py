"""Ways to run a stage: how its devices share its work and what it stores, and what of it is run again.

A way is a named strategy and a mode of recomputing, for all blocks or some. Its layouts are those of the strategy, or
*solved*: those with the least sum of seconds on the strategy's units, by the exact core (`exact/`). Before it is laid
out a stage may be *rewritten*, by substitutions wherever they match. Laid out on the graph of a stage, for devices of a
machine, a way says all that a simulation needs, and all that a plan of the stage is made of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.ir import (
    REGATHER,
    Graph,
    Mark,
    MemoryAction,
    Plan,
    Segment,
    Stage,
    StageGraph,
    Substitution,
    computation_digest,
    recompute_actions,
)
from conjoin.machine import Machine
from conjoin.rules import Index
from conjoin.search.baselines import layouts_by
from conjoin.search.blocks import block_segments, segments_for
from conjoin.search.bundle_size import choose_bundle_bytes
from conjoin.search.drafts import Settled, settle_draft
from conjoin.search.entries import make_variant
from conjoin.search.exact.choices import OperatorSeconds
from conjoin.search.exact.reshard_seconds import ReshardSeconds
from conjoin.search.exact.space import OVERLAPS, Space, objective_on
from conjoin.search.exact.stack import folded_problem
from conjoin.search.exact.units import Units, natural_units
from conjoin.search.folded_drafts import DraftsByForm
from conjoin.search.groups import products
from conjoin.search.named_plans import drafter
from conjoin.search.packed_weights import sections_alike
from conjoin.search.rewrites import RuleWay, rewritten
from conjoin.search.strategies import read_request
from conjoin.sim import (
    Classes,
    Drafts,
    Layouts,
    MachinePrices,
    Prices,
    Simulation,
    Skeleton,
    new_drafts,
    put_together,
    simulate_stage,
    take_graph_apart,
)

STORED = ("", "zero1", "fsdp")
_MAX_UNITS = 2
RECOMPUTE = ("", "selective", "full")
"""What is run again: what the model asks for, what is cheap for its bytes, all blocks."""


@dataclass(frozen=True, slots=True)
class Way:
    """A strategy inside of a stage."""

    strategy: str
    recompute: str = ""
    blocks: int | None = None
    """Of how many blocks, the first ones; None is all."""
    is_solved: bool = False
    rules: tuple[str, ...] = ()
    """Substitutions before all else, one after the other."""

    def __str__(self) -> str:
        base = f"{'joint search near ' if self.is_solved else ''}{self.strategy}"
        some = "" if self.blocks is None else f" of {self.blocks} blocks"
        return f"{base}+recompute={self.recompute}{some}" if self.recompute else base

    @property
    def is_plain(self) -> bool:
        """Whether nothing of it only saves memory."""
        return not self.recompute and not any(flag in self.strategy for flag in STORED[1:])


@dataclass
class Solver:
    """Named strategies and the exact core for stages of a model on parts of a machine; what is alike is made once."""

    costs: CostModel
    optimizer: str
    micro: int = 1
    """Micro-batches in a step, which share what is done once in it."""
    rules: Mapping[str, RuleWay] = field(default_factory=dict)
    """Substitutions by name."""
    _spaces: dict[tuple[Machine, Units], Space] = field(default_factory=dict)
    _drafts: dict[tuple[Machine, str], DraftsByForm] = field(default_factory=dict)

    def prices(self, graph: Graph, machine: Machine) -> MachinePrices:
        """What a graph costs on a part of the machine."""
        return MachinePrices.of(graph, machine, self.costs, self.optimizer)

    def rewrite(self, cut: StageGraph, names: Sequence[str]) -> tuple[StageGraph, tuple[Substitution, ...]]:
        """A stage after those of some substitutions that match in it, each wherever it does."""
        variant = make_variant(cut.graph)
        for name in names:
            changed = rewritten(variant, self.rules[name], Index(variant.graph))
            variant = variant if changed is None or changed.fault() else changed.variant
        return replace(cut, graph=variant.graph), variant.substitutions

    def settle(self, cut: StageGraph, machine: Machine, strategy: str) -> Settled:
        """What a strategy decides for a stage; stages that are alike are drafted once."""
        drafts = self._drafts.setdefault((machine, strategy), DraftsByForm())
        return settle_draft(cut.graph, drafter(machine, read_request(strategy)), drafts.draft, shared=cut.shared)

    def solve(self, skeleton: Skeleton, near: Layouts, machine: Machine) -> tuple[Layouts, frozenset[str]] | None:
        """The layouts with the least sum on the units of given ones; None where these have none, or many."""
        units = natural_units(near.choices, machine.mesh)
        if not units or len(units) > _MAX_UNITS:
            return None
        prices = self.prices(skeleton.graph, machine)
        if (machine, units) not in self._spaces:
            made = Space(units, machine.mesh, ReshardSeconds(units, machine.mesh, prices), OperatorSeconds(prices))
            self._spaces[machine, units] = made
        told = objective_on(machine, prices, self.optimizer, 1 - (1 - OVERLAPS[0]) / self.micro, 0.0)
        objective = replace(told, is_stage=True, update_seconds=told.update_seconds / self.micro)
        problem = folded_problem(skeleton, self._spaces[machine, units], objective)
        return problem.layouts(problem.solve())


def ways_on(machine: Machine) -> Iterator[Way]:
    """The ways to use the devices of a stage, the plain ones first."""
    for recompute in RECOMPUTE:
        for strategy in _strategies_on(machine):
            yield Way(strategy, recompute)


def _strategies_on(machine: Machine) -> Iterator[str]:
    """Every degree of tensor parallelism inside a node, and every way to store parameters."""
    count = machine.num_devices
    if count == 1:
        yield "single"
        return
    inside = [axis.size for axis in machine.mesh.axes if not axis.between_nodes]
    degrees = products(inside or [axis.size for axis in machine.mesh.axes])
    for stored in STORED:
        yield stored or "data-parallel"
        for tp in degrees[1:]:
            if not stored or tp < count:
                yield f"megatron:tp={tp},dp={count // tp},sp{',' if stored else ''}{stored}"


@dataclass(frozen=True, slots=True)
class LaidOut:
    """A stage in the layouts of a way."""

    way: Way
    cut: StageGraph
    skeleton: Skeleton
    layouts: Layouts
    regathered: frozenset[str]
    segments: tuple[Segment, ...]
    substitutions: tuple[Substitution, ...]
    bundle_bytes: int

    @property
    def graph(self) -> Graph:
        """As the way rewrites it."""
        return self.skeleton.graph

    def simulate(self, machine: Machine, prices: Prices, known: dict[tuple[Classes, int], Drafts]) -> Simulation:
        """It in time on the devices of a machine; what is alike in several stages is priced once."""
        drafts = new_drafts(self.skeleton, self.layouts, machine.mesh, prices)
        drafts.bundle_bytes = self.bundle_bytes
        drafts = known.setdefault((drafts.classes, drafts.bundle_bytes), drafts)
        return simulate_stage(self.skeleton, self.layouts, drafts, self.regathered, self.segments)

    def stage(self, number: int, whole: Machine, machine: Machine, ranks: tuple[int, ...]) -> Stage:
        """The stage of a pipeline on some ranks of the whole machine."""
        parallel = put_together(self.skeleton, self.layouts)
        regathered = tuple(MemoryAction(REGATHER, name) for name in sorted(self.regathered))
        plan = Plan(
            graph=parallel,
            mesh=machine.mesh,
            model=Mark(f"stage {number}", ""),
            machine=Mark(whole.name, whole.fingerprint()),
            strategy=str(self.way),
            memory=(*regathered, *recompute_actions(parallel, self.segments)),
            substitutions=self.substitutions,
            computes=computation_digest(self.graph),
            bundle_bytes=self.bundle_bytes,
        )
        return Stage(plan, ranks, self.cut.arrivals, self.cut.borrowed)


def lay_out_stage(cut: StageGraph, machine: Machine, way: Way, whole: Graph, solver: Solver) -> LaidOut | None:
    """A stage of a whole model laid out by a way on the devices of a machine; None where that cannot be."""
    cut, substitutions = solver.rewrite(cut, way.rules) if way.rules else (cut, ())
    if way.rules and not substitutions:
        return None
    try:
        settled = solver.settle(cut, machine, way.strategy)
        segments = _segments(way, settled.graph, whole)
    except StrategyError:
        return None
    skeleton = take_graph_apart(settled.graph)[0]
    layouts, regathered = layouts_by(settled, skeleton, is_stage=True)
    if way.is_solved:
        solved = solver.solve(skeleton, layouts, machine)
        if solved is None:
            return None
        layouts, regathered = sections_alike(settled.graph, solved[0], machine.mesh), solved[1]
    size = choose_bundle_bytes(cut.graph, machine)
    return LaidOut(
        way, cut, skeleton, layouts, regathered, segments, (*substitutions, *settled.substitutions), size
    )


def _segments(way: Way, graph: Graph, whole: Graph) -> tuple[Segment, ...]:
    """What a way runs again of a stage."""
    found = segments_for(way.recompute, graph, whole)
    if way.blocks is None:
        return found
    last = max((block[1] for block in block_segments(graph, whole)[: way.blocks]), default=-1)
    return tuple(segment for segment in found if segment[1] <= last)
