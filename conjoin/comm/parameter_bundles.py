"""Which parameters travel together: one collective for many, each way.

A parameter that is stored as I and used as B needs nothing forward and an all-reduce of its gradient backward; one
that is stored split is gathered for use and its gradient reduce-scattered. Stored split on some axes and whole on
others (hybrid sharding), it is gathered over the first, and the piece that is left of its gradient is all-reduced over
the others. What needs more goes on its own. What gets no gradient, as frozen weights, is only gathered.

Pieces of a bundle are padded to those of the member that holds most: collectives want parts of one size.

A parameter that is used in another dtype than stored, as in mixed precision, is cast where it is stored: what is
gathered is narrow, and gradients are summed up in the dtype of the parameter, or in the one that the graph says.

Gathers are started ahead: while what needs one bundle runs, the next is under way. What the backward pass runs again
is called as a whole, so all bundles that a segment is the first to need fly together, and ahead of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np
import torch

from conjoin.comm.gradients import Entry, GradientFlow, gradient_flow
from conjoin.comm.movement import movement
from conjoin.comm.per_rank import PerRank, sum_per_rank
from conjoin.comm.pieces import held_bytes, splits_evenly
from conjoin.comm.recompute import recomputed
from conjoin.comm.route import backward_route, reshard
from conjoin.comm.steps import Route, Step, StepKind
from conjoin.ir import (
    BUNDLE_BYTES,
    EXACT,
    Graph,
    Leaf,
    Plan,
    Rounding,
    Segment,
    Value,
    operators_of,
    origin,
    regathered_parameters,
    stored_leaf,
)
from conjoin.machine import Mesh
from conjoin.ops import Copies, Layout, TensorType, split_axes

_LARGE = BUNDLE_BYTES
"""Parameters of as many bytes travel alone: packing would cost more than a latency."""
BUNDLES_AHEAD = 2
"""How many bundles' bytes are on their way: a large parameter that is used after small ones must be before them."""


@dataclass(frozen=True, slots=True)
class BundleKind:
    """What parameters must share to go in the same collectives."""

    gathered: tuple[str, ...]
    """The axes over which they are gathered for use, and gradients reduce-scattered."""
    summed: tuple[str, ...]
    """The axes over which gradients, or the pieces that are left of them, are all-reduced."""
    dtype: torch.dtype
    """In which they are used."""
    stored: torch.dtype
    """In which they are stored."""
    added: torch.dtype
    """In which their gradients are summed up."""
    regather: bool
    """Gathered again for the backward pass."""
    trained: bool
    """Whether gradients come back."""


@dataclass(frozen=True, slots=True)
class Use:
    """Who uses parameters, by the places of operators."""

    reads: tuple[int, ...]
    """Everyone who reads them, in order."""
    last_kept: int
    """The last whose backward reads them, or before whose backward a segment is run again that does; -1 for none."""
    back: bool
    """Whether a gradient comes back."""


@dataclass(frozen=True, slots=True)
class ParameterBundle:
    """Parameters, each with the layout of its use, that are moved by the same collectives."""

    kind: BundleKind
    entries: tuple[Entry, ...]
    use: Use
    wanted: int
    """Where they must be on their way at the latest: the first reader, or the begin of a segment that is run again."""
    num_bytes: int
    """Of the parameters as they are used, on one device."""
    is_flat: bool
    """Whether it is one parameter, and what members hold one after the other in memory is what they use."""

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """The parameters as they are stored."""
        found = tuple(stored_leaf(root) for root, _ in self.entries)
        assert all(leaf is not None for leaf in found)
        return found  # type: ignore[return-value] # just seen

    @property
    def sums(self) -> tuple[TensorType, ...]:
        """Their gradients as they are summed up."""
        return tuple(replace(leaf.type, dtype=self.kind.added) for leaf in self.leaves)

    def is_alone(self, bundle_bytes: int) -> bool:
        """Whether it is one parameter that is too large to be packed with others, whichever these are."""
        return len(self.entries) == 1 and self.num_bytes >= min(bundle_bytes, _LARGE)

    @property
    def is_gathered_again(self) -> bool:
        """Whether it is dropped after the forward pass, and the backward pass reads one of its parameters."""
        return self.kind.regather and self.use.last_kept >= 0


@dataclass(frozen=True, slots=True)
class BundleSizes:
    """How large bundles are made, and what is narrowed in them."""

    bundle_bytes: int
    rounding: Rounding = EXACT


def find_bundles(plan: Plan) -> tuple[ParameterBundle, ...]:
    """All bundles of a plan; parameters that need more go on their own."""
    segments, regathered = recomputed(plan), regathered_parameters(plan)
    sizes = BundleSizes(plan.bundle_bytes, plan.graph.rounding)
    return bundle_parameters(_find_uses(plan, segments), plan.mesh, sizes, regathered, segments)


