"""What the devices compute for an operator in its layouts, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from conjoin.comm import halo_call, halo_of, ring_of, routed_call, routing_of
from conjoin.cost import NO_SECONDS, LocalCall, OperatorCost, Source, local_calls, weakest
from conjoin.ir import Node, Placed, cut_for_all, places_of_all, unlike_axes
from conjoin.machine import Mesh
from conjoin.ops import Call, indices_by_place, space_of, spec_for
from conjoin.sim.engine import Ticks, to_ticks
from conjoin.sim.instructions import only_where, spread
from conjoin.sim.prices import Prices
from conjoin.sim.ring_calls import ring_calls
from conjoin.sim.skeleton import Task
from conjoin.sim.symmetry import Classes


@dataclass(frozen=True, slots=True)
class Work:
    """What the devices compute for an operator."""

    forward: Ticks
    backward: Ticks
    host_forward: Ticks
    host_backward: Ticks
    source: Source


@dataclass(frozen=True, slots=True)
class Works:
    """What the devices of a mesh compute for operators: one number where all are alike."""

    mesh: Mesh
    prices: Prices
    classes: Classes

    def of(self, task: Task, node: Node, placed: Placed) -> Work:
        """Of a task whose node lies so on the mesh."""
        call, needs = task.call, task.needs
        if task.is_kept:
            return Work(0, 0, 0, 0, NO_SECONDS.source)
        around = ring_of(node, placed, self.mesh)
        if around is not None:
            return _summed([self.prices.operator(each, needs, 0) for each in ring_calls(node, around, self.mesh)])
        if routing_of(node, placed, self.mesh) is not None:
            return _summed([self.prices.operator(routed_call(node, self.mesh, 0), needs, 0)])
        if halo_of(node, placed, self.mesh) is not None:
            return _summed([self.prices.operator(halo_call(node, placed, self.mesh, 0), needs, 0)])
        alike = not (unlike_axes(node, placed, self.mesh) or self.prices.unlike_axes())
        first = (busiest(call, placed, self.mesh),), np.zeros(1, np.int64)
        ranks, numbers = first if alike else self._unlike_ranks(call, placed)
        found = [self._costs(call, placed, needs, rank) for rank in ranks]
        where = self.classes.at(placed.at)
        return Work(
            spread([to_ticks(sum(cost.forward.value for cost in costs)) for costs in found], numbers, self.classes),
            spread([to_ticks(sum(cost.backward.value for cost in costs)) for costs in found], numbers, self.classes),
            only_where(to_ticks(sum(cost.host_forward for cost in found[numbers[0]])), where),
            only_where(to_ticks(sum(cost.host_backward for cost in found[numbers[0]])), where),
            weakest(*(source for costs in found for c in costs for source in (c.forward.source, c.backward.source))),
        )

    def _unlike_ranks(self, call: Call, placed: Placed) -> tuple[tuple[int, ...], NDArray[np.int64]]:
        """Of the ranks that stand for classes some that run unlike pieces of a call or are of unlike devices, and for
        every class which of them does as it does."""
        ranks, spec = np.array(self.classes.ranks), spec_for(call)
        told = [places_of_all(self.mesh)[axis][ranks] for axis in self.prices.unlike_axes()]
        if spec is not None:
            sizes, placed_indices = space_of(spec, call).sizes, indices_by_place(spec, call)
            for index, axes in placed.splits:
                start, stop = cut_for_all(sizes[index], axes, self.mesh)[ranks].T
                told += (start, stop) if index in placed_indices else (stop - start,)
        _, first, numbers = np.unique(np.array(told), axis=1, return_index=True, return_inverse=True)
        return tuple(ranks[first].tolist()), numbers.reshape(-1)

    def _costs(self, call: Call, placed: Placed, needs: tuple[int, ...], rank: int) -> list[OperatorCost]:
        calls = calls_on(call, placed, needs, self.mesh, rank)
        return [self.prices.operator(local.call, local.needs, rank) for local in calls]


def busiest(call: Call, placed: Placed, mesh: Mesh) -> int:
    """The rank that has the most to do of those that run alike pieces of a call."""
    spec, at = spec_for(call), dict(placed.at)
    grows = spec.grows if spec is not None else ()
    for index, axes in placed.splits:
        at |= {axis: mesh.sizes[axis] - 1 for axis in axes if index in grows}
    return mesh.rank_at(at)


def calls_on(call: Call, placed: Placed, needs: tuple[int, ...], mesh: Mesh, rank: int) -> tuple[LocalCall, ...]:
    """What a rank runs for a call."""
    spec = spec_for(call)
    if spec is None or not placed.splits:
        return (LocalCall(call, needs),)
    space = space_of(spec, call)
    addressed = {access.addresses for access in space.notation.operands}
    pieces = placed.pieces(space.sizes, mesh, rank)
    alike = {name: (0, end - start) if name in addressed else (start, end) for name, (start, end) in pieces.items()}
    return local_calls(call, tuple(alike.items()), needs)  # which rows of a table are here changes no cost


def _summed(costs: Iterable[OperatorCost]) -> Work:
    """What several calls take that all devices make alike."""
    some = list(costs)
    return Work(
        to_ticks(sum(cost.forward.value for cost in some)),
        to_ticks(sum(cost.backward.value for cost in some)),
        to_ticks(sum(cost.host_forward for cost in some)),
        to_ticks(sum(cost.host_backward for cost in some)),
        weakest(*(source for cost in some for source in (cost.forward.source, cost.backward.source))),
    )
