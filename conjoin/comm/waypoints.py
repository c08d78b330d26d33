"""Between which layouts a reshard should pass, so that the fewest bytes are on the wire.

Every route has the same form, any part of which may be missing:

    source ─pad, slice, reduce-scatter, all-reduce─► scattered
           ─one move─►                               gathered
           ─keep, pad, slice, reduce-scatter, all-reduce─► target

I and B hold the same data, so here both are C (copies). On each axis there is little to choose (`OPTIONS`): a sum may
be scattered or reduced whole, copies may be sliced first so that less is summed, and a sum that is asked for may be
made of pieces put into zeros. What that costs, in elements over all ranks, for a tensor of `whole` elements of which
`copies` are held (the devices along the axes that do not split it):

    reduce-scatter over n ranks     (n - 1) · whole · copies of the result
    all-reduce over n ranks         2 (n - 1) / n · whole · copies
    move                            whole · copies of the result - what is kept in place

Only the last term needs regions, and it is bounded without them (`_bound`): choices are tried by their bound until no
bound is below the best found. Without partial sums this is the direct move, than which no composition can be cheaper.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, permutations, product
from math import prod
from operator import add, itemgetter
from typing import Literal, NamedTuple

from conjoin.comm.pieces import Splits, common_outer, kept_elements, num_devices, tails
from conjoin.machine import Mesh

Letter = Literal["S", "C", "P"]
Option = tuple[Letter, Letter]
"""What an axis is before and after the move."""

OPTIONS: Mapping[Option, tuple[Option, ...]] = {
    ("S", "S"): (("S", "S"), ("S", "C")),
    ("S", "C"): (("S", "C"),),
    ("S", "P"): (("S", "S"), ("S", "C"), ("P", "P")),
    ("C", "S"): (("S", "S"), ("C", "S"), ("C", "C"), ("S", "C")),
    ("C", "C"): (("C", "C"), ("S", "C")),
    ("C", "P"): (("C", "C"), ("S", "S"), ("C", "S"), ("S", "C")),
    ("P", "S"): (("S", "S"), ("C", "S"), ("P", "P"), ("C", "C"), ("S", "C")),
    ("P", "C"): (("C", "C"), ("S", "C"), ("P", "P")),
    ("P", "P"): (("P", "P"), ("S", "S"), ("S", "C"), ("C", "S"), ("C", "C")),
}
"""By what an axis is in source and target: what it may be before and after the move, the usual first."""

FEW_AXES = 4
"""Up to so many axes with a choice, each is decided on its own; beyond, those of the same fate are decided together."""
USUAL_OPTIONS = 2
"""How many options are tried beyond `FEW_AXES`."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How many choices are tried, and how many ways to nest axes in dims before and after the move."""

    choices: int
    nestings: int


MANY_TRIES = Effort(choices=1000, nestings=48)
"""All of them, for three axes and two dims."""
FEW_TRIES = Effort(choices=6, nestings=1)
"""Beyond `FEW_AXES`: a few milliseconds on 512 devices."""


def _axes_of(splits: Splits) -> frozenset[str]:
    return frozenset().union(*splits)


