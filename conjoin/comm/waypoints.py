"""Between which layouts a reshard should pass, so that the fewest bytes are on the wire.

Every route has the same form, any part of which may be missing:

    source ─slice, reduce-scatter, all-reduce─► scattered ─one move─► gathered ─pad, keep─► target

I and B hold the same data, so here both are C (copies). On each axis there is little to choose (`OPTIONS`): a sum may be
scattered or reduced whole, copies may be sliced first so that less is summed, and a sum that is asked for may be made of
pieces put into zeros. What that costs, in elements over all ranks, for a tensor of `whole` elements:

    reduce-scatter over n ranks     (n - 1) · whole · (devices along the axes that do not split the result)
    all-reduce over n ranks         2 (n - 1) / n · whole · (devices along the axes that do not split it)
    move                            whole · (devices along the axes that do not split the result) - what is kept in place

Only the last term needs regions, and it is bounded without them (`_bound`): choices are tried by their bound until no
bound is below the best found. Without partial sums this is the direct move, of which no composition can be cheaper.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from typing import Literal

from conjoin.comm.pieces import Splits, common_outer, kept_elements, num_devices, tails
from conjoin.machine import Mesh

Letter = Literal["S", "C", "P"]
Option = tuple[Letter, Letter]
"""What an axis is before and after the move."""

OPTIONS: Mapping[tuple[Letter, Letter], tuple[Option, ...]] = {
    ("S", "S"): (("S", "S"), ("S", "C")),
    ("S", "C"): (("S", "C"),),
    ("S", "P"): (("S", "S"), ("S", "C")),
    ("C", "S"): (("S", "S"), ("C", "S"), ("C", "C"), ("S", "C")),
    ("C", "C"): (("C", "C"), ("S", "C")),
    ("C", "P"): (("C", "C"), ("S", "S"), ("S", "C"), ("C", "S")),
    ("P", "S"): (("S", "S"), ("C", "S"), ("C", "C"), ("S", "C")),
    ("P", "C"): (("C", "C"), ("S", "C")),
    ("P", "P"): (("P", "P"), ("S", "S"), ("S", "C"), ("C", "S"), ("C", "C")),
}
"""By what an axis is in source and target: what it may be before and after the move."""

FEW_AXES = 4
"""Up to so many axes with a choice each is decided on its own; beyond, those with the same fate are decided together."""
MAX_TRIES = 64
"""Into which dims axes are scattered makes a difference only where pieces are uneven or do not line up."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A layout without telling I from B: the axes that split each dim, and those that hold partial sums."""

    splits: Splits
    partial: frozenset[str] = frozenset()

    def letter(self, axis: str) -> Letter:
        if axis in self.partial:
            return "P"
        return "S" if any(axis in axes for axes in self.splits) else "C"

    def dim_of(self, axis: str) -> int | None:
        """The dim that the axis splits."""
        return next((dim for dim, axes in enumerate(self.splits) if axis in axes), None)

    def split(self) -> tuple[str, ...]:
        """All axes that split a dim."""
        return tuple(axis for axes in self.splits for axis in axes)


