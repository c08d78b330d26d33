"""The random numbers of a pipeline's steps: for every stage and micro-batch streams of their own, from one number."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from conjoin.ir import Graph, Node, Pipeline, Value, is_random, sequential, strides_after
from conjoin.ops import drawing, find_function, map_tensors, spread_args
from conjoin.runtime.program.randomness import Stream, StreamState
from conjoin.runtime.program.rank_program import LocalProgram

Begin = Callable[[int, int], None]
"""Told of a stage and a micro-batch before its forward pass."""


class PipelineDraws:
    """The random numbers of a step; for comparisons what one device draws that runs micro-batches one by one."""

    def __init__(self, pipeline: Pipeline, exact: Stream | None) -> None:
        self._exact, self._count = exact, pipeline.num_micro_batches
        self._nodes = [_random_nodes(stage.plan.graph) for stage in pipeline.stages]
        self.any = any(self._nodes)

    @property
    def place(self) -> tuple[Tensor, StreamState | None] | None:
        """Where the draws of all steps stand."""
        return (torch.get_rng_state(), self._after) if self.any else None

    def go_to(self, place: tuple[Tensor, StreamState | None] | None) -> None:
        """Have steps draw again from there."""
        if place is not None:
            torch.set_rng_state(place[0])
            self._after = place[1]

    def begin(self, stages: Mapping[int, LocalProgram]) -> Begin:
        """What has a stage draw for a micro-batch of the step that begins."""
        if not self.any:
            return lambda stage, micro_batch: None
        if self._exact is not None:
            places = self._places(self._exact)
            return lambda stage, micro_batch: stages[stage].streams.go_to(places[micro_batch, stage])
        with drawing:
            base = int(torch.randint(2**52, (), dtype=torch.int64))
        return lambda stage, micro_batch: stages[stage].streams.restart(f"{base}:{stage}:{micro_batch}")

    def _places(self, exact: Stream) -> dict[tuple[int, int], StreamState]:
        """Where one device's generator stands before each stage of each micro-batch; then it has drawn them all."""
        found: dict[tuple[int, int], StreamState] = {}
        stream = Stream()
        stream.go_to(exact.place if self._after is None else self._after)
        for micro_batch in range(self._count):
            for stage, nodes in enumerate(self._nodes):
                found[micro_batch, stage] = stream.place
                for node in nodes:
                    args = map_tensors(node.op, node.args, lambda v: torch.zeros(v.type.shape, dtype=v.type.dtype))
                    positional, keywords = spread_args(node.op, args, torch.device("cpu"))
                    with torch.no_grad():
                        stream.run(find_function(node.op), tuple(positional), keywords)
        self._after = stream.place
        return found

    _after: StreamState | None = None
    """Where one device's generator stands after the steps so far."""


def orders_on_arrival(pipeline: Pipeline) -> list[dict[str, tuple[int, ...]]]:
    """By stage, how what comes from others lies in memory on one device: what is drawn for it goes by that."""
    made: list[list[tuple[int, ...]]] = []
    found: list[dict[str, tuple[int, ...]]] = []
    for stage in pipeline.stages:
        found.append({arrival.input: made[arrival.stage][arrival.output] for arrival in stage.arrivals})
        strides = strides_after(stage.plan.graph, found[-1])
        made.append([strides[value] if isinstance(value, Value) else () for value in stage.plan.graph.outputs])
    return found


def _random_nodes(graph: Graph) -> list[Node]:
    return [node for node in sequential(graph).nodes if is_random(node.op, node.args)]
