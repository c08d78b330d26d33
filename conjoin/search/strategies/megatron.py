"""Megatron: pairs of layers split by columns and then rows inside a node, data parallel between.

Tables of words are split by rows, and the layer that scores words by columns, up to the loss, which is taken by parts
(Shoeybi et al., 2019, section 3).

With `zero1` or `fsdp` what a group of tensor-parallel devices stores is split once more, over the data-parallel ones:
the way in which most large language models are trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

from conjoin.errors import StrategyError, UsageError
from conjoin.ir import REGATHER, MemoryAction, Node, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import Split, TensorType, make_layout
from conjoin.search.drafting import Draft
from conjoin.search.facts import Facts
from conjoin.search.groups import Group, make_groups, sizes_left
from conjoin.search.propagation import Flow
from conjoin.search.request import Request
from conjoin.search.strategies.data_parallel import data_flow, split_storage
from conjoin.search.strategies.layers import (
    ColumnsThenRows,
    embedding_nodes,
    is_row,
    settle_columns,
    split_layers,
    width_of,
)


def draft_megatron(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """Tensor parallel on the innermost axes, data parallel on the rest."""
    degrees = _degrees(facts, mesh, request)
    groups = make_groups(mesh, degrees)
    earlier = (data_flow(facts, groups["dp"]),)
    flow = _tensor_flow(facts, groups["tp"], request, earlier)
    if groups["tp"].degree > 1 and not flow.stuck and not _num_rows(facts, flow):
        raise _no_pairs(facts, groups["tp"])
    draft = Draft(request.filled(degrees), (*earlier, flow))
    return replace(draft, **_stored_split(facts, mesh, groups, flow, request)) if request.flags & _STORED else draft


_STORED = frozenset({"zero1", "fsdp"})


def _stored_split(
    facts: Facts, mesh: Mesh, groups: Mapping[str, Group], flow: Flow, request: Request
) -> dict[str, Any]:
    """Parameters in pieces over both groups, the tensor-parallel one outside."""
    if request.flags >= _STORED:
        raise UsageError(
            "The strategy megatron was given both zero1 and fsdp. The first gathers parameters once a step, the other "
            "again for the backward pass. Leave one of them out."
        )
    storage = {}
    last = mesh.rank_at({axis: mesh.sizes[axis] - 1 for axis in groups["tp"].axes})  # its pieces are the smallest
    for leaf in facts.parameters():
        used = make_layout((axis, flow.leaves[leaf]) for axis in groups["tp"].axes)
        piece = TensorType(region_shape(region_of(leaf.type.shape, used, mesh, last)), leaf.type.dtype)
        storage[leaf] = make_layout((*used, *split_storage(piece, groups["dp"], mesh)))
    if "fsdp" not in request.flags or groups["dp"].degree == 1:
        return {"storage": storage}
    return {"storage": storage, "memory": tuple(MemoryAction(REGATHER, leaf.name) for leaf in storage if storage[leaf])}


def _tensor_flow(facts: Facts, group: Group, request: Request, earlier: tuple[Flow, ...]) -> Flow:
    policy = ColumnsThenRows(sequence="sp" in request.flags, vocabulary=embedding_nodes(facts))
    flow = settle_columns(facts, group, policy, earlier)
    gathered = {node for node in policy.vocabulary if _is_gathered(facts, flow, node)}
    if not gathered:
        return flow
    return settle_columns(facts, group, replace(policy, vocabulary=policy.vocabulary - gathered), earlier)


def _is_gathered(facts: Facts, flow: Flow, lookup: Node) -> bool:
    """Whether a table is split for a lookup and would be gathered for a layer that reads it too."""
    tables = [value for value in lookup.inputs if isinstance(flow.placements[value], Split)]
    readers = [(facts.by_node[node], value) for value in tables for node in facts.graph.users[value]]
    return any(
        node.layer is not None and flow.rules[node.node].operands[node.inputs.index(value)] != flow.placements[value]
        for node, value in readers
    )


def _num_rows(facts: Facts, flow: Flow) -> int:
    return sum(is_row(node, flow.rules[node.node]) for node in split_layers(facts, flow))


def _degrees(facts: Facts, mesh: Mesh, request: Request) -> Mapping[str, int]:
    given = request.degrees
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
