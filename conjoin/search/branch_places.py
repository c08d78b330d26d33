"""Branches and layers at the same time on parts of the machine: which places of which axes each of them gets.

A branch that runs at one place of an axis keeps its layouts on the other axes: with the batch split over two axes, half
of the branches then run on half of the devices each, with the batch split over the other half. Branches are dealt out
so that the predicted seconds of places are balanced, the longest first. What is stored and read by the branches of one
place only is kept there. Layers that are unrolled into steps are dealt out in a row (`layer_places.py`). Every way is
judged by the timeline, which alone sees what runs at the same time; what helps is kept, and the next is tried from
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import prod

import numpy as np

from conjoin.comm import has_places
from conjoin.ir import Choice, read_at_places
from conjoin.machine import Mesh
from conjoin.ops import At, Layout, make_layout
from conjoin.search.branches import Fork, find_forks
from conjoin.search.contest import Contest, Enough
from conjoin.search.entries import Entry, Outcome
from conjoin.search.exact.units import natural_units
from conjoin.search.layer_places import deal_depths, layer_depths, longest_way
from conjoin.search.variants import as_variant
from conjoin.sim import (
    Classes,
    Drafts,
    Layouts,
    Skeleton,
    Ticks,
    measure_memory,
    put_together,
    task_numbers,
    to_seconds,
)

Places = tuple[tuple[str, int], ...]
"""One place of each of some axes."""
_PAIR_SECONDS = 1e-6
"""What a look at branches at places takes for each pair of devices, of which all are asked what they send each other:
3 to 4 seconds in all for 1,920 devices (x86, 2026-11-18)."""
_EARLY = 0.1
"""The part of the time in which branches of the best named strategy are tried beside each other, before all else."""
MAX_WAYS = 6
"""Sets of axes that are tried for branches."""
MAX_FORKS = 40
"""Kinds of forks that are tried, those with the most seconds first."""
MIN_SHARE = 0.002
"""A branch with less than this part of the step is not worth a place."""
MAX_SHARE = 0.9
"""Nor is a fork of which one branch has more than this part."""


def stand_at(layout: Layout, places: Places) -> Layout:
    """A layout, but at some places of axes."""
    axes = {axis for axis, _ in places}
    kept = [entry for entry in layout if entry[0] not in axes]
    return make_layout([*kept, *((axis, At(place)) for axis, place in places)])


def confine(skeleton: Skeleton, layouts: Layouts, where: Mapping[int, Places]) -> Layouts:
    """The layouts with some operators at places, and with them what they alone read."""
    choices = list(layouts.choices)
    for operator, places in where.items():
        choice = choices[operator]
        choices[operator] = Choice(
            tuple(stand_at(layout, places) for layout in choice.operands),
            tuple(stand_at(layout, places) for layout in choice.outputs),
        )
    leaves = dict(layouts.leaves)
    for root, layout in layouts.leaves.items():
        found = {where.get(place, ()) for place, _ in skeleton.readers[root]}
        if len(found) == 1 and skeleton.roots[root].type.shape:
            leaves[root] = stand_at(layout, found.pop())
    return Layouts(leaves, tuple(choices), _results(skeleton, layouts, leaves))


def _results(skeleton: Skeleton, layouts: Layouts, leaves: Mapping[int, Layout]) -> tuple[Layout, ...]:
    """What comes out: outputs as before, new values of buffers as these are stored."""
    graph = skeleton.graph
    stored = {leaf.name: leaves[i] for i, leaf in enumerate(graph.leaves)}
    num_outputs = len(layouts.results) - len(graph.updates)
    return (*layouts.results[:num_outputs], *(stored[name] for name, _ in graph.updates))


def place_branches(contest: Contest, until: float = 0.0) -> Outcome | None:
    """The best that is found from the best entry on until only so many seconds are left; None where nothing is better.

    It is not entered, unless this ends before its end: what starts from the best entry may know layouts without places
    only.
    """
    best = contest.best
    if best is None or contest.mesh.size == 1 or best.entry.segments or best.entry.variant.steps > 1:
        return None
    start = as_variant(best)
    work = _Placing(contest, start)
    look = _PAIR_SECONDS * contest.mesh.size**2
    try:
        for kind, axes in ((forks, axes) for forks in work.kinds() for axes in work.axes_for(forks[0])):
            if contest.time_left < until + look:
                break
            if work.is_new(kind, axes):
                contest.tell(f"branches along {', '.join(axes)}")
                work.attempt(kind, axes)
        for axes in work.axes_for_layers():
            if contest.time_left < until + look:
                break
            contest.tell(f"layers along {', '.join(axes)}")
            work.attempt_layers(axes)
    except (Enough, KeyboardInterrupt):
        if work.current is not start:
            contest.judge(work.current.entry, work.current.simulation)
        raise
    return work.current if work.current is not start else None


def with_branches_aside(contest: Contest, search: Callable[[], None]) -> None:
    """A search, with branches beside each other tried on the best before it and after it."""
    before = place_branches(contest, (1 - _EARLY) * contest.time_left)
    try:
        search()
        found = place_branches(contest, 0.0)
        if found is not None:
            contest.judge(found.entry, found.simulation)
        contest.check("branches are placed")
    finally:  # also where the time is over
        if before is not None:
            contest.judge(before.entry, before.simulation)


@dataclass
class _Placing:
    """Where branches are tried, and the best so far."""

    contest: Contest
    current: Outcome

    def __post_init__(self) -> None:
        mesh = self.contest.machine.mesh
        self.skeleton = self.current.entry.variant.skeleton
        self.drafts = Drafts(mesh, self.contest.prices, Classes.keeping(mesh, mesh.names))
        self.numbers = task_numbers(self.skeleton, self.drafts)
        self._ticks: dict[tuple[int, Choice, Places], int] = {}
        """By kind of operator, choice and places: forks hold each other, and layers are alike."""
        self._entry: Entry | None = None
        self._alike: dict[str, int] = {}
        """Of the entry: the axes that all operators treat alike have the same number."""
        self._failed: set[tuple[tuple[Fork, ...], tuple[tuple[int, int, bool], ...]]] = set()

    def kinds(self) -> list[tuple[Fork, ...]]:
        """Forks that are alike in all operators, those with the most seconds first; then all of them together."""
        alike: dict[object, list[Fork]] = {}
        least = MIN_SHARE * self.current.seconds
        for fork in find_forks(self.skeleton):
            weighed = [(self.seconds(branch, ()), branch) for branch in fork.branches]
            worth = [branch for seconds, branch in weighed if seconds > least]
            longest, total = max(weighed)[0], sum(seconds for seconds, _ in weighed)
            if len(worth) > 1 and longest < MAX_SHARE * total:
                key = tuple(sorted(tuple(self.numbers[place] for place in branch) for branch in worth))
                alike.setdefault(key, []).append(Fork(tuple(worth)))
        found = sorted(map(tuple, alike.values()), key=lambda forks: -sum(map(self._fork_seconds, forks)))[:MAX_FORKS]
        together = _apart(fork for forks in found for fork in forks)
        return [*([together] if len(found) > 1 and len(together) > 1 else []), *found]

    def is_new(self, forks: tuple[Fork, ...], axes: tuple[str, ...]) -> bool:
        """Whether nothing was made of dealing these forks out along axes that all operators treat like these."""
        entry, mesh = self.current.entry, self.contest.machine.mesh
        if entry is not self._entry:
            self._entry, self._failed = entry, set()
            units = natural_units(entry.layouts.choices, mesh)
            self._alike = {axis: number for number, unit in enumerate(units) for axis in unit.axes}
        between = {axis.name: axis.between_nodes for axis in mesh.axes}
        trial = forks, tuple((self._alike[axis], mesh.sizes[axis], between[axis]) for axis in axes)
        known = trial in self._failed
        self._failed.add(trial)
        return not known

    def _fork_seconds(self, fork: Fork) -> float:
        return sum(self.seconds(branch, ()) for branch in fork.branches)

    def axes_for(self, fork: Fork) -> list[tuple[str, ...]]:
        """Axes to deal branches out along: one by one, then as many together as there are branches."""
        mesh = self.contest.mesh
        sets = [axes for n in range(1, len(mesh.names) + 1) for axes in combinations(mesh.names, n)]
        few = [axes for axes in sets if prod(mesh.sizes[axis] for axis in axes) <= max(2, len(fork.branches))]
        return (few or [(min(mesh.names, key=mesh.sizes.__getitem__),)])[:MAX_WAYS]

    def seconds(self, branch: Sequence[int], places: Places) -> float:
        """What one device computes for a branch at places, forward and backward."""
        return to_seconds(sum(self._operator_ticks(place, places) for place in branch))

    def _operator_ticks(self, place: int, places: Places) -> int:
        number, choice = self.numbers[place], self.current.entry.layouts.choices[place]
        key = number, choice, places
        if key not in self._ticks:
            operands, outputs = (tuple(stand_at(x, places) for x in some) for some in (choice.operands, choice.outputs))
            work = self.drafts.work(number, Choice(operands, outputs))
            forward = max(_largest(work.forward), _largest(work.host_forward))
            self._ticks[key] = forward + max(_largest(work.backward), _largest(work.host_backward))
        return self._ticks[key]

    def axes_for_layers(self) -> list[tuple[str, ...]]:
        """Axes along which layers at places could be faster, by the longest way through them; most places first.

        At more places of more axes an operator has more to do, so that where two places cannot gain no more can.
        """
        mesh, most, found = self.contest.mesh, max(layer_depths(self.skeleton), default=0) + 1, list[tuple[str, ...]]()
        for count in range(1, len(mesh.names) + 1):
            sets = [axes for axes in combinations(mesh.names, count) if prod(mesh.sizes[axis] for axis in axes) <= most]
            gaining = [axes for axes in sets[:MAX_WAYS] if self.is_new((), axes) and self._can_gain(axes)]
            if not gaining:
                break
            found += gaining
        return found[: -MAX_WAYS - 1 : -1]

    def _can_gain(self, axes: tuple[str, ...]) -> bool:
        return longest_way(self.skeleton, self._seconds_at(axes)) < self.current.seconds

    def _seconds_at(self, axes: tuple[str, ...]) -> list[float]:
        """Of every operator at one place of axes."""
        places = tuple((axis, 0) for axis in axes)
        return [to_seconds(self._operator_ticks(place, places)) for place in range(len(self.skeleton.operators))]

    def attempt_layers(self, axes: tuple[str, ...]) -> None:
        """Deal layers out along axes, one after the other."""
        depth_of, seconds = layer_depths(self.skeleton), self._seconds_at(axes)
        of_depth = [0.0] * (max(depth_of) + 1)
        for depth, own in zip(depth_of, seconds, strict=True):
            of_depth[depth] += own
        places = places_along(axes, self.contest.machine.mesh)
        dealt = deal_depths(of_depth, len(places))
        tensors = self.skeleton.roots
        self.attempt_where({
            place: places[dealt[depth_of[place]]]
            for place, operator in enumerate(self.skeleton.operators)
            if any(tensors[root].type.shape for root in (*operator.reads, *operator.makes))
        }, _LAYERS)  # fmt: skip

    def attempt(self, forks: Sequence[Fork], axes: tuple[str, ...]) -> None:
        """Deal the branches of forks out along axes; what becomes the best is gone on from."""
        where = {op: places for fork in forks for op, places in self.deal(fork, axes).items()}
        self.attempt_where(where, _SUFFIX)

    def attempt_where(self, where: Mapping[int, Places], suffix: str) -> None:
        """Operators at places; what becomes the best is gone on from."""
        before = self.current.entry
        layouts = confine(self.skeleton, before.layouts, where)
        if layouts.choices == before.layouts.choices:
            return
        leaves = self.skeleton.graph.leaves
        kept = {leaves[root].name for root, layout in layouts.leaves.items() if has_places(layout)}
        name = before.name if suffix in before.name else f"{before.name}{suffix}"
        if before.regathered - kept:
            kept |= read_at_places(put_together(self.skeleton, layouts))
        entry = Entry(name, before.variant, layouts, before.regathered - kept)
        if not self.contest.allows(entry):
            return
        self.contest.count_step()
        simulation = self.contest.simulate(entry)
        if simulation.seconds < self.current.seconds:
            peak = measure_memory(simulation.program, self.contest.optimizer, self.contest.machine.device).peak
            if peak <= self.contest.capacity:
                self.current = Outcome(entry, simulation, simulation.seconds, peak)

    def deal(self, fork: Fork, axes: tuple[str, ...]) -> dict[int, Places]:
        """A place for every branch: the longest first, each where the least is to be done."""
        mesh = self.contest.machine.mesh
        loads = dict.fromkeys(places_along(axes, mesh), 0.0)
        where: dict[int, Places] = {}
        weighed = [(self.seconds(branch, next(iter(loads))), branch) for branch in fork.branches]
        for seconds, branch in sorted(weighed, key=lambda entry: -entry[0]):
            places = min(loads, key=loads.__getitem__)
            loads[places] += seconds
            where.update(dict.fromkeys(branch, places))
        return where


_SUFFIX = ", branches beside each other"
_LAYERS = ", layers at places"


def _apart(forks: Iterator[Fork]) -> tuple[Fork, ...]:
    """Forks of which no two share an operator, the first ones first."""
    taken: set[int] = set()
    found = []
    for fork in forks:
        operators = {place for branch in fork.branches for place in branch}
        if not operators & taken:
            taken |= operators
            found.append(fork)
    return tuple(found)


def places_along(axes: tuple[str, ...], mesh: Mesh) -> list[Places]:
    """All places of some axes together."""
    return [tuple(zip(axes, at, strict=True)) for at in product(*(range(mesh.sizes[axis]) for axis in axes))]


def _largest(ticks: Ticks) -> int:
    return int(np.max(ticks))


def without_places(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes in which every device has a part of everything."""
    return [o for o in outcomes if not any(has_places(x) for c in o.entry.layouts.choices for x in c.outputs)]
