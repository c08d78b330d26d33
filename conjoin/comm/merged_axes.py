"""Axes of the same fate as one axis, so that a route on nine axes is as quickly found as one on three.

Axes that stand next to each other in source and target, and change in the same way, are taken for one axis of their
product size. Where pieces are uneven that is a little inexact in price, never in what the route does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from conjoin.comm.pieces import Splits, num_devices
from conjoin.comm.waypoints import Leg, Problem, Spread, Waypoints
from conjoin.machine import Axis, Mesh


@dataclass(frozen=True, slots=True)
class Merged:
    """A problem on fewer axes, and which axes each of them stands for."""

    problem: Problem
    stands_for: Mapping[str, tuple[str, ...]]
    mesh: Mesh

    def expand(self, leg: Leg) -> Leg:
        """The same leg on all axes."""
        problem, waypoints = leg
        whole = Problem(problem.shape, self._spread(problem.source), self._spread(problem.target), self.mesh)
        return whole, Waypoints(
            self._splits(waypoints.padded),
            self._spread(waypoints.scattered),
            self._spread(waypoints.gathered),
            self._splits(waypoints.coarse),
        )

    def _splits(self, splits: Splits) -> Splits:
        return tuple(tuple(name for axis in axes for name in self.stands_for[axis]) for axes in splits)

    def _spread(self, spread: Spread) -> Spread:
        partial = frozenset(name for axis in spread.partial for name in self.stands_for[axis])
        return Spread(self._splits(spread.splits), partial)


def merge_axes(problem: Problem) -> Merged:
    """The problem with runs of axes of the same fate as one axis, named after the first of the run."""
    runs: list[list[str]] = []
    for axis in _in_runs(problem):
        alike = () if problem.mesh.cuts else runs  # where pieces are cut is said of axes as they are
        run = next((run for run in alike if _follows(problem, run[-1], axis)), None)
        if run is None:
            runs.append([axis])
        else:
            run.append(axis)
    mesh = Mesh(tuple(Axis(run[0], num_devices(run, problem.mesh)) for run in runs), problem.mesh.cuts)
    first = frozenset(mesh.names)

    def merged(spread: Spread) -> Spread:
        splits = tuple(tuple(axis for axis in axes if axis in first) for axes in spread.splits)
        return Spread(splits, spread.partial & first)

    smaller = Problem(problem.shape, merged(problem.source), merged(problem.target), mesh)
    return Merged(smaller, {run[0]: tuple(run) for run in runs}, problem.mesh)


def _in_runs(problem: Problem) -> Iterable[str]:
    """All axes, those that nest after those they nest in where source and target agree on that."""
    nested = (axis for spread in (problem.source, problem.target) for axes in spread.splits for axis in axes)
    return dict.fromkeys((*nested, *problem.mesh.names))


def _follows(problem: Problem, one: str, other: str) -> bool:
    """Whether two axes change in the same way and, where they split, the second is next inside the first."""
    for spread in (problem.source, problem.target):
        if spread.letter(one) != spread.letter(other):
            return False
        if spread.letter(one) == "S" and not any((one, other) in pairwise(axes) for axes in spread.splits):
            return False
    return True