def bundle_parameters(
    uses: Mapping[Entry, Use],
    mesh: Mesh,
    sizes: BundleSizes,
    regathered: frozenset[str] = frozenset(),
    segments: Sequence[Segment] = (),
) -> tuple[ParameterBundle, ...]:
    """Bundles of parameters that are used in other layouts than stored, given in the order of use."""
    entries: dict[BundleKind, list[Entry]] = {}
    for entry, use in uses.items():
        value, layout = entry
        leaf = stored_leaf(value)
        assert leaf is not None
        dtypes = leaf.type.dtype, sizes.rounding.summed_in(leaf.type.dtype)
        kind = _kind_of(value.type, layout, mesh, dtypes, leaf.name in regathered, use.back)
        if kind is not None:
            entries.setdefault(kind, []).append(entry)
    begins = {place: first for first, last in segments for place in range(first, last + 1)}
    return tuple(
        _bundle(kind, part, [uses[entry] for entry in part], begins, mesh)
        for kind, found in entries.items()
        for part in _filled(found, mesh, sizes.bundle_bytes)
    )


def _bundle(
    kind: BundleKind, entries: tuple[Entry, ...], uses: Sequence[Use], begins: Mapping[int, int], mesh: Mesh
) -> ParameterBundle:
    reads = tuple(sorted({place for use in uses for place in use.reads}))
    use = Use(reads, max(use.last_kept for use in uses), any(use.back for use in uses))
    is_flat = len(entries) == 1 and _lies_flat(entries[0][0].type, kind.gathered, mesh)
    num_bytes = sum(used_bytes(entry, mesh) for entry in entries)
    return ParameterBundle(kind, entries, use, begins.get(reads[0], reads[0]), num_bytes, is_flat)


def used_bytes(entry: Entry, mesh: Mesh) -> int:
    """What a device has of a parameter as it is used."""
    value, layout = entry
    return held_bytes(value.type.laid_out(layout), mesh).largest


def _lies_flat(type: TensorType, gathered: tuple[str, ...], mesh: Mesh) -> bool:
    """Whether pieces are rows, of one number, in the order of the group."""
    rows = split_axes(type.layout, 0) if type.shape else ()
    in_order = tuple(axis for axis in rows if axis in gathered) == gathered
    return in_order and splits_evenly(type.shape, type.layout, mesh)


def _filled(entries: list[Entry], mesh: Mesh, bundle_bytes: int) -> list[tuple[Entry, ...]]:
    """Entries in the order of use, cut into bundles filled from the last; large ones, which need not be packed, alone.

    The first one, whose gradients come last and whose gather comes first, is what remains: little is left to wait for.
    """
    parts: list[list[int]] = []
    filling: list[int] = []
    num_bytes = bundle_bytes
    for i, entry in reversed(list(enumerate(entries))):
        size = used_bytes(entry, mesh)
        if size >= min(bundle_bytes, _LARGE):
            parts.append([i])
            continue
        if num_bytes >= bundle_bytes:
            filling, num_bytes = [], 0
            parts.append(filling)
        filling.append(i)
        num_bytes += size
    return [tuple(entries[i] for i in part) for part in sorted(map(sorted, parts))]


Flights = tuple[tuple[int, ...], ...]
"""For every bundle the numbers of others."""


def flights_forward(bundles: Sequence[ParameterBundle], bundle_bytes: int) -> Flights:
    """The bundles whose gathers are started with each: what is wanted at the same place, and what is wanted next."""
    gathered = [i for i, bundle in enumerate(bundles) if bundle.kind.gathered]
    return _flights(bundles, gathered, [bundle.wanted for bundle in bundles], BUNDLES_AHEAD * bundle_bytes)


def flights_backward(bundles: Sequence[ParameterBundle], bundle_bytes: int) -> Flights:
    """The same for what the backward pass gathers again."""
    gathered = [i for i, bundle in enumerate(bundles) if bundle.is_gathered_again]
    return _flights(bundles, gathered, [-bundle.use.last_kept for bundle in bundles], BUNDLES_AHEAD * bundle_bytes)


def _flights(
    bundles: Sequence[ParameterBundle], gathered: Sequence[int], places: Sequence[int], num_bytes: int
) -> Flights:
    """For every bundle the others of its kind at the same place, and of those at the next ones so many bytes."""
    found: list[tuple[int, ...]] = [()] * len(bundles)
    for kind in dict.fromkeys(bundles[i].kind for i in gathered):
        alike = sorted((i for i in gathered if bundles[i].kind == kind), key=lambda i: places[i])
        stretches = [tuple(some) for _, some in groupby(alike, key=lambda i: places[i])]
        for number, stretch in enumerate(stretches):
            after = _enough(bundles, stretches[number + 1 :], num_bytes)
            for i in stretch:
                found[i] = (*(j for j in stretch if j != i), *after)
    return tuple(found)


