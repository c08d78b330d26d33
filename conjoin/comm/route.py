"""How a tensor comes from one layout to another: the local steps and collectives, cheapest in bytes on the wire.

`waypoints` chooses between which layouts to pass; here the steps between them are named. What a step is, regions
decide: a move is an all-gather where each rank's target region is the disjoint union of its group's source regions,
local where each rank has all it wants, and else an all-to-all, in which every rank gets what it lacks from a holder.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from conjoin.comm.merged_axes import merge_axes
from conjoin.comm.pieces import Splits, num_devices, splits_of, tails
from conjoin.comm.places import has_places, steps_with_places
from conjoin.comm.steps import Route, Step, StepKind, layout_text
from conjoin.comm.waypoints import FEW_AXES, Leg, Problem, Spread, Waypoints, best_legs, sliced_first
from conjoin.machine import Mesh
from conjoin.ops import (
    At,
    Copies,
    Greatest,
    Invariant,
    Layout,
    Partial,
    Placement,
    Split,
    dual,
    make_layout,
    placement_on,
)


@lru_cache(maxsize=1 << 14)
def reshard(shape: tuple[int, ...], source: Layout, target: Layout, mesh: Mesh) -> Route:
    """The cheapest route between two layouts: the fewest bytes over all ranks, then the fewest collectives.

    >>> mesh = Mesh.of_nodes(1, 4)
    >>> print(reshard((8, 8), make_layout([("d0", Partial()), ("d1", Partial())]), (), mesh))
    all-reduce over d0 d1: d0:P,d1:P -> I
    >>> scattered = make_layout([("d0", Split(0)), ("d1", Split(1))])
    >>> print(reshard((8, 8), make_layout([("d0", Partial())]), scattered, mesh))
    slice over d1: d0:P -> d1:S(1),d0:P
    reduce-scatter over d0: d1:S(1),d0:P -> d0:S(0),d1:S(1)
    """
    for layout in (source, target):
        _check(shape, layout, mesh)
    if source == target:
        return Route(shape, source, target, ())
    found = tuple(axis for axis, p in source if p is Greatest() and placement_on(target, axis) is not p)
    if found:
        here = make_layout(entry for entry in source if entry[0] not in found)
        largest = Step(StepKind.ALL_REDUCE, mesh.in_order(found), source, here)
        return Route(shape, source, target, (largest, *reshard(shape, here, target, mesh).steps))
    if has_places(source) or has_places(target):
        return Route(shape, source, target, steps_with_places(shape, source, target, mesh, reshard))
    problem = Problem(shape, _spread(source, len(shape)), _spread(target, len(shape)), mesh)
    steps: tuple[Step, ...] = ()
    for leg, waypoints in _legs(problem):
        steps += _steps(leg, waypoints, source, target)
    reached = steps[-1].target if steps else source
    if reached != target:
        changed = (axis for axis in mesh.names if placement_on(reached, axis) != placement_on(target, axis))
        steps += (Step(StepKind.RELABEL, tuple(changed), reached, target),)
    return Route(shape, source, target, steps)


def dual_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a tensor laid out so.

    >>> dual_layout((("d0", Split(1)), ("d1", Copies())))
    (('d0', Split(dim=1)), ('d1', Partial()))
    """
    return make_layout((axis, dual(placement)) for axis, placement in layout)


def backward_route(route: Route, mesh: Mesh) -> Route:
    """How the gradient comes back: from the dual of the target to the dual of the source."""
    return reshard(route.shape, dual_layout(route.target), dual_layout(route.source), mesh)


