"""Whether to cut a graph anew between epochs: only where what is gained until the end pays for moving the rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conjoin.gnn.adjacency import Floats, Ints
from conjoin.gnn.cuts import balanced_cuts
from conjoin.gnn.features import Features
from conjoin.gnn.learned import PartitionModel


@dataclass(frozen=True, slots=True, eq=False)
class Repartition:
    """A cut that was thought of, and what it is worth."""

    cuts: Ints
    seconds_before: float
    """Of an epoch, as measured: that of the slowest part."""
    seconds_after: float
    """As predicted."""
    doubt_seconds: float
    """By how much predictions for the cuts in use miss what was measured."""
    moved_rows: int
    """That the busiest part receives or gives away."""
    move_seconds: float
    epochs_left: int

    @property
    def saved_seconds(self) -> float:
        """Until the end, the move paid and the doubt taken off."""
        gain = self.seconds_before - self.seconds_after - self.doubt_seconds
        return gain * self.epochs_left - self.move_seconds

    @property
    def pays(self) -> bool:
        """Whether it is worth while."""
        return self.saved_seconds > 0

    def __str__(self) -> str:
        verdict = "cut anew" if self.pays else "kept"
        return (
            f"{verdict}: an epoch of {self.seconds_before:.3g} s would take {self.seconds_after:.3g} s "
            f"(± {self.doubt_seconds:.2g}), moving {self.moved_rows} rows {self.move_seconds:.2g} s, "
            f"{self.epochs_left} epochs left"
        )


def propose_cuts(  # noqa: PLR0913 - what a move costs is two numbers
    model: PartitionModel,
    features: Features,
    cuts: Ints,
    seconds: Floats,
    epochs_left: int,
    seconds_per_row: float,
    once_seconds: float = 0.0,
) -> Repartition:
    """Return the best cuts that a model knows of, against those in use, whose last epoch took `seconds[layer, part]`.

    `seconds_per_row` is what moving a vertex takes: its features, activations, edges and optimizer state over the link;
    `once_seconds` what any move does, as to plan for parts of other sizes.
    """
    load = model.load(features)
    found = balanced_cuts(load, len(cuts) - 1)
    measured = seconds.sum(axis=0)
    missed = float(np.abs(load.of_parts(cuts) - measured).mean())
    rows = moved_rows(cuts, found)
    return Repartition(
        found,
        float(measured.max()),
        float(load.of_parts(found).max()),
        missed,
        rows,
        rows * seconds_per_row + once_seconds,
        epochs_left,
    )


def moved_rows(before: Ints, after: Ints) -> int:
    """Return the rows that the busiest part receives, or gives away if that is more.

    >>> moved_rows(np.array([0, 4, 8]), np.array([0, 5, 8]))
    1
    """
    kept = np.minimum(before[1:], after[1:]) - np.maximum(before[:-1], after[:-1])
    kept = np.maximum(kept, 0)
    return int((np.maximum(np.diff(before), np.diff(after)) - kept).max())
