"""The choices of an operator: a rule for every unit, where they are legal together, and the seconds of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import ceil

import numpy as np
from numpy.typing import NDArray

from conjoin.cost import OperatorCost, local_calls
from conjoin.ir import rules_for
from conjoin.machine import Mesh
from conjoin.ops import (
    Call,
    Factors,
    Invariant,
    Partial,
    Placement,
    ShardingRule,
    Space,
    Split,
    Spread,
    TensorType,
    Window,
    operand_spans,
    space_of,
    spec_for,
)
from conjoin.search.exact.layout_codes import Codes, code_of, join
from conjoin.search.exact.reshard_seconds import axes_of
from conjoin.search.exact.units import Units
from conjoin.sim import Prices

MAX_WASTE = 1.125
"""How much more than its share the busiest device may have to do where an index does not divide evenly."""

Array = NDArray[np.float64]
Ways = tuple[tuple[str, int], ...]
"""For every split index how many ways."""


@dataclass(frozen=True, slots=True)
class Task:
    """An operator on whole tensors: the same for equal layers of a model."""

    call: Call
    types: tuple[TensorType, ...]
    """What it makes."""
    needs: tuple[int, ...]
    """The operands to which it gives a gradient."""
    leaves: tuple[bool, ...]
    """Which operands are leaves of the graph."""
    of_weights: bool
    """Whether nothing it reads depends on the inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The choices of a task on units, in parallel arrays."""

    rules: tuple[ShardingRule, ...]
    picks: NDArray[np.int64]
    """[choice, unit]: the number of the rule."""
    seconds: Array
    """Of computing, forward and backward, with what neighbours exchange for it."""
    operands: tuple[Codes, ...]
    outputs: tuple[Codes, ...]

    def __len__(self) -> int:
        return len(self.seconds)

    def only(self, kept: NDArray[np.int64] | NDArray[np.bool_]) -> Choices:
        """Some of the choices."""
        return Choices(
            self.rules,
            self.picks[kept],
            self.seconds[kept],
            tuple(codes[kept] for codes in self.operands),
            tuple(codes[kept] for codes in self.outputs),
        )


@dataclass
class OperatorSeconds:
    """Seconds of operators split in some ways, found once for each; kept over all units that are tried."""

    prices: Prices
    _known: dict[tuple[Task, Ways], tuple[float, float]] = field(default_factory=dict)
    _waits: dict[Task, float] = field(default_factory=dict)
    _halos: dict[tuple[Task, Ways], int] = field(default_factory=dict)

    def seconds(self, task: Task, ways: Ways) -> float:
        """Computing forward and backward on the device with the largest pieces."""
        return sum(self._both(task, ways))

    def forward(self, task: Task, ways: Ways) -> float:
        """Computing forward alone, as where it is run again."""
        return self._both(task, ways)[0]

    def waiting(self, task: Task) -> float:
        """The most that a device waits for its host in any way that was asked for: a timeline may hide it."""
        return self._waits.get(task, 0.0)

    def _both(self, task: Task, ways: Ways) -> tuple[float, float]:
        key = task, ways
        if key not in self._known:
            spec = spec_for(task.call)
            if spec is None or not ways:
                costs = [self.prices.operator(task.call, task.needs, 0)]
            else:
                sizes = space_of(spec, task.call).sizes
                pieces = tuple((index, _busiest(sizes[index], n, index in spec.grows)) for index, n in ways)
                calls = local_calls(task.call, pieces, task.needs)
                costs = [self.prices.operator(local.call, local.needs, 0) for local in calls]
            busy = [_busy(cost) for cost in costs]
            self._known[key] = sum(forward for forward, _ in busy), sum(backward for _, backward in busy)
            computed = sum(cost.forward.value + cost.backward.value for cost in costs)
            self._waits[task] = max(self._waits.get(task, 0.0), sum(self._known[key]) - computed)
        return self._known[key]

    def halo_bytes(self, task: Task, ways: Ways) -> int:
        """What a device in the middle lacks of its operands, where windows reach over the ends of its pieces."""
        key = task, ways
        if key not in self._halos:
            self._halos[key] = _halo_bytes(task, dict(ways))
        return self._halos[key]


def _busiest(size: int, parts: int, grows: bool) -> tuple[int, int]:
    """Of the pieces of an index the one with the most to do."""
    length = ceil(size / parts)
    return (size - length, size) if grows else (0, length)


def _busy(cost: OperatorCost) -> tuple[float, float]:
    """How long a device is taken forward and backward: it waits where the host launches more slowly."""
    forward, backward = cost.forward.value, cost.backward.value
    return max(forward, cost.host_forward), max(backward, cost.host_backward)


def _halo_bytes(task: Task, ways: Mapping[str, int]) -> int:
    spec = spec_for(task.call)
    if spec is None or not windowed_indices(task) & ways.keys():
        return 0
    space = space_of(spec, task.call)
    pieces = {}
    for index, n in ways.items():
        middle, size = n // 2, ceil(space.sizes[index] / n)
        pieces[index] = (min(middle * size, space.sizes[index] - 1), min((middle + 1) * size, space.sizes[index]))
    total = 0
    read = operand_spans(spec, task.call, pieces)
    for type, access, spans in zip(task.call.tensors, space.notation.operands, read, strict=True):
        windows = [span for span in spans if not isinstance(access.dims[span.dim], Factors)]
        if windows:
            wanted = {span.dim: span.stop - span.start for span in spans}
            held = {span.dim: ceil(type.shape[span.dim] / _ways_of(access.dims[span.dim], ways)) for span in windows}
            have = float(type.dtype.itemsize)
            want = have
            for dim, size in enumerate(type.shape):
                want *= wanted.get(dim, size)
                have *= min(held.get(dim, wanted.get(dim, size)), wanted.get(dim, size))
            total += round(want - have)
    return total


def _ways_of(dim: Factors | Window | Spread, ways: Mapping[str, int]) -> int:
    return 1 if isinstance(dim, Factors) else ways.get(dim.out, 1)


def make_choices(
    task: Task,
    units: Units,
    mesh_axes: Mapping[int, tuple[str, ...]],
    prices: OperatorSeconds,
    *,
    every_rule: bool = False,
) -> Choices:
    """Every legal choice of a task, but for rules that cannot pay unless every rule is wanted.

    `mesh_axes` names the axes of each group of units, by its bits.
    """
    rules = rules_for(task.call, len(task.types)) if every_rule else rules_of(task)
    picks = np.indices((len(rules),) * len(units)).reshape(len(units), -1).T.astype(np.int64)
    picks = picks[compatible(rules, picks)]
    indices, ways = split_ways(rules, picks, units)
    fits = fitting(task, indices, ways) & owning(task, rules, picks, units)
    picks, ways = picks[fits], ways[fits]
    found, inverse = _distinct(indices, ways)
    seconds = np.array([prices.seconds(task, row) for row in found])[inverse]
    halos = np.array([prices.halo_bytes(task, row) for row in found])[inverse]
    seconds = seconds + _exchanging(task, rules, picks, halos, mesh_axes, prices.prices)
    shapes = [len(type.shape) for type in task.call.tensors], [len(type.shape) for type in task.types]
    return Choices(
        rules,
        picks,
        seconds,
        tuple(_codes([rule.operands[i] for rule in rules], picks, rank) for i, rank in enumerate(shapes[0])),
        tuple(_codes([rule.outputs[i] for rule in rules], picks, rank) for i, rank in enumerate(shapes[1])),
    )


def _distinct(indices: Sequence[str], ways: NDArray[np.int64]) -> tuple[list[Ways], NDArray[np.intp]]:
    """The different ways to split, and for every choice which it is."""
    distinct, inverse = np.unique(ways, axis=0, return_inverse=True)
    found = [tuple((i, int(n)) for i, n in zip(indices, row, strict=True) if n > 1) for row in distinct]
    return found, inverse.reshape(-1)


def forward_seconds(task: Task, choices: Choices, units: Units, prices: OperatorSeconds) -> Array:
    """Of computing forward, by choice."""
    found, inverse = _distinct(*split_ways(choices.rules, choices.picks, units))
    return np.array([prices.forward(task, row) for row in found])[inverse]


def rules_of(task: Task) -> tuple[ShardingRule, ...]:
    """The rules of a call, but for those that cannot pay or hardly ever do.

    What divides no work has to earn it otherwise. Partial sums pass where nothing is multiplied out (a product of them
    would do all the work everywhere). Copies pass where that defers the sum of a gradient to where there is less of it:
    through what is made of weights, and through what makes more than it reads. Else I is no worse than B: the gradient
    is summed after the operator instead of before, and there is as much of it.
    """
    spec = spec_for(task.call)
    sums = spec is not None and bool(space_of(spec, task.call).notation.summed())
    grows = sum(type.bytes for type in task.types) > sum(type.bytes for type in task.call.tensors)

    def can_pay(rule: ShardingRule) -> bool:
        if rule.index is not None or all(p == Invariant() for p in (*rule.operands, *rule.outputs)):
            return True
        if Partial() not in (*rule.operands, *rule.outputs):
            return task.of_weights or grows
        partial = [leaf for placement, leaf in zip(rule.operands, task.leaves, strict=True) if placement == Partial()]
        return not sums and not all(partial)

    return tuple(rule for rule in rules_for(task.call, len(task.types)) if can_pay(rule))


def compatible(rules: Sequence[ShardingRule], picks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """No two units split a dim of a tensor by different indices."""
    clash = np.zeros((len(rules), len(rules)), bool)
    for a, one in enumerate(rules):
        for b, other in enumerate(rules):
            pairs = zip((*one.operands, *one.outputs), (*other.operands, *other.outputs), strict=True)
            clash[a, b] = one.index != other.index and any(isinstance(p, Split) and p == q for p, q in pairs)
    legal = np.ones(len(picks), bool)
    for first in range(picks.shape[1]):
        for second in range(first):
            legal &= ~clash[picks[:, first], picks[:, second]]
    return legal


def split_ways(
    rules: Sequence[ShardingRule], picks: NDArray[np.int64], units: Units
) -> tuple[list[str], NDArray[np.int64]]:
    """How many ways each index is split in every choice."""
    indices = list(dict.fromkeys(rule.index for rule in rules if rule.index is not None))
    degrees = np.array([unit.degree for unit in units], np.int64)
    picked = np.array([indices.index(rule.index) if rule.index is not None else -1 for rule in rules])[picks]
    ways = (
        np.stack([np.where(picked == i, degrees, 1).prod(axis=1) for i in range(len(indices))], axis=1)
        if indices
        else (np.zeros((len(picks), 0), np.int64))
    )
    return indices, ways


def fitting(task: Task, indices: Sequence[str], ways: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which choices split no index more often than it can be."""
    fits = np.ones(len(ways), bool)
    spec = spec_for(task.call)
    if spec is None:
        return fits
    space = space_of(spec, task.call)
    for column, index in enumerate(indices):
        for n in np.unique(ways[:, column]).tolist():
            if not _divides(index, n, space, task):
                fits &= ways[:, column] != n
    return fits


