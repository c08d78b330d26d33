"""The steps of a reshard and the route they make up."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from conjoin.ops import Layout


class StepKind(Enum):
    """What a step does, in the word users see."""

    RELABEL = "relabel"
    SLICE = "slice"
    KEEP = "keep"
    PAD = "pad"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_GATHER = "all-gather"
    ALL_TO_ALL = "all-to-all"
    DROP = "drop"
    FILL = "fill"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"

    @property
    def is_local(self) -> bool:
        return self in _LOCAL


_LOCAL = frozenset({
    StepKind.RELABEL, StepKind.SLICE, StepKind.KEEP, StepKind.PAD, StepKind.DROP, StepKind.FILL,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One collective over `axes`, or one local change of what `axes` hold.

    RELABEL reads the same data as I or B. SLICE cuts the rank's part out of what it holds. KEEP leaves the value at
    coordinate 0 of each of the axes and zeros it elsewhere. PAD puts the piece into zeros of the larger region.
    REDUCE_SCATTER sums, over the group, the rank's target region out of everyone's partial sum; the target regions of a
    group are disjoint, but where copies are sliced at the same time they need not cover what the group holds.

    DROP leaves the value at one place of the axes and nothing elsewhere; FILL makes it a partial sum by zeros there.
    REDUCE sums at one place. BROADCAST, GATHER, SCATTER and SEND bring a value from, to, or from one to another place.
    """

    kind: StepKind
    axes: tuple[str, ...]
    source: Layout
    target: Layout

    def __str__(self) -> str:
        return f"{self.kind.value} over {' '.join(self.axes)}: {layout_text(self.source)} -> {layout_text(self.target)}"


@dataclass(frozen=True, slots=True)
class Route:
    """The steps from one layout of a tensor to another; none where they are the same."""

    shape: tuple[int, ...]
    source: Layout
    target: Layout
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.steps)) or "nothing to do"


def layout_text(layout: Layout) -> str:
    """A layout in messages."""
    return ",".join(f"{axis}:{placement}" for axis, placement in layout) or "I"