@dataclass(frozen=True, slots=True)
class Waypoints:
    """Where a route passes: all sums and slices are done at `scattered`, all movement at `gathered`."""

    scattered: Spread
    gathered: Spread


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be brought from where to where."""

    shape: tuple[int, ...]
    source: Spread
    target: Spread
    mesh: Mesh

    def options(self, axis: str) -> tuple[Option, ...]:
        """What the axis may be before and after the move: copies are sliced early for a sum, late for the sake of a pad."""
        fate = self.source.letter(axis), self.target.letter(axis)
        options = OPTIONS[fate]
        if fate == ("C", "C") and not self.source.partial:
            return options[:1]
        if fate[1] == "S" and not self.target.partial:
            return tuple(option for option in options if option[1] == "S")
        return options

    def copies(self, spread: Spread) -> int:
        """How often each element of the tensor is held, over all ranks; partial sums count as held."""
        return self.mesh.size // num_devices(spread.split(), self.mesh)


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """What is minimised, the most important first."""

    elements: int
    communicating: int
    general_moves: int = 0
    local: int = 0


def best_waypoints(problem: Problem) -> Waypoints:
    """The waypoints with the fewest elements on the wire, then the fewest steps."""
    kept = kept_elements(problem.shape, problem.source.splits, problem.target.splits, problem.mesh)
    bounded = sorted(
        ((_bound(problem, choice, kept), i, choice) for i, choice in enumerate(_choices(problem))), key=lambda b: b[:2]
    )
    best: tuple[Score, Waypoints] | None = None
    for bound, _, choice in bounded:
        if best is not None and bound > best[0]:
            break
        for waypoints in _realisations(problem, choice):
            score = score_of(problem, waypoints)
            if best is None or score < best[0]:
                best = score, waypoints
            if score.elements == bound.elements:
                break
    assert best is not None, "there is always a choice"
    return best[1]


Choice = Mapping[str, Option]


def _choices(problem: Problem) -> Iterator[Choice]:
    """All ways to choose, for each axis or for all axes of the same fate together."""
    mesh = problem.mesh
    chooses = [axis for axis in mesh.names if len(problem.options(axis)) > 1]
    fixed = {axis: problem.options(axis)[0] for axis in mesh.names if axis not in chooses}
    if len(chooses) <= FEW_AXES:
        choosers = [[axis] for axis in chooses]
    else:
        fates: dict[tuple[Letter, Letter], list[str]] = {}
        for axis in chooses:
            fates.setdefault((problem.source.letter(axis), problem.target.letter(axis)), []).append(axis)
        choosers = list(fates.values())
    for options in product(*(problem.options(axes[0]) for axes in choosers)):
        decided = {axis: option for axes, option in zip(choosers, options, strict=True) for axis in axes}
        yield fixed | decided


def _bound(problem: Problem, choice: Choice, kept: int) -> Score:
    """No realisation of the choice has a better score: what is kept in place is at most what is there at all."""
    whole, sizes, partial = prod(problem.shape), problem.mesh.sizes, problem.source.partial
    held = prod(sizes[axis] for axis, (before, _) in choice.items() if before != "S")
    wanted = prod(sizes[axis] for axis, (_, after) in choice.items() if after != "S")
    scattered = prod(sizes[axis] for axis in partial if choice[axis][0] == "S")
    reduced = prod(sizes[axis] for axis in partial if choice[axis][0] == "C")
    moved = whole * wanted - min(whole * wanted, whole * held, kept)
    elements = _reduction_elements(whole * held, scattered, reduced) + moved
    return Score(elements, (scattered > 1) + (reduced > 1) + (moved > 0))


def _reduction_elements(held: int, scattered: int, reduced: int) -> int:
    return held * (scattered - 1) + 2 * held * (reduced - 1) // reduced


def score_of(problem: Problem, waypoints: Waypoints) -> Score:
    """The elements on the wire over all ranks, and the steps."""
    source, target, mesh = problem.source, problem.target, problem.mesh
    scattered, gathered = waypoints.scattered, waypoints.gathered
    whole = prod(problem.shape)
    split = set(scattered.split())
    summed = source.partial - scattered.partial
    num_scattered = num_devices(summed & split, mesh)
    num_reduced = num_devices(summed - split, mesh)
    moved = whole * problem.copies(gathered) - kept_elements(problem.shape, scattered.splits, gathered.splits, mesh)
    leaving, arriving = (any(tail) for tail in tails(scattered.splits, gathered.splits))
    sliced = split - set(source.split()) - summed
    local = bool(sliced) + (arriving and not leaving)
    made = target.partial - gathered.partial
    padded = made & set(gathered.split())
    return Score(
        elements=_reduction_elements(whole * problem.copies(scattered), num_scattered, num_reduced) + moved,
        communicating=(num_scattered > 1) + (num_reduced > 1) + leaving,
        general_moves=int(leaving and arriving),
        local=local + bool(padded) + bool(made - padded) + (not set(target.split()) <= set(gathered.split())),
    )


def _realisations(problem: Problem, choice: Choice) -> Iterator[Waypoints]:
    """The choice with each dim tried for the axes that split both before and after the move, where they line up.

    For an axis that splits only before or only after, all dims are equally good as long as it is the innermost: its
    pieces together make up the same region.
    """
    base = sliced_last(problem.target.splits, {axis for axis, (_, after) in choice.items() if after == "S"})
    if base is None:
        return
    aligned = [axis for axis in problem.mesh.names if choice[axis] == ("S", "S") and not _is_fixed(problem, axis)]
    preferences = [_preferred_dims(problem, axis) for axis in aligned]
    for dims in islice(product(*preferences), MAX_TRIES):
        wanted = dict(zip(aligned, dims, strict=True))
        before = [axis for axis in problem.mesh.names if choice[axis][0] == "S"]
        after = [axis for axis in problem.mesh.names if choice[axis][1] == "S"]
        stays = frozenset(axis for axis, option in choice.items() if option == ("P", "P"))
        yield Waypoints(
            Spread(_extended(problem, problem.source.splits, _nested_as(problem.target, before, wanted), wanted), stays),
            Spread(_extended(problem, base, _nested_as(problem.source, after, wanted), wanted), stays),
        )


def _is_fixed(problem: Problem, axis: str) -> bool:
    return problem.source.letter(axis) == problem.target.letter(axis) == "S"


def _preferred_dims(problem: Problem, axis: str) -> list[int]:
    """All dims, the one in which the axis is split in source or target first."""
    dims = list(range(len(problem.shape)))
    natural = problem.source.dim_of(axis) if problem.target.dim_of(axis) is None else problem.target.dim_of(axis)
    return sorted(dims, key=lambda dim: dim != natural)


def _nested_as(model: Spread, axes: Sequence[str], aligned: Mapping[str, int]) -> list[str]:
    """Axes in the order in which they shall nest: as in the other layout where they line up with it, the rest inside."""
    order = {axis: i for i, axis in enumerate(model.split())}
    return sorted(axes, key=lambda axis: (axis not in aligned, order.get(axis, len(order))))


def _extended(problem: Problem, base: Splits, axes: Sequence[str], dims: Mapping[str, int]) -> Splits:
    """Splits with more axes inside, each in its dim or else in the dim with the largest pieces; without room, nowhere."""
    splits = [list(axes) for axes in base]
    room = [size // num_devices(axes, problem.mesh) for size, axes in zip(problem.shape, base, strict=True)]
    present = {axis for axes in base for axis in axes}
    for axis in axes:
        if axis in present:
            continue
        size = problem.mesh.sizes[axis]
        by_room = sorted(range(len(room)), key=lambda dim: (dim != dims.get(axis), -room[dim]))
        fitting = next((dim for dim in by_room if room[dim] >= size), None)
        if fitting is not None:
            splits[fitting].append(axis)
            room[fitting] //= size
    return tuple(map(tuple, splits))


def sliced_first(problem: Problem, waypoints: Waypoints) -> Splits:
    """The source with the copies sliced that can be before anything is summed: those not inside a scattered sum."""
    result = []
    for base, axes in zip(problem.source.splits, waypoints.scattered.splits, strict=True):
        num_sliced = common_outer(tuple(a for a in axes if a not in problem.source.partial), axes)
        result.append(axes[: max(num_sliced, len(base))])
    return tuple(result)


def sliced_last(target: Splits, present: Container[str]) -> Splits | None:
    """The target without the axes that are not yet present; None where one is not inside all that are."""
    kept = tuple(tuple(axis for axis in axes if axis in present) for axes in target)
    nested = all(common_outer(some, axes) == len(some) for some, axes in zip(kept, target, strict=True))
    return kept if nested else None