def owning(task: Task, rules: Sequence[ShardingRule], picks: NDArray[np.int64], units: Units) -> NDArray[np.bool_]:
    """Which choices leave every device a part of what is owned beside the index that they split, as experts are."""
    fits = np.ones(len(picks), bool)
    spec = spec_for(task.call)
    owned = {name for names in spec.owned.values() for name in (*names, *chain(*spec.dealt.values()))} if spec else ()
    degrees = np.array([unit.degree for unit in units], np.int64)
    for i, name in enumerate(task.call.operand_names if owned else ()):
        if name in owned:
            splits = np.array([rule.operands[i] == Split(0) for rule in rules])[picks]
            fits &= np.where(splits, degrees, 1).prod(axis=1) <= task.call.tensors[i].shape[0]
    return fits


def _divides(index: str, ways: int, space: Space, task: Task) -> bool:
    """Whether an index may be split so many ways: evenly, or wherever it is a dim of its own with little waste."""
    size = space.sizes[index]
    if ways == 1:
        return True
    accesses = [
        *zip(space.notation.operands, task.call.tensors, strict=True),
        *zip(space.notation.outputs, task.types, strict=True),
    ]
    for access, type in accesses:
        for dim, length in zip(access.dims, type.shape, strict=True):
            if isinstance(dim, Factors) and index in dim.names and ways > length:
                return False
            if not isinstance(dim, Factors) and dim.out == index and ways > length:
                return False
    if size % ways == 0:
        return True
    alone = all(
        not isinstance(dim, Factors) or index not in dim.names or len(dim.names) == 1
        for access, _ in accesses
        for dim in access.dims
    )
    windowed = any(isinstance(dim, Window) and dim.out == index for access, _ in accesses for dim in access.dims)
    return alone and not windowed and ceil(size / ways) * ways <= size * MAX_WASTE and size >= ways


