"""Which weights a step by a plan changes: none is told before anything is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conjoin.cli import rooms

if TYPE_CHECKING:
    from conjoin.ir import Leaf, Pipeline, Plan


def trained_weights(plan: Plan | Pipeline) -> list[Leaf]:
    """The parameters that a gradient of the loss comes back to; of a pipeline all that are trained."""
    graph = plan.graph
    found = [leaf for leaf in graph.leaves if leaf.trainable and graph.loss is not None]
    if isinstance(plan, rooms.ir.Pipeline) or not graph.training:
        return found
    flow = rooms.comm.gradient_flow(graph)
    return [leaf for leaf in found if flow.reach(rooms.ir.Value(leaf))]
