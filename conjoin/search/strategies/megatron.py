"""Megatron: pairs of layers split by columns and then rows inside a node, data parallel between.

With `zero1`, `fsdp` or `hsdp` what a group of tensor-parallel devices stores is split once more, over the data-parallel
ones, or with `hsdp` over some of them: the way in which most large language models are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from conjoin.errors import StrategyError, UsageError
from conjoin.ir import Leaf, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import Layout, TensorType, make_layout
from conjoin.search.drafting import Draft
from conjoin.search.facts import Facts
from conjoin.search.groups import Group, make_groups, sizes_left
from conjoin.search.propagation import Flow
from conjoin.search.request import Request
from conjoin.search.strategies.data_parallel import (
    batch_group,
    data_flow,
    hybrid_degrees,
    regathering,
    split_storage,
)
from conjoin.search.strategies.layers import (
    ColumnsThenRows,
    embedding_nodes,
    is_row,
    settle_columns,
    split_layers,
    width_of,
)

STORED = ("zero1", "fsdp", "hsdp")
"""Ways to store parameters in pieces over devices that use them alike."""


def draft_megatron(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """Tensor parallel on the innermost axes, data parallel on the rest."""
    request = _checked(request)
    degrees = _degrees(facts, mesh, request)
    groups = make_groups(mesh, degrees)
    earlier = (data_flow(facts, batch_group(mesh, groups)),)
    flow = _tensor_flow(facts, groups["tp"], request, earlier)
    if groups["tp"].degree > 1 and not flow.stuck and not _num_rows(facts, flow):
        raise _no_pairs(facts, groups["tp"])
    draft = Draft(request.filled(degrees), (*earlier, flow))
    if request.flags.isdisjoint(STORED):
        return draft
    stored = _stored_split(facts, mesh, groups, flow)
    is_regathered = "zero1" not in request.flags and _sharding(groups).degree > 1
    return replace(draft, storage=stored, memory=regathering(stored) if is_regathered else ())


def _checked(request: Request) -> Request:
    """The request, with `hsdp` where degrees of it are given; UsageError where parameters or batch are split twice."""
    given = [key for key in ("shard", "replicate") if key in request.degrees]
    flags = request.flags | ({"hsdp"} if given else set())
    ways = [flag for flag in STORED if flag in flags]
    if len(ways) > 1:
        raise UsageError(
            f"The strategy megatron was given both {' and '.join(ways)}. Each says how parameters are stored: zero1 "
            f"gathers them once a step, fsdp again for the backward pass, hsdp from some devices only. Leave all but "
            f"one of them out."
        )
    if "hsdp" in flags and "dp" in request.degrees:
        raise UsageError(
            f"The strategy megatron was given dp={request.degrees['dp']} and {' and '.join(given) or 'hsdp'}. Both "
            f"split the batch: with hsdp it is split over shard × replicate devices. Leave dp out."
        )
    return replace(request, flags=flags)


def _stored_split(facts: Facts, mesh: Mesh, groups: Mapping[str, Group], flow: Flow) -> dict[Leaf, Layout]:
    """Parameters in pieces over both groups, the tensor-parallel one outside."""
    storage = {}
    last = mesh.rank_at({axis: mesh.sizes[axis] - 1 for axis in groups["tp"].axes})  # its pieces are the smallest
    for leaf in facts.parameters():
        used = make_layout((axis, flow.leaves[leaf]) for axis in groups["tp"].axes)
        piece = TensorType(region_shape(region_of(leaf.type.shape, used, mesh, last)), leaf.type.dtype)
        storage[leaf] = make_layout((*used, *split_storage(piece, _sharding(groups), mesh)))
    return storage


def _sharding(groups: Mapping[str, Group]) -> Group:
    """The devices that share what a group of tensor-parallel ones stores."""
    return groups["shard"] if "shard" in groups else groups["dp"]


def _tensor_flow(facts: Facts, group: Group, request: Request, earlier: tuple[Flow, ...]) -> Flow:
    vocabulary = embedding_nodes(facts) if "vocab" in request.flags else frozenset()
    policy = ColumnsThenRows(sequence="sp" in request.flags, vocabulary=vocabulary)
    return settle_columns(facts, group, policy, earlier)


def _num_rows(facts: Facts, flow: Flow) -> int:
    return sum(is_row(node, flow.rules[node.node]) for node in split_layers(facts, flow))


def _degrees(facts: Facts, mesh: Mesh, request: Request) -> Mapping[str, int]:
    given = request.degrees
    if "hsdp" in request.flags:
        is_told = len(given) > 1  # shard and replicate
        tp = given.get("tp") or (prod(sizes_left(mesh, given)) if is_told else _largest(facts, mesh, request))
        return {"tp": tp, **hybrid_degrees(mesh, given, tp)}
    if "tp" in given:
        return {"tp": given["tp"], "dp": given.get("dp", prod(sizes_left(mesh, {"tp": given["tp"]})))}
    tp = prod(sizes_left(mesh, given)) if given else _largest(facts, mesh, request)
    return {"tp": tp, "dp": mesh.size // tp}


def _largest(facts: Facts, mesh: Mesh, request: Request) -> int:
    """The largest degree, from the axes inside a node, that splits all the layers which the smallest one splits."""
    inside = [axis for axis in mesh.axes if not axis.between_nodes] or list(mesh.axes)
    degrees, degree = [], 1
    for axis in reversed(inside):
        degree *= axis.size
        degrees.append(degree)
    best, most = degrees[0] if degrees else 1, 1
    for degree in degrees:
        group = make_groups(mesh, {"tp": degree, "dp": mesh.size // degree})["tp"]
        found = _num_rows(facts, _tensor_flow(facts, group, request, ()))
        if found < most:
            break
        best, most = degree, found
    return best


def _no_pairs(facts: Facts, group: Group) -> StrategyError:
    widths = [width_of(node) for node in facts.nodes if node.layer is not None]
    return StrategyError(
        f"The layers of {facts.graph.name} were to be split {group.degree} ways ({group}). None of its {len(widths)} "
        f"layers with weights, of at most {max(widths, default=0)} features, can be split by columns and lead to one "
        f"split by rows without a gather between. Choose a lower tp, or data-parallel."
    )
