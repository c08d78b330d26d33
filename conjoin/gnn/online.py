"""A graph that is cut anew while it trains: what every part takes is measured, learned, and acted upon where it pays.

    parts = OnlineParts(whole, cuts, step)
    for epoch in range(epochs):
        with parts.timed() as clock:
            found = step(*parts.batch)
            clock.turn()
            found["loss"].backward()
        told = parts.learn(epochs - epoch - 1)

Every rank holds its part. Rank 0 alone keeps the features of the vertices and the model, and decides; what it decided
after one epoch all ranks hear, with everybody's times, after the next.
"""

from __future__ import annotations

import json
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from torch import Tensor

from conjoin.errors import UsageError
from conjoin.gnn.adjacency import Adjacency, Floats, Ints
from conjoin.gnn.cuts import balanced_cuts, equal_edges
from conjoin.gnn.features import NAMES, Features, vertex_features
from conjoin.gnn.learned import PartitionModel
from conjoin.gnn.parts import GraphPart, PartSizes, WholeGraph
from conjoin.gnn.repartition import Repartition, propose_cuts
from conjoin.gnn.roles import Role
from conjoin.ir import Pipeline, Plan, Value
from conjoin.ops import split_axes
from conjoin.runtime import LayerClock, ParallelModule, RowExchange, timed_layers

LEAST_SECONDS = 1e-7
"""Of a layer: clocks of threads tell no less."""


@dataclass(frozen=True, slots=True)
class EpochTold:
    """What was learned of an epoch."""

    seconds: tuple[float, ...]
    """That every part computed."""
    predicted: tuple[float, ...] | None
    """What the model says of that, having seen it; known to rank 0, once there is one."""
    moved: Repartition | None
    """The cut that was gone over to after it; the other ranks know that there was one by their batch."""
    weights: dict[str, float] | None = None
    """Seconds of one of each feature, of all layers together; features that cost nothing are left out."""


class OnlineParts:
    """This rank's part of a graph, as long as it trains."""

    def __init__(self, whole: WholeGraph, cuts: Ints, step: ParallelModule) -> None:
        """Keep this rank's part of a graph, and have the plan cut there."""
        began = time.perf_counter()
        self._step, self._device = step, step.store.device
        self._axes, own = _place_of(step, whole, len(cuts) - 1)
        whole = _as_the_plan_takes_it(whole, step.plan, self._axes)
        self._exchange = RowExchange(step.communicator, self._axes)
        self.part: GraphPart = whole.part(cuts, own)
        self.batch: tuple[Tensor, ...] = self._cut_out()
        self._learner = None
        if step.communicator.rank == 0:
            seconds = (time.perf_counter() - began) / max(whole.roles.num_vertices, 1)
            self._learner = _Learner(whole.adjacency, cuts, seconds)
        self._clock: LayerClock | None = None
        self._epoch_began = began

    def _cut_out(self) -> tuple[Tensor, ...]:
        self._step.cut_anew(self.part.sizes.on(self._axes))
        placed: tuple[Tensor, ...] = self._step.placed(self.part.tensors)
        return placed

    def timed(self) -> AbstractContextManager[LayerClock]:
        """Time the step inside, layer by layer."""
        self._epoch_began = time.perf_counter()
        self._timed = timed_layers(self._device)
        return _Kept(self, self._timed)

    def learn(self, epochs_left: int) -> EpochTold:
        """Tell all ranks what this one took, learn from it, and cut the graph anew where that was decided."""
        assert self._clock is not None, "a step is timed first"
        decided = None if self._learner is None else self._learner.decided
        message = {
            "part": self.part.own,
            "seconds": self._clock.seconds(),
            "cuts": None if decided is None else decided.cuts.tolist(),
            "edges": None if decided is None else self._learner.edge_cuts(decided.cuts),  # type: ignore[union-attr]
        }
        told = [json.loads(text) for text in self._step.communicator.compare(json.dumps(message))]
        times: dict[int, list[float]] = {}
        for each in told:
            known = times.setdefault(each["part"], each["seconds"])
            times[each["part"]] = [max(pair) for pair in zip(known, each["seconds"], strict=True)]
        seconds = np.maximum(np.array([times[part] for part in range(self.part.num_parts)]).T, LEAST_SECONDS)
        moved = decided if told[0]["cuts"] is not None else None
        if self._learner is not None:
            taken = time.perf_counter() - self._epoch_began
            self._learner.observe(self._clock.widths, seconds, epochs_left, taken, moved)
        if told[0]["cuts"] is not None:
            self.go_over(PartSizes(tuple(told[0]["cuts"]), tuple(told[0]["edges"])))
        predicted, weights = (None, None) if self._learner is None else self._learner.last
        return EpochTold(tuple(seconds.sum(axis=0).tolist()), predicted, moved, weights)

    def go_over(self, sizes: PartSizes) -> None:
        """Have the parts of another cut: all ranks call it, between two steps."""
        sent = self._exchange.bytes_sent
        self.part = self.part.moved(sizes, self._exchange)
        self._exchange.bytes_sent = sent  # a move is no part of a step
        self.batch = self._cut_out()

    def cuts_of(self, adjacency: Adjacency) -> Ints:
        """How a graph that was never run is cut for a forward pass, by what was learned of this one; before anything
        was, by its edges. All ranks call it."""
        found = None if self._learner is None else self._learner.cuts_of(adjacency, self.part.num_parts).tolist()
        return np.array(json.loads(self._step.communicator.compare(json.dumps(found))[0]))

    def note(self, clock: LayerClock) -> None:
        """The clock of the last step."""
        self._clock = clock