def _enough(bundles: Sequence[ParameterBundle], stretches: Sequence[tuple[int, ...]], num_bytes: int) -> list[int]:
    """The first of some stretches, until there are so many bytes."""
    found: list[int] = []
    for stretch in stretches:
        if sum(bundles[i].num_bytes for i in found) >= num_bytes:
            break
        found += stretch
    return found


def sent_bytes(types: Iterable[TensorType], axes: tuple[str, ...], mesh: Mesh) -> PerRank:
    """What a rank sends to one other of its group when some tensors are gathered over axes: as much as any there."""
    return _sent_bytes(tuple(types), axes, mesh)


@lru_cache(maxsize=1 << 12)  # layers that are equal send alike
def _sent_bytes(types: tuple[TensorType, ...], axes: tuple[str, ...], mesh: Mesh) -> PerRank:
    held = sum_per_rank((held_bytes(type, mesh) for type in types), mesh.size)
    if len(held.values) == 1:
        return held
    found, groups = np.array(held.values), np.array(mesh.groups(axes))
    found[groups] = found[groups].max(axis=1, keepdims=True)
    return PerRank(tuple(found.tolist()), mesh.size)


def _find_uses(plan: Plan, segments: Sequence[Segment]) -> dict[Entry, Use]:
    """Every parameter, or what one is cast to, that is used in another layout than stored, with that layout and who
    uses it, in the order of use.

    One that is trained and whose use has no part in the loss is not among them: it gets no gradient, as on one device.
    """
    flow, training = gradient_flow(plan.graph), plan.graph.training
    ends = {place: last for first, last in segments for place in range(first, last + 1)}
    found: dict[Entry, Use] = {}
    for entry, readers in _readers(plan.graph, flow).items():
        leaf, back = stored_leaf(entry[0]), not training or flow.reach_read(*entry)
        if leaf is not None and (back or not leaf.is_trained):
            kept = [ends.get(place, place) for place, is_kept in readers if is_kept or place in ends]
            found[entry] = Use(tuple(dict.fromkeys(place for place, _ in readers)), max(kept, default=-1), back)
    return found


def _readers(graph: Graph, flow: GradientFlow) -> dict[Entry, list[tuple[int, bool]]]:
    """Who reads what in another layout than it is made or stored in, and whether its backward reads it too."""
    operators = operators_of(graph)
    results = [value for value in (*graph.outputs, *(v for _, v in graph.updates)) if isinstance(value, Value)]
    reads = [
        (place, value, i in flow.kept_operands(node))
        for place, node in enumerate(operators)
        for i, value in enumerate(node.inputs)
    ]
    found: dict[Entry, list[tuple[int, bool]]] = {}
    for place, value, is_kept in (*reads, *((len(operators), value, False) for value in results)):
        if origin(value).type.layout != value.type.layout:
            found.setdefault((origin(value), value.type.layout), []).append((place, is_kept))
    return found


def _moving(route: Route) -> list[Step]:
    """The steps of a route that are more than a new label."""
    return [step for step in route.steps if step.kind is not StepKind.RELABEL]


@lru_cache(maxsize=1 << 14)
def _kind_of(
    type: TensorType, layout: Layout, mesh: Mesh, dtypes: tuple[torch.dtype, torch.dtype], regather: bool, trained: bool
) -> BundleKind | None:
    """The kind of a parameter in the dtypes in which it is stored and its gradients are summed up."""
    copied = _copied_axes(type, layout)
    if copied:
        return BundleKind((), mesh.in_order(copied), type.dtype, *dtypes, False, True) if trained else None
    there = reshard(type.shape, type.layout, layout, mesh)
    match _moving(there):
        case [Step(StepKind.ALL_GATHER) as step] if _is_shared_out(step, type, mesh):
            gathered = mesh.in_order(step.axes)
        case _:
            return None
    if not trained:
        return BundleKind(gathered, (), type.dtype, *dtypes, regather, False)
    match _moving(backward_route(there, mesh)):
        case [Step(StepKind.REDUCE_SCATTER) as scatter]:
            summed: tuple[str, ...] = ()
        case [Step(StepKind.REDUCE_SCATTER) as scatter, Step(StepKind.ALL_REDUCE) as reduce]:
            summed = mesh.in_order(reduce.axes)
        case _:
            return None
    if mesh.in_order(scatter.axes) != gathered:
        return None
    return BundleKind(gathered, summed, type.dtype, *dtypes, regather, True)


def _copied_axes(type: TensorType, layout: Layout) -> list[str]:
    """The axes on which a parameter is used as copies of what is stored, when nothing else changes."""
    copied = [axis for axis, placement in layout if isinstance(placement, Copies)]
    kept = tuple(entry for entry in layout if entry[0] not in copied)
    return copied if kept == type.layout else []


def _is_shared_out(step: Step, type: TensorType, mesh: Mesh) -> bool:
    """Whether every member of a group holds a piece, and no two the same."""
    table = movement(step, type.shape, mesh, 0)
    return len(table.receives) == len(table.group)
