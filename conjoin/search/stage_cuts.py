"""Where to cut a model into stages: as balanced as predicted seconds say, and where little has to be sent.

Nodes stand in the order they run, and a stage is a row of them. With f(s, p) for the least time of the slowest of the
first s stages, if these end before node p,

    f(s, p) = min over q < p of max(f(s - 1, q), (seconds(q..p) + seconds to send what crosses q) / devices(s))

is filled in stage by stage (`cut_rows`): every device of a stage has a link of its own, for its part of what is sent.
Only places where least has to be sent are tried.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from conjoin.cost import CostModel
from conjoin.errors import StrategyError
from conjoin.ir import Graph, Leaf, Node, Value, made_anew, plain_call
from conjoin.machine import DeviceType

_MAX_PLACES = 1500
"""Places to cut at that are tried: the time this takes grows with their square."""


def node_seconds(graph: Graph, costs: CostModel, device: DeviceType) -> np.ndarray:
    """What every node takes on one device, forward and backward."""
    learned = {Value(leaf) for leaf in graph.leaves if leaf.trainable}
    found = np.zeros(len(graph.nodes))
    for i, node in enumerate(graph.nodes):
        needs = tuple(place for place, value in enumerate(node.inputs) if value in learned)
        if needs:
            learned.update(v for v in node.outputs() if v.type.dtype.is_floating_point)
        cost = costs.operator(plain_call(node), needs, device)
        found[i] = cost.forward.value + cost.backward.value
    return found


def crossing_bytes(graph: Graph) -> np.ndarray:
    """For every place between two nodes, before each and after the last, what is made before it and read after it.

    What every stage makes by itself is not sent.
    """
    anew, places = made_anew(graph), {node: i for i, node in enumerate(graph.nodes)}
    last: dict[Value, int] = {}
    for i, node in enumerate(graph.nodes):
        for value in node.inputs if node not in anew else ():
            last[value] = i
    changes = np.zeros(len(graph.nodes) + 2)
    for value, end in last.items():
        owner = value.owner
        if isinstance(owner, Node) and owner not in anew:
            changes[places[owner] + 1] += value.type.bytes
            changes[end + 1] -= value.type.bytes
    return np.cumsum(changes)[: len(graph.nodes) + 1]


def cut_rows(graph: Graph, seconds: np.ndarray, sizes: Sequence[int], bytes_per_second: float) -> list[int]:
    """The stage of every node, for stages on so many devices each."""
    count, crossing, learning = len(graph.nodes), crossing_bytes(graph), first_uses(graph)
    if learning.sum() < len(sizes):
        most = int(learning.sum())
        raise StrategyError(
            f"{graph.name} was to be cut into {len(sizes)} stages. {most} of its operators use a parameter that none "
            f"before them uses, and every stage is to have one. "
            f"Ask for {f'at most pp={most}' if most else 'a strategy without stages, as fsdp'}."
        )
    inside = open_places(graph)
    best = sorted(inside, key=lambda p: (crossing[p], p))[: max(_MAX_PLACES, len(sizes) * 2)]
    places = np.array([0, *sorted(best), count])
    upto, learned = (np.concatenate([[0.0], np.cumsum(of)])[places] for of in (seconds, learning))
    sending = crossing[places] / bytes_per_second
    least = np.full(len(places), np.inf)
    least[0] = 0.0
    steps: list[np.ndarray] = []
    for size in sizes:
        spent = (upto[None, :] - upto[:, None] + sending[:, None]) / size
        spent[learned[None, :] <= learned[:, None]] = np.inf  # a stage has something to learn
        worst = np.maximum(least[:, None], spent)
        total = worst + 1e-6 * spent  # of equals the shorter rows
        steps.append(total.argmin(0))
        least = worst[steps[-1], np.arange(len(places))]
    if not np.isfinite(least[-1]):
        raise StrategyError(
            f"{graph.name} was to be cut into {len(sizes)} stages. There are {len(inside)} places to cut it at, and no "
            f"{len(sizes) - 1} of them leave every stage a parameter of its own. Ask for fewer stages."
        )
    at, stages = len(places) - 1, [0] * count
    for stage in reversed(range(len(sizes))):
        start = int(steps[stage][at])
        for i in range(places[start], places[at]):
            stages[i] = stage
        at = start
    return stages


def open_places(graph: Graph) -> list[int]:
    """The places between two nodes at which a stage may begin."""
    anew, closed = made_anew(graph), _between_reads_and_writes(graph)
    return [p for p in range(1, len(graph.nodes)) if graph.nodes[p - 1] not in anew and p not in closed]


def first_uses(graph: Graph) -> np.ndarray:
    """For every node whether it is the first of a stage's own to use some trained parameter."""
    anew, seen, found = made_anew(graph), set[Value](), np.zeros(len(graph.nodes))
    used: dict[Value, frozenset[Value]] = {
        Value(leaf): frozenset({Value(leaf)}) for leaf in graph.leaves if leaf.is_trained
    }
    for i, node in enumerate(graph.nodes):
        parameters = frozenset[Value]().union(*(used.get(value, frozenset()) for value in node.inputs))
        if node in anew:
            used.update(dict.fromkeys(node.outputs(), parameters))
            continue
        found[i] = bool(parameters - seen)
        seen |= parameters
    return found


def _between_reads_and_writes(graph: Graph) -> set[int]:
    """The places between a node that reads a buffer and the one that makes what it is changed to: a stage has both."""
    rows = {node: i for i, node in enumerate(graph.nodes)}
    made = {name: rows[value.owner] for name, value in graph.updates if isinstance(value.owner, Node)}
    found = set[int]()
    for i, node in enumerate(graph.nodes):
        for value in node.inputs:
            if isinstance(value.owner, Leaf) and value.owner.name in made:
                first, last = sorted((i, made[value.owner.name]))
                found.update(range(first + 1, last + 1))
    return found