def _check(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> None:
    for axis, placement in layout:
        if axis not in mesh.sizes:
            raise ValueError(f"layout {layout_text(layout)} names the axis {axis!r}; the mesh has {mesh}")
        if isinstance(placement, Split) and placement.dim >= len(shape):
            raise ValueError(f"layout {layout_text(layout)} splits dim {placement.dim} of a tensor of shape {shape}")
        if isinstance(placement, At) and placement.place >= mesh.sizes[axis]:
            raise ValueError(f"layout {layout_text(layout)} names a place that {axis} has not; the mesh has {mesh}")
    for dim, axes in enumerate(splits_of(layout, len(shape))):
        if num_devices(axes, mesh) > max(shape[dim], 1):
            raise ValueError(
                f"layout {layout_text(layout)} cuts dim {dim} of shape {shape} into {num_devices(axes, mesh)} pieces; "
                f"it has {shape[dim]} positions"
            )


def _legs(problem: Problem) -> tuple[Leg, ...]:
    if len(problem.mesh.names) <= FEW_AXES:
        return best_legs(problem)
    merged = merge_axes(problem)
    return tuple(merged.expand(leg) for leg in best_legs(merged.problem))


def _spread(layout: Layout, num_dims: int) -> Spread:
    partial = frozenset(axis for axis, placement in layout if isinstance(placement, Partial))
    return Spread(splits_of(layout, num_dims), partial)


def _steps(problem: Problem, waypoints: Waypoints, source: Layout, target: Layout) -> tuple[Step, ...]:
    """The steps that pass through the waypoints, without those that change nothing."""
    steps: list[Step] = []
    here = problem.source
    for kind, there in _stages(problem, waypoints):
        if there != here:
            layouts = _layout(problem.mesh, here, source, target), _layout(problem.mesh, there, source, target)
            steps.append(_step(problem.mesh, kind, (here, there), layouts))
            here = there
    return tuple(steps)


def _stages(problem: Problem, waypoints: Waypoints) -> Iterable[tuple[StepKind, Spread]]:
    """What is done in which order, and what is held after it."""
    source, target = problem.source, problem.target
    scattered, gathered = waypoints.scattered, waypoints.gathered
    padded = scattered.partial | source.partial
    yield StepKind.PAD, Spread(waypoints.padded, padded)
    yield from _sums(Spread(waypoints.padded, padded), scattered)
    yield StepKind.ALL_TO_ALL, gathered
    made = gathered.partial | target.partial
    yield StepKind.KEEP, Spread(gathered.splits, made - gathered.axes)
    yield StepKind.PAD, Spread(waypoints.coarse, made)
    yield from _sums(Spread(waypoints.coarse, made), target)


def _sums(here: Spread, there: Spread) -> Iterable[tuple[StepKind, Spread]]:
    """Slices, and sums with and without scattering."""
    summed = here.partial - there.partial
    yield StepKind.SLICE, Spread(sliced_first(here.splits, there.splits, summed), here.partial)
    yield StepKind.REDUCE_SCATTER, Spread(there.splits, here.partial - there.axes)
    yield StepKind.ALL_REDUCE, there


def _layout(mesh: Mesh, spread: Spread, source: Layout, target: Layout) -> Layout:
    """What is held, as a layout: copies are called as in the source, or where it has none as in the target."""

    def label(axis: str) -> Placement:
        named = (placement_on(source, axis), placement_on(target, axis))
        return next((placement for placement in named if isinstance(placement, Copies | Invariant)), Copies())

    splits = [(axis, Split(dim)) for dim, axes in enumerate(spread.splits) for axis in axes]
    split = {axis for axis, _ in splits}
    others = [(axis, Partial() if axis in spread.partial else label(axis)) for axis in mesh.names if axis not in split]
    return make_layout([*splits, *others])


def _step(mesh: Mesh, kind: StepKind, spreads: tuple[Spread, Spread], layouts: tuple[Layout, Layout]) -> Step:
    here, there = spreads
    match kind:
        case StepKind.ALL_TO_ALL:
            return _move(here.splits, there.splits, *layouts)
        case StepKind.REDUCE_SCATTER:
            axes = tuple(axis for axis in _nested(there.splits) if axis in here.partial)
        case StepKind.SLICE:
            axes = tuple(axis for axis in _nested(there.splits) if axis not in here.axes)
        case _:
            axes = mesh.in_order(here.partial ^ there.partial)
    return Step(kind, axes, *layouts)


def _move(have: Splits, want: Splits, source: Layout, target: Layout) -> Step:
    """The step for a change of splits; it communicates over the axes whose pieces must leave their place.

    Outermost axes that a dim shares in both layouts divide the mesh into groups that need nothing of each other. Inside
    a group the pieces make up the whole; where nothing else is split in the target, everyone wants just that whole.
    """
    leaving, arriving = tails(have, want)
    if not any(leaving):
        return Step(StepKind.SLICE, _nested(arriving), source, target)
    kind = StepKind.ALL_TO_ALL if any(arriving) else StepKind.ALL_GATHER
    return Step(kind, _nested(leaving), source, target)


def _nested(splits: Splits) -> tuple[str, ...]:
    """The axes that split dims, dim by dim, outermost first."""
    return tuple(axis for axes in splits for axis in axes)
