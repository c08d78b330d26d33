"""A plan on a machine, simulated: from the plan in full, or from a simulation and one change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial

from conjoin.comm import run_again
from conjoin.ir import (
    Plan,
    Segment,
    host_inputs,
    offloaded_states,
    offloaded_tensors,
    recomputed_segments,
    regathered_parameters,
)
from conjoin.machine import Mesh
from conjoin.ops import At, Layout, split_axes
from conjoin.sim.engine import Timeline, rerun, run, to_seconds
from conjoin.sim.fragments import Drafts
from conjoin.sim.memory import follow_offloads, measure_memory, measure_peak
from conjoin.sim.offloads import Offloads, make_copies
from conjoin.sim.parameter_uses import ParameterUses, bundle_uses
from conjoin.sim.periods import last_tick
from conjoin.sim.prices import Prices
from conjoin.sim.program import NOTHING_OFFLOADED, Change, Program, task_numbers
from conjoin.sim.relieved import relieved
from conjoin.sim.short_steps import repeats, short_program
from conjoin.sim.skeleton import Layouts, Skeleton, take_apart
from conjoin.sim.symmetry import Classes


@dataclass(frozen=True, eq=False)
class Simulation:
    """A training step and how long it takes; when each of its tasks runs is worked out for those who ask."""

    make: Callable[[], Program]
    """The program, made for those who ask where a short one tells how long it takes."""
    known: Timeline | None = None
    """The timeline, where it was made from an earlier one."""
    short: Program | None = None
    """Without some of many equal periods."""

    @cached_property
    def program(self) -> Program:
        return self.make()

    @property
    def classes(self) -> Classes:
        return (self.short or self.program).drafts.classes

    @cached_property
    def timeline(self) -> Timeline:
        """When every instruction runs."""
        shape, slowed = self.classes.shape, self.program.drafts.prices.slowed()
        return self.known or run(self.program.unrolled(), self.program.num_events, shape, slowed)

    @cached_property
    def ticks(self) -> int:
        """How long a step takes: what comes again and again is timed a few times only."""
        if self.known is not None or "timeline" in self.__dict__:
            return self.timeline.ticks
        found = None if self.short is None else _last_tick(self.short)
        if found is None:
            found = _last_tick(self.program)
        return self.timeline.ticks if found is None else found

    def peak_bytes(self, optimizer: str, kind: str) -> int:
        """The most that a device of a kind holds at once."""
        found = None if self.short is None else measure_peak(self.short, optimizer, kind)
        return measure_memory(self.program, optimizer, kind).peak if found is None else found

    def relieved_bytes(self, optimizer: str, kind: str) -> int:
        """The same where all is elsewhere that can be."""
        found = None if self.short is None else measure_peak(relieved(self.short, kind), optimizer, kind)
        return measure_memory(relieved(self.program, kind), optimizer, kind).peak if found is None else found

    @property
    def seconds(self) -> float:
        """How long a step takes."""
        return to_seconds(self.ticks)

    @property
    def num_tasks(self) -> int:
        """How many tasks there are on all devices together: an instruction is one on each."""
        return sum(map(len, self.program.unrolled())) * self.classes.mesh.size

    def change(self, change: Change) -> Simulation:
        """The simulation after a change of one operator: delta simulation, equal to the full one to the last bit.

        The classes of devices stay: a change that makes devices differ which were simulated as one needs a simulation
        with all devices told apart (`unfold`).
        """
        program, changed = self.program.changed(change)
        if program.num_events != self.program.num_events or program.offloads.tensors:
            return _simulated(program)
        places = program.order.positions_of(changed)
        return Simulation(lambda: program, rerun(self.timeline, program.unrolled(), places))


def simulate(plan: Plan, prices: Prices, *, unfold: bool = False) -> Simulation:
    """Time one training step of a plan; `unfold` tells all devices apart, also where they behave alike."""
    skeleton, layouts = take_apart(plan)
    drafts = new_drafts(skeleton, layouts, plan.mesh, prices, unfold)
    drafts.bundle_bytes, drafts.chunks = plan.bundle_bytes, plan.chunks
    steps = plan.accumulation.steps if plan.accumulation is not None else 1
    segments, regathered = recomputed_segments(plan), regathered_parameters(plan)
    return simulate_layouts(skeleton, layouts, drafts, regathered, segments, steps, offloads_of(plan))


def offloads_of(plan: Plan) -> Offloads:
    """What a plan has on the host."""
    return Offloads(offloaded_tensors(plan), offloaded_states(plan), host_inputs(plan))


def simulate_layouts(  # noqa: PLR0913 – what may be chosen of a step
    skeleton: Skeleton,
    layouts: Layouts,
    drafts: Drafts,
    regathered: frozenset[str],
    segments: tuple[Segment, ...] = (),
    steps: int = 1,
    offloads: Offloads = NOTHING_OFFLOADED,
) -> Simulation:
    """Time a training step in given layouts: some segments are run again in the backward pass, there are some
    micro-batches one after the other, and something lies on the host."""

    def make() -> Program:
        return Program(skeleton, layouts, drafts, regathered, segments, steps, offloads)

    short = None
    if steps == 1 and not offloads and repeats(skeleton):
        again = run_again(segments, [operator.remembers for operator in skeleton.operators])
        uses = ParameterUses(skeleton, layouts.choices, layouts.leaves, again).all()
        known = bundle_uses(uses, skeleton, drafts, regathered, again)
        short = short_program(skeleton, layouts, drafts, regathered, segments, known)
    if short is None:
        return _simulated(make())
    found = Simulation(make, None, short)
    found.ticks  # noqa: B018 – a step that is longer than times can tell is refused here
    return found


def _last_tick(program: Program) -> int | None:
    classes, slowed = program.drafts.classes, program.drafts.prices.slowed()
    return last_tick(program.unrolled(), program.num_events, classes.shape, slowed, program.seams)


def _simulated(program: Program) -> Simulation:
    found = Simulation(partial(_with_copies, program))
    found.ticks  # noqa: B018 – a step that is longer than times can tell is refused here
    return found


def simulate_in_full(program: Program) -> Simulation:
    """Time every instruction of a program, also what comes again and again."""
    found = Simulation(partial(_with_copies, program))
    found.timeline  # noqa: B018 – as above
    return found


def _with_copies(program: Program) -> Program:
    if program.offloads.tensors:
        link = program.drafts.prices.host_link()
        program.copies = make_copies(follow_offloads(program, link.kind), link, program.first_copy_event)
    return program


def new_drafts(skeleton: Skeleton, layouts: Layouts, mesh: Mesh, prices: Prices, unfold: bool = False) -> Drafts:
    """Drafts for devices in as few classes as behave alike in these layouts."""
    drafts = Drafts(mesh, prices, Classes.keeping(mesh, mesh.names))
    if not unfold:
        unlike = {*prices.unlike_axes(), *_uneven_axes(skeleton, layouts.leaves, mesh)}
        pairs = zip(task_numbers(skeleton, drafts), layouts.choices, strict=True)
        for number, choice in {(number, id(choice)): (number, choice) for number, choice in pairs}.values():
            unlike |= drafts.unlike_axes(number, choice)
        drafts.classes = Classes.keeping(mesh, unlike)
    return drafts


def _uneven_axes(skeleton: Skeleton, leaves: Mapping[int, Layout], mesh: Mesh) -> set[str]:
    """The axes along which unlike pieces of parameters are stored, and updated, or stored at one place only."""
    found: set[str] = set()
    for number, layout in leaves.items():
        found.update(axis for axis, placement in layout if isinstance(placement, At))
        leaf = skeleton.roots[number].leaf
        for dim, size in enumerate(skeleton.roots[number].type.shape) if leaf is not None and leaf.is_trained else ():
            axes = split_axes(layout, dim)
            ways = 1
            for axis in axes:
                ways *= mesh.sizes[axis]
            found.update(axes if size % ways else ())
    return found
