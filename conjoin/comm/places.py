"""Reshards to and from one place of an axis (At), where the other places have nothing.

    C -> At(k)    drop (nothing moves)                   At(k) -> C       broadcast
    S -> At(k)    gather                                 At(k) -> S       scatter
    P -> At(k)    reduce                                 At(k) -> P       fill (zeros elsewhere, nothing moves)
                                                         At(k) -> At(j)   send

Each is back-propagated by the one of the duals: drop by broadcast (I) or by fill (B), gather by scatter. What is to be
at one place comes there first, so that what remains is done by few; what is to leave it leaves last. Where no sum
stands between, everything that moves moves at once, each rank getting what it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from conjoin.comm.pieces import splits_of, tails
from conjoin.comm.steps import Route, Step, StepKind
from conjoin.machine import Mesh
from conjoin.ops import At, Copies, Invariant, Layout, Partial, Placement, Split, make_layout, placement_on

Between = Callable[[tuple[int, ...], Layout, Layout, Mesh], Route]
"""A route between two layouts in which every rank has a part."""


def has_places(layout: Layout) -> bool:
    """Whether some ranks have nothing of a tensor."""
    return any(isinstance(placement, At) for _, placement in layout)


def changes_places(step: Step) -> bool:
    """Whether other ranks have something of the tensor after a step than before it."""
    return changes_places_between(step.source, step.target)


def changes_places_between(source: Layout, target: Layout) -> bool:
    """Whether other ranks have something of a tensor in one layout than in the other."""
    return _places(source) != _places(target)


def common_places(*layouts: Layout) -> tuple[tuple[str, int], ...]:
    """The axes of which some layouts name one and the same place, with that place."""
    shared = frozenset.intersection(*map(_places, layouts)) if layouts else frozenset()
    return tuple(sorted((axis, at.place) for axis, at in shared if isinstance(at, At)))


def leaves_early(source: Layout, target: Layout) -> bool:
    """Whether a tensor comes to a place where it is not: it is sent there as soon as it is made.

    Else a branch would wait until those who send to it have run theirs. Backward its gradient so comes back last.
    """
    return not _places(target) <= _places(source)


def _places(layout: Layout) -> frozenset[tuple[str, Placement]]:
    return frozenset(entry for entry in layout if isinstance(entry[1], At))


def steps_with_places(
    shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mesh, between: Between
) -> tuple[Step, ...]:
    """The steps between two layouts of which at least one has places."""
    steps: list[Step] = []
    here = source
    for kind, held in ((StepKind.DROP, (Copies, Invariant)), (StepKind.REDUCE, (Partial,))):
        arriving = {
            axis: placement
            for axis, placement in target
            if isinstance(placement, At) and isinstance(placement_on(here, axis), held)
        }
        if arriving:
            there = _replaced(here, arriving)
            steps.append(Step(kind, mesh.in_order(arriving), here, there))
            here = there
    filled = {axis: p for axis, p in here if isinstance(p, At) and placement_on(target, axis) == Partial()}
    goal = _replaced(target, filled)
    steps += _middle(shape, here, goal, mesh, between)
    if filled:
        steps.append(Step(StepKind.FILL, mesh.in_order(filled), goal, target))
    return tuple(steps)


def _middle(shape: tuple[int, ...], here: Layout, goal: Layout, mesh: Mesh, between: Between) -> list[Step]:
    """What comes from pieces to one place, what is done there, and what leaves it."""
    moving = _moving(here, goal, mesh)
    if not moving:
        return _inside(shape, here, goal, mesh, between)
    if _partial(here) == _partial(goal):
        return [_move(shape, here, goal, mesh)]
    arriving = {axis: p for axis, p in goal if isinstance(p, At) and isinstance(placement_on(here, axis), Split)}
    gathered = _replaced(here, arriving)
    summed = _replaced(goal, {axis: p for axis, p in gathered if isinstance(p, At)})
    return [
        *([_move(shape, here, gathered, mesh)] if arriving else []),
        *_inside(shape, gathered, summed, mesh, between),
        *([_move(shape, summed, goal, mesh)] if _moving(summed, goal, mesh) else []),
    ]


def _moving(here: Layout, goal: Layout, mesh: Mesh) -> tuple[str, ...]:
    changed = dict(_places(here) ^ _places(goal))
    return mesh.in_order(changed)


def _partial(layout: Layout) -> set[str]:
    return {axis for axis, placement in layout if isinstance(placement, Partial)}


def _replaced(layout: Layout, placements: Mapping[str, Placement]) -> Layout:
    return make_layout([*(entry for entry in layout if entry[0] not in placements), *placements.items()])


def _inside(shape: tuple[int, ...], here: Layout, goal: Layout, mesh: Mesh, between: Between) -> list[Step]:
    """A route among those who have something: the axes with places stay as they are."""
    places = dict(_places(here))
    others = Mesh(tuple(axis for axis in mesh.axes if axis.name not in places))
    route = between(shape, _without(here, places), _without(goal, places), others)
    return [
        Step(step.kind, step.axes, _replaced(step.source, places), _replaced(step.target, places))
        for step in route.steps
    ]


def _without(layout: Layout, axes: Iterable[str]) -> Layout:
    left_out = set(axes)
    return tuple(entry for entry in layout if entry[0] not in left_out)


def _move(shape: tuple[int, ...], here: Layout, goal: Layout, mesh: Mesh) -> Step:
    """One exchange over the axes whose places change and those whose pieces must leave theirs."""
    moving = _moving(here, goal, mesh)
    leaving = {axis for axes in tails(*(splits_of(layout, len(shape)) for layout in (here, goal)))[0] for axis in axes}
    axes = mesh.in_order((*moving, *leaving))
    kinds = {_kind(placement_on(here, axis), placement_on(goal, axis)) for axis in moving}
    kind = kinds.pop() if len(kinds) == 1 and leaving <= {*moving} else StepKind.ALL_TO_ALL
    return Step(kind, axes, here, goal)


def _kind(here: Placement, goal: Placement) -> StepKind:
    if not isinstance(here, At):
        return StepKind.GATHER
    match goal:
        case At():
            return StepKind.SEND
        case Split():
            return StepKind.SCATTER
        case _:
            return StepKind.BROADCAST
