"""What the backward pass runs again where a plan keeps nothing of the inside of a segment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from conjoin.comm.gradients import GradientFlow, gradient_flow
from conjoin.ir import Plan, Segment, offloaded_tensors, operators_of, recomputed_segments, regathered_parameters


def run_again(segments: Iterable[Segment], remembered: Sequence[bool]) -> tuple[Segment, ...]:
    """What has to be run again of each segment: all up to the last operator of which autograd keeps anything.

    What comes after needs nothing kept, and is run once; of a segment of which nothing is kept nothing is left.
    """
    found = []
    for segment in segments:
        first, last = segment
        keeping = [place for place in range(first, last + 1) if remembered[place]]
        if keeping:
            found.append(Segment(first, keeping[-1], (place for place in segment.kept if place <= keeping[-1])))
    return tuple(found)


def recomputed(plan: Plan, gradients: GradientFlow | None = None) -> tuple[Segment, ...]:
    """The operators that the backward pass of a plan runs again."""
    segments = recomputed_segments(plan)
    if not segments:
        return ()
    found = gradients or gradient_flow(plan.graph)
    return run_again(segments, [found.remember(node) for node in operators_of(plan.graph)])


def makes_again(plan: Plan) -> bool:
    """Whether the backward pass runs operators again, gathers parameters again, or brings tensors from the host: then
    the gradients of inputs and of weights are made together, since for each by itself it would do that twice."""
    return bool(recomputed(plan) or regathered_parameters(plan) or offloaded_tensors(plan))