def _codes(placements: Sequence[Placement], picks: NDArray[np.int64], rank: int) -> Codes:
    digits = np.array([code_of(placement) for placement in placements], np.int64)
    return join(digits[picks], rank)


def _exchanging(
    task: Task,
    rules: Sequence[ShardingRule],
    picks: NDArray[np.int64],
    halos: NDArray[np.int64],
    mesh_axes: Mapping[int, tuple[str, ...]],
    prices: Prices,
) -> Array:
    """Seconds of the halos that neighbours exchange, forward and, where a gradient flows, backward."""
    windowed = windowed_indices(task)
    splits = np.array([rule.index in windowed for rule in rules])[picks]
    groups = (splits * (1 << np.arange(picks.shape[1]))).sum(axis=1)
    seconds = np.zeros(len(picks))
    for choice in np.flatnonzero(halos * groups):
        price = prices.collective("exchange", mesh_axes[int(groups[choice])], int(halos[choice]))
        seconds[choice] = price.value * (2 if task.needs else 1)
    return seconds


def windowed_indices(task: Task) -> set[str]:
    """The indices along which windows run."""
    spec = spec_for(task.call)
    if spec is None:
        return set()
    dims = [dim for access in space_of(spec, task.call).notation.operands for dim in access.dims]
    return {dim.out for dim in dims if not isinstance(dim, Factors)}


def group_axes(units: Units, mesh: Mesh) -> dict[int, tuple[str, ...]]:
    """The axes of every group of units, by its bits."""
    return {group: axes_of(group, units, mesh) for group in range(1, 1 << len(units))}