class _Kept(AbstractContextManager[LayerClock]):
    """A timed step whose clock is kept."""

    def __init__(self, parts: OnlineParts, timed: AbstractContextManager[LayerClock]) -> None:
        self._parts, self._timed = parts, timed

    def __enter__(self) -> LayerClock:
        clock = self._timed.__enter__()
        self._parts.note(clock)
        return clock

    def __exit__(self, *error: object) -> None:
        self._timed.__exit__(*error)  # type: ignore[arg-type]


class _Learner:
    """What rank 0 knows: the graph's features, and the model that was fitted to all epochs so far."""

    def __init__(self, adjacency: Adjacency, cuts: Ints, seconds_per_row: float) -> None:
        self._adjacency, self._cuts, self._seconds_per_row = adjacency, np.asarray(cuts), seconds_per_row
        self._features: Features | None = None
        self._model: PartitionModel | None = None
        self._is_first, self._once_seconds = True, 0.0
        self.decided: Repartition | None = None
        self.last: tuple[tuple[float, ...] | None, dict[str, float] | None] = None, None

    def edge_cuts(self, cuts: Ints) -> list[int]:
        found: list[int] = self._adjacency.indptr[cuts].tolist()
        return found

    def cuts_of(self, adjacency: Adjacency, num_parts: int) -> Ints:
        """The cuts of another graph, for the forward pass of every layer."""
        if self._model is None or not all(layer.count for layer in self._model.layers):
            return equal_edges(adjacency, num_parts)
        count = len(self._model.layers) // 2
        forward = PartitionModel(self._model.layers[:count], self._model.widths[:count])
        return balanced_cuts(forward.load(vertex_features(adjacency, forward.widths)), num_parts)

    def observe(
        self, widths: tuple[int, ...], seconds: Floats, epochs_left: int, taken: float, moved: Repartition | None
    ) -> None:
        """Learn from an epoch, and decide; the first with a cut sets much up, and is no measure of it."""
        self.decided = None
        if not widths:
            return
        if self._features is None or self._model is None:
            self._features = vertex_features(self._adjacency, widths * 2)
            self._model = PartitionModel.empty(widths * 2)
        if self._is_first:
            self._is_first, self._once_seconds = False, taken
        else:
            self._fit(self._features, seconds, epochs_left, decides=moved is None)
        if moved is not None:
            self._cuts, self._is_first = moved.cuts, True

    def _fit(self, features: Features, seconds: Floats, epochs_left: int, decides: bool) -> None:
        assert self._model is not None
        self._model = self._model.observed(features, self._cuts, seconds)
        load = self._model.load(features)
        weights = dict(zip(NAMES, load.weights.sum(axis=0).tolist(), strict=True))
        self.last = tuple(load.of_parts(self._cuts).tolist()), {name: w for name, w in weights.items() if w > 0}
        if not decides or epochs_left < 2:
            return
        proposed = propose_cuts(
            self._model, features, self._cuts, seconds, epochs_left - 1, self._seconds_per_row, self._once_seconds
        )
        if proposed.pays and not np.array_equal(proposed.cuts, self._cuts):
            self.decided = proposed


def _as_the_plan_takes_it(whole: WholeGraph, plan: Plan | Pipeline, axes: tuple[str, ...]) -> WholeGraph:
    """The graph with what the plan has whole on every device said to be neither of vertices nor of edges."""
    layouts = [value.type.layout for value in plan.graph.inputs if isinstance(value, Value)]
    pairs = zip(whole.roles.roles, layouts, strict=True)
    taken = tuple(role if split_axes(layout, role.dim) == axes else Role("other") for role, layout in pairs)
    return replace(whole, roles=replace(whole.roles, roles=taken))


def _place_of(step: ParallelModule, whole: WholeGraph, num_parts: int) -> tuple[tuple[str, ...], int]:
    """The axes of a plan over which vertices are split, and which part is this rank's."""
    plan = step.plan
    at = next(i for i, role in enumerate(whole.roles.roles) if role.kind == "vertices")
    axes = split_axes([value.type.layout for value in plan.graph.inputs if isinstance(value, Value)][at], 0)
    if not isinstance(plan, Plan) or prod(plan.mesh.sizes[axis] for axis in axes) != num_parts:
        raise UsageError(
            f"A graph in {num_parts} parts was to be trained by the {plan}. It splits vertices over "
            f"{', '.join(axes) or 'no axis'}, and a device has one part. Plan with vertex-parallel:parts={num_parts}."
        )
    places, own = plan.mesh.coordinates(step.communicator.rank), 0
    for axis in axes:
        own = own * plan.mesh.sizes[axis] + places[axis]
    return axes, own
