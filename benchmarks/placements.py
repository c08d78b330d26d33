"""Operators on devices of their own: what people and learned placements do, as layouts that the simulator can judge.

A placement is a number for every operator: on which device of a node it runs. Between nodes samples are split, so that
every node has the whole model. Tensors go from device to device where operators that read each other are apart, and a
parameter is stored where it is read. What is at the same time on several devices, only the timeline sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from benchmarks.search_table import Named
from conjoin.cost import CostModel
from conjoin.ir import Graph
from conjoin.machine import Machine
from conjoin.search import confine, layer_depths, make_plan
from conjoin.sim import (
    Classes,
    Drafts,
    Layouts,
    MachinePrices,
    Simulation,
    Skeleton,
    measure_memory,
    simulate,
    simulate_layouts,
    to_seconds,
)


class Placements:
    """Placements of one model on the devices of a node, and what steps take in them."""

    def __init__(self, graph: Graph, machine: Machine, costs: CostModel, optimizer: str) -> None:
        self._machine, self._optimizer = machine, optimizer
        prices = MachinePrices(machine, costs, optimizer)
        everywhere = simulate(make_plan(graph, machine, "data-parallel"), prices)
        program = everywhere.program
        self.skeleton: Skeleton = program.skeleton
        self._layouts = Layouts(program.leaves, tuple(program.choices), tuple(program.results))
        self._axes = tuple(axis.name for axis in machine.mesh.axes if not axis.between_nodes)
        self._drafts = Drafts(machine.mesh, prices, Classes.keeping(machine.mesh, self._axes))
        self.num_devices = machine.devices_per_node

    def movable(self) -> Iterator[int]:
        """Operators that can be at one place: all but those of single numbers, which every device has."""
        for number, operator in enumerate(self.skeleton.operators):
            if any(self.skeleton.roots[root].type.shape for root in (*operator.reads, *operator.makes)):
                yield number

    def simulate(self, device_of: Mapping[int, int]) -> Simulation:
        """A step with operators at the devices."""
        where = {number: self._place(device) for number, device in device_of.items()}
        return simulate_layouts(self.skeleton, confine(self.skeleton, self._layouts, where), self._drafts, frozenset())

    def judge(self, name: str, device_of: Mapping[int, int]) -> Named:
        """What such a step takes, and whether it fits."""
        simulation = self.simulate(device_of)
        peak = measure_memory(simulation.program, self._optimizer, self._machine.device).peak
        return Named(name, simulation.seconds, peak <= self._machine.device_types[0].memory_bytes)

    def seconds(self) -> list[float]:
        """Of every operator, forward and backward, with all the work of a node on one device."""
        program = self.simulate(dict.fromkeys(self.movable(), 0)).program
        works = [self._drafts.work(*one) for one in zip(program.numbers, program.choices, strict=True)]
        return [to_seconds(int(np.max(work.forward)) + int(np.max(work.backward))) for work in works]

    def _place(self, device: int) -> tuple[tuple[str, int], ...]:
        """A device of a node as places of its axes, the last axis fastest."""
        places = list[tuple[str, int]]()
        for axis in reversed(self._axes):
            device, place = divmod(device, self._machine.mesh.sizes[axis])
            places.append((axis, place))
        return tuple(reversed(places))


def in_a_row(count: int, devices: int) -> Iterator[tuple[int, ...]]:
    """All ways to give numbers up to a count to as many devices as there can be, neighbours to the same."""
    for cut in combinations(range(1, count), min(count, devices) - 1):
        yield tuple(sum(number >= start for start in cut) for number in range(count))


def by_depth(graph: Graph, machine: Machine, costs: CostModel, optimizer: str) -> Named:
    """The experts' strategy for RNNs: operators of the same depth on the same device, in the best of all ways."""
    placements = Placements(graph, machine, costs, optimizer)
    depth_of = layer_depths(placements.skeleton)
    judged = [
        placements.judge(f"layers on devices {_shown(ways)}", {number: ways[depth_of[number]] for number in movable})
        for movable in [tuple(placements.movable())]
        for ways in in_a_row(max(depth_of) + 1, placements.num_devices)
    ]
    return min(judged, key=lambda one: (not one.fits, one.seconds))


def _shown(ways: Sequence[int]) -> str:
    return " ".join(map(str, ways))
