"""How far a pipeline can be from the best: what no pipeline of some numbers of stages takes less, and no plan at all.

For every number of stages and of micro-batches that was looked at, the tables of stages say what no cutting, whatever
its ways and schedule, takes less than (`stages/least.py`). Of other numbers, and of plans of one stage, it is only
known that they compute as much: all operators whole, where they are most efficient, dealt out evenly over all devices.
"""

from __future__ import annotations

from dataclasses import dataclass

_FAR = 0.05
"""A gap that is told with a reason."""


@dataclass(frozen=True, slots=True)
class PipelineBound:
    """A pipeline's seconds a step, and those that no other is below."""

    step: float
    least_step: float
    """Of all pipelines with the numbers of stages and micro-batches that were looked at, in the ways of running stages
    that were tried for these."""
    looked_at: int
    """Numbers of stages with numbers of micro-batches."""
    among: int
    """How many there are of these."""
    computing: float
    """Seconds in which all devices together compute what a step computes, whatever the plan."""

    @property
    def gap(self) -> float:
        """By which part of the bound the step can at most be lowered with the numbers that were looked at.

        >>> PipelineBound(1.05, 1.0, 3, 20, 0.7).gap
        0.050000000000000044
        """
        return max(0.0, self.step / self.least_step - 1) if self.least_step > 0 else float("inf")

    @property
    def step_gap(self) -> float:
        """By which part of its bound the step can at most be lowered by any plan."""
        return max(0.0, self.step / self.computing - 1) if self.computing > 0 else float("inf")

    def __str__(self) -> str:
        why = ", which counts no transfers and memory only in part" if self.gap > _FAR else ""
        return (
            f"the step is within {self.gap:.1%} of the least of all pipelines with the {self.looked_at} of "
            f"{self.among} numbers of stages and micro-batches that were looked at{why}; within {self.step_gap:.0%} "
            f"of computing alone, which no plan is below"
        )
