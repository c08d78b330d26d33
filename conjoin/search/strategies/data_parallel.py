"""The batch is split: data parallel, ZeRO-1 and fully sharded data parallel, which also split what is stored.

Stored split, a parameter is gathered for use (S -> B), so its gradient comes back by reduce-scatter (P -> S): gradients
are then always in pieces, and ZeRO-1 and ZeRO-2 (Rajbhandari et al., 2020) are one plan. Under `fsdp` (ZeRO-3) the
gathered parameter is dropped after the forward pass and gathered again. Under `hsdp` (FSDP's hybrid sharding, Zhao et
al., 2023, section 3.2.2) it is split over some axes only and held alike over the others: gradients are
reduce-scattered inside (P -> S), and their pieces all-reduced across (P -> I).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType

from conjoin.errors import StrategyError
from conjoin.ir import REGATHER, Leaf, MemoryAction, Node, Value, is_whole
from conjoin.machine import Mesh
from conjoin.ops import Layout, Partial, Placement, ShardingRule, Split, TensorType, make_layout
from conjoin.search.batch import check_samples, split_batch, split_second_dims
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts
from conjoin.search.groups import Group, make_groups, sizes_left
from conjoin.search.propagation import Flow, follow, propagate
from conjoin.search.request import Request
from conjoin.search.strategies.context import with_flattened


def data_group(mesh: Mesh, request: Request) -> Group:
    """All axes: the batch is split over the whole machine."""
    return make_groups(mesh, {"dp": request.degrees.get("dp", mesh.size)})["dp"]


def data_flow(facts: Facts, group: Group) -> Flow:
    """The batch runs through the graph; weights are replicated where they meet it.

    Samples stand in the first dim, or in the second where they go through the graph apart from each other there, and
    what is in the first does not, or not in all inputs: then those are positions, which attention would gather.
    """
    first = split_batch(facts.graph, group)
    flow = propagate(facts, group, first, follow)
    second = split_second_dims(facts.graph, group) if group.degree > 1 else {}
    found = [leaf for leaf in second if not is_whole(leaf)]
    if not found or (len(first) >= len(found) and not _is_moved(flow)):
        return flow
    other = with_flattened(facts, propagate(facts, group, second, follow))
    return flow if _is_moved(other) else other


def _is_moved(flow: Flow) -> bool:
    """Whether activations that are split, or sums of them, are wanted otherwise by a node that they come to."""
    read = (pair for node, rule in flow.rules.items() if node not in flow.stuck for pair in _reads(node, rule))
    return any(
        isinstance(flow.placements[value], Split | Partial) and wanted != flow.placements[value]
        for value, wanted in read
        if _is_activation(value)
    )


def _reads(node: Node, rule: ShardingRule) -> Iterable[tuple[Value, Placement]]:
    return zip(node.inputs, rule.operands, strict=True)


def _is_activation(value: Value) -> bool:
    """Whether a value is no single number, nor such as targets and masks, which cost little to move."""
    return bool(value.type.shape) and (value.type.dtype.is_floating_point or value.type.dtype.is_complex)


def draft_single(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """One device does everything."""
    if mesh.size != 1:
        raise StrategyError(
            f"The strategy single was asked for on {mesh.size} devices. It runs on one, and the others would stand "
            f"idle. Choose data-parallel, or a machine of one device."
        )
    check_samples(facts.graph)
    return Draft(request, ())


def draft_data_parallel(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """The batch is split, weights are stored whole."""
    group = data_group(mesh, request)
    return Draft(request.filled({"dp": group.degree}), (data_flow(facts, group),))


def draft_zero1(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """The batch is split, weights are stored split and gathered once for each step."""
    group = data_group(mesh, request)
    stored = {leaf: split_storage(leaf.type, group, mesh) for leaf in facts.parameters()}
    return Draft(request.filled({"dp": group.degree}), (data_flow(facts, group),), stored)


def draft_fsdp(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """As zero1, but weights are gathered again for the backward pass."""
    draft = draft_zero1(facts, mesh, request)
    return replace(draft, memory=regathering(draft.storage))


def draft_hsdp(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """As fsdp, but weights are stored split over the shard axes only, the innermost."""
    degrees = hybrid_degrees(mesh, request.degrees)
    groups = make_groups(mesh, degrees)
    stored = {leaf: split_storage(leaf.type, groups["shard"], mesh) for leaf in facts.parameters()}
    flow = data_flow(facts, batch_group(mesh, groups))
    return Draft(request.filled(degrees), (flow,), stored, regathering(stored))


def hybrid_degrees(
    mesh: Mesh, given: Mapping[str, int], inner: Mapping[str, int] = MappingProxyType({})
) -> dict[str, int]:
    """How far weights are split and how often they are held: split over what inner degrees leave of a node, or over
    all where that is nothing."""
    if "shard" in given:
        shard = given["shard"]
    elif "replicate" in given:  # the other axes, whichever they are
        shard = prod(sizes_left(mesh, {**inner, "replicate": given["replicate"]}))
    else:
        inside = prod(axis.size for axis in mesh.axes if not axis.between_nodes)
        taken = prod(inner.values())
        shard = inside // taken if inside > taken and inside % taken == 0 else mesh.size // taken
    return {"shard": shard, "replicate": given.get("replicate", prod(sizes_left(mesh, {**inner, "shard": shard})))}


def batch_group(mesh: Mesh, groups: Mapping[str, Group]) -> Group:
    """The axes that split the batch, whatever else they do."""
    some = [group for role, group in groups.items() if role in ("dp", "shard", "replicate")]
    if len(some) == 1:
        return some[0]
    axes = mesh.in_order({axis for group in some for axis in group.axes})
    return Group(" × ".join(group.role for group in some), axes, prod(group.degree for group in some))


def regathering(stored: Mapping[Leaf, Layout]) -> tuple[MemoryAction, ...]:
    """Parameters in pieces are dropped after the forward pass and gathered again."""
    return tuple(MemoryAction(REGATHER, leaf.name) for leaf, layout in stored.items() if layout)


def split_storage(type: TensorType, group: Group, mesh: Mesh) -> Layout:
    """Where a parameter is stored: split along a dim that divides well, the first if it does, else the largest.

    A parameter with no dim that is long enough is split over as many of the innermost axes as its largest dim allows.

    >>> import torch
    >>> mesh = Mesh.of_nodes(1, 4)
    >>> group = Group("dp", mesh.names, 4)
    >>> for shape in (8, 3), (3, 8), (5, 3), (2, 3), (1,):
    ...     print(TensorType(shape, torch.float32, split_storage(TensorType(shape, torch.float32), group, mesh)))
    f32[8,3]{d0:S(0),d1:S(0)}
    f32[3,8]{d0:S(1),d1:S(1)}
    f32[5,3]{d0:S(0),d1:S(0)}
    f32[2,3]{d1:S(1)}
    f32[1]
    """
    if not type.shape:
        return ()
    dims = sorted(range(len(type.shape)), key=lambda dim: (dim > 0, -type.shape[dim]))
    even = [dim for dim in dims if type.shape[dim] % group.degree == 0 and type.shape[dim] > 0]
    enough = [dim for dim in dims if type.shape[dim] >= group.degree]
    if even or enough:
        dim = (even or enough)[0]
        return make_layout((axis, Split(dim)) for axis in group.axes)
    dim = max(dims, key=lambda d: type.shape[d])
    axes, ways = [], 1
    for axis in reversed(group.axes):
        if ways * mesh.sizes[axis] <= type.shape[dim]:
            axes.append(axis)
            ways *= mesh.sizes[axis]
    return make_layout((axis, Split(dim)) for axis in reversed(axes))