@dataclass(frozen=True, slots=True)
class Spread:
    """A layout without telling I from B: the axes that split each dim, and those that hold partial sums."""

    splits: Splits
    partial: frozenset[str] = frozenset()

    @property
    def axes(self) -> frozenset[str]:
        """All axes that split a dim."""
        return _axes_of(self.splits)

    def letter(self, axis: str) -> Letter:
        if axis in self.partial:
            return "P"
        return "S" if axis in self.axes else "C"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be brought from where to where."""

    shape: tuple[int, ...]
    source: Spread
    target: Spread
    mesh: Mesh

    def copies(self, spread: Spread) -> int:
        """How often each element is held, over all ranks; partial sums count as held."""
        return self.mesh.size // num_devices(spread.axes, self.mesh)


@dataclass(frozen=True, slots=True)
class Waypoints:
    """What is held before and after the move, with the coarser layouts beyond which only pads and slices remain."""

    padded: Splits
    """The source after its first pads."""
    scattered: Spread
    gathered: Spread
    coarse: Splits
    """The target before its last slices and sums."""


class Score(NamedTuple):
    """What is minimised, the most important first."""

    elements: int
    communicating: int
    general_moves: int = 0
    local: int = 0

    def __add__(self, other: Score) -> Score:  # type: ignore[override] # of one kind, and no longer for it
        return Score(*map(add, self, other))


Choice = Mapping[str, Option]


Leg = tuple[Problem, Waypoints]


@lru_cache(maxsize=1 << 14)
def best_legs(problem: Problem) -> tuple[Leg, ...]:
    """One leg, or two where the tensor has too few positions to be scattered as it lies: it is moved with its sums."""
    score, waypoints = best_waypoints(problem)
    best: tuple[Leg, ...] = ((problem, waypoints),)
    for via in (*_rearranged(problem, problem.source), *_rearranged(problem, problem.target)):
        first, second = replace(problem, target=via), replace(problem, source=via)
        if _least(first) + _least(second) >= score:
            continue
        (reached, first_waypoints), (rest, second_waypoints) = best_waypoints(first), best_waypoints(second)
        if reached + rest < score:
            score, best = reached + rest, ((first, first_waypoints), (second, second_waypoints))
    return best


def _least(problem: Problem) -> Score:
    """A bound for all choices; exact for a move that leaves sums alone."""
    if problem.source.partial == problem.target.partial:
        kept = kept_elements(problem.shape, problem.source.splits, problem.target.splits, problem.mesh)
        return Score(prod(problem.shape) * problem.copies(problem.target) - kept, 0)
    return min(_bound(problem, weights) for _, weights in _choices(problem))


def _rearranged(problem: Problem, end: Spread) -> Iterator[Spread]:
    """Other ways to lay out source or target with its partial sums, where not every rank can have its own piece."""
    mesh = problem.mesh
    if not end.partial or len(mesh.names) > FEW_AXES:
        return
    if any(len(_axes_of(splits)) == len(mesh.names) for splits in extensions(problem, end.splits, mesh.names, ())):
        return
    empty: Splits = tuple(() for _ in problem.shape)
    for axes in dict.fromkeys((end.axes, frozenset(mesh.names) - end.partial)):
        for splits in islice(extensions(problem, empty, mesh.in_order(axes), end.splits), MANY_TRIES.nestings):
            yield Spread(splits, end.partial)


@lru_cache(maxsize=1 << 14)
def best_waypoints(problem: Problem) -> tuple[Score, Waypoints]:
    """The waypoints with the fewest elements on the wire, then the fewest steps."""
    bounded = [(_bound(problem, weights), choice) for choice, weights in _choices(problem)]
    best: tuple[Score, Waypoints] | None = None
    effort = MANY_TRIES if len(problem.mesh.names) <= FEW_AXES else FEW_TRIES
    realised = (
        (bound, waypoints)
        for bound, choice in sorted(bounded, key=itemgetter(0))
        if (waypoints := _realisation(problem, choice, effort.nestings)) is not None
    )
    for bound, waypoints in islice(realised, effort.choices):
        if best is not None and bound > best[0]:
            break
        score = score_of(problem, waypoints)
        if best is None or score < best[0]:
            best = score, waypoints
    assert best is not None, "there is always a choice"
    return best


def _options(fate: Option, fates: Iterable[Option]) -> tuple[Option, ...]:
    """What makes sense for an axis: copies are sliced early only for a sum, late only for a pad."""
    match fate:
        case ("C", "C") if all(source != "P" for source, _ in fates):
            return OPTIONS[fate][:1]
        case (_, "S") if all(target != "P" for _, target in fates):
            return tuple(option for option in OPTIONS[fate] if option[1] != "C")
        case _:
            return OPTIONS[fate]


Weights = tuple[int, int, int, int, int, int]
"""Devices along the axes that do not split before, after the move; that are scattered, reduced before; and after it."""


def _weights(size: int, fate: Option, option: Option) -> Weights:
    """What one axis contributes."""
    before, after = option
    applies = (
        before != "S",
        after != "S",
        fate[0] == "P" and before == "S",
        fate[0] == "P" and before == "C",
        fate == ("P", "S") and after == "P",
        fate == ("P", "C") and after == "P",
    )
    return tuple(size if applied else 1 for applied in applies)  # type: ignore[return-value] # six of them


def _choices(problem: Problem) -> Sequence[tuple[Choice, Weights]]:
    """All ways to choose, for each axis or for all axes of the same fate together."""
    fates = ((problem.source.letter(axis), problem.target.letter(axis)) for axis in problem.mesh.names)
    return _choices_for(tuple(fates), problem.mesh)


@lru_cache(maxsize=1 << 10)
def _choices_for(fates: tuple[Option, ...], mesh: Mesh) -> tuple[tuple[Choice, Weights], ...]:
    fate_of = dict(zip(mesh.names, fates, strict=True))
    options = {axis: _options(fate, fates) for axis, fate in fate_of.items()}
    num_choosing = sum(len(tried) > 1 for tried in options.values())
    choosers: dict[object, list[str]] = {}
    for axis, tried in options.items():
        alone = len(tried) > 1 and num_choosing <= FEW_AXES
        choosers.setdefault(axis if alone else fate_of[axis], []).append(axis)
    num_tried = None if num_choosing <= FEW_AXES else USUAL_OPTIONS
    weighted = (
        [
            (dict.fromkeys(axes, option), _product(_weights(mesh.sizes[a], fate_of[a], option) for a in axes))
            for option in options[axes[0]][:num_tried]
        ]
        for axes in choosers.values()
    )
    return tuple(
        ({a: o for part, _ in decided for a, o in part.items()}, _product(weights for _, weights in decided))
        for decided in product(*weighted)
    )


def _product(weights: Iterable[Weights]) -> Weights:
    return tuple(map(prod, zip(*weights, strict=True)))  # type: ignore[return-value] # as many as come in


def _bound(problem: Problem, weights: Weights) -> Score:
    """No realisation of a choice has a better score: what is kept in place is at most what there is."""
    held, wanted, scattered, reduced, late_scattered, late_reduced = weights
    whole = prod(problem.shape)
    elements = whole * max(0, wanted - held) + _elements_summed(whole * held, scattered, reduced)
    if late_scattered * late_reduced > 1:
        elements += _elements_summed(whole * problem.copies(problem.target), late_scattered, late_reduced)
    return Score(elements, (scattered > 1) + (reduced > 1) + (wanted > held))


def _elements_summed(held: int, scattered: int, reduced: int) -> int:
    """By a reduce-scatter, and then by an all-reduce of what is held."""
    return held * (scattered - 1) + 2 * held * (reduced - 1) // reduced


def score_of(problem: Problem, waypoints: Waypoints) -> Score:
    """The elements on the wire over all ranks, and the steps."""
    source, target, scattered, gathered = problem.source, problem.target, waypoints.scattered, waypoints.gathered
    whole, mesh = prod(problem.shape), problem.mesh
    elements = whole * problem.copies(gathered)
    elements -= kept_elements(problem.shape, scattered.splits, gathered.splits, mesh)
    leaving, arriving = (any(tail) for tail in tails(scattered.splits, gathered.splits))
    communicating = int(leaving)
    for summed, reached in (
        (source.partial - scattered.partial, scattered), (gathered.partial - target.partial, target),
    ):  # fmt: skip
        num_scattered = num_devices(summed & reached.axes, mesh)
        num_reduced = num_devices(summed - reached.axes, mesh)
        elements += _elements_summed(whole * problem.copies(reached), num_scattered, num_reduced)
        communicating += (num_scattered > 1) + (num_reduced > 1)
    made = target.partial - gathered.partial
    local = (
        waypoints.padded != source.splits,
        not scattered.axes <= source.axes | source.partial,
        arriving and not leaving,
        not made <= gathered.axes,
        waypoints.coarse != gathered.splits,
        not target.axes <= gathered.axes | gathered.partial,
    )
    return Score(elements, communicating, int(leaving and arriving), sum(local))


def _realisation(problem: Problem, choice: Choice, num_nestings: int) -> Waypoints | None:
    """The choice with axes in those dims, and nested in that order, in which the most is kept in place."""
    before = [axis for axis, (letter, _) in choice.items() if letter == "S"]
    after = [axis for axis, (_, letter) in choice.items() if letter == "S"]
    padded = coarser(problem.source.splits, before)
    coarse = coarser(problem.target.splits, after)
    if padded is None or coarse is None:
        return None
    stays = frozenset(axis for axis, option in choice.items() if option == ("P", "P"))
    most = kept_elements(problem.shape, padded, coarse, problem.mesh) if num_nestings > 1 else 0
    best, num_axes = ((-1, -1), padded, coarse), len(before) + len(after)
    for have in dict.fromkeys(islice(extensions(problem, padded, before, coarse), num_nestings)):
        for want in islice(extensions(problem, coarse, after, have), num_nestings):
            placed = len(_axes_of(have)) + len(_axes_of(want))
            kept = kept_elements(problem.shape, have, want, problem.mesh)
            best = max(best, ((placed, kept), have, want), key=lambda found: found[0])
            if (placed, kept) == (num_axes, most):
                return Waypoints(padded, Spread(have, stays), Spread(want, stays), coarse)
    return Waypoints(padded, Spread(best[1], stays), Spread(best[2], stays), coarse)


def coarser(splits: Splits, present: Sequence[str]) -> Splits | None:
    """Splits by the axes present only; None where another axis is not inside all of them."""
    kept = tuple(tuple(axis for axis in axes if axis in present) for axes in splits)
    nested = all(common_outer(some, axes) == len(some) for some, axes in zip(kept, splits, strict=True))
    return kept if nested else None


def extensions(problem: Problem, base: Splits, axes: Sequence[str], model: Splits) -> Iterator[Splits]:
    """Splits with more axes inside, in all roomy dims and orders, beginning as in a model; the others are left out."""
    present = {axis for split in base for axis in split}
    room = _room(problem, base)
    dims = {axis: dim for dim, split in enumerate(model) for axis in split}
    order = [axis for axis in dims if axis in axes and axis not in present]
    order += [axis for axis in axes if axis not in dims and axis not in present]
    roomy = {axis: [dim for dim, size in enumerate(room) if size >= problem.mesh.sizes[axis]] for axis in order}
    order = [axis for axis in order if roomy[axis]]
    for nested in permutations(order):
        for places in product(*(sorted(roomy[axis], key=lambda d: d != dims.get(axis)) for axis in nested)):
            yield _extended(problem.mesh, base, room, zip(nested, places, strict=True))


def _room(problem: Problem, splits: Splits) -> list[int]:
    """How many ways a dim can still be split."""
    return [size // num_devices(split, problem.mesh) for size, split in zip(problem.shape, splits, strict=True)]


def _extended(mesh: Mesh, base: Splits, free: Sequence[int], chosen: Iterable[tuple[str, int]]) -> Splits:
    """Splits with more axes inside, each in its dim, or else in the dim with the largest pieces, or else nowhere."""
    splits, room = [list(split) for split in base], list(free)
    for axis, wanted in chosen:
        size = mesh.sizes[axis]
        dim = wanted if room[wanted] >= size else max(range(len(room)), key=room.__getitem__)
        if room[dim] >= size:
            splits[dim].append(axis)
            room[dim] //= size
    return tuple(map(tuple, splits))


def sliced_first(base: Splits, splits: Splits, summed: frozenset[str]) -> Splits:
    """Of the axes that splits have inside a base, those that can be sliced before anything is summed.

    >>> sliced_first((("x",),), (("x", "y", "sum", "z"),), frozenset({"sum"}))
    (('x', 'y'),)
    """
    heads = (common_outer(tuple(axis for axis in axes if axis not in summed), axes) for axes in splits)
    return tuple(axes[: max(n, len(some))] for some, axes, n in zip(base, splits, heads, strict=True))
