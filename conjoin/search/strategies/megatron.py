"""Megatron: pairs of layers split by columns and then rows inside a node, data parallel between.

Tables of words are split by rows, and the layer that scores words by columns, up to the loss, which is taken by parts
(Shoeybi et al., 2019, section 3). Sequences may be split between the two (`cp`, see `context.py`), or alone.

With `zero1`, `fsdp` or `hsdp` what a group of tensor-parallel devices stores is split once more, over those that split
the batch and the sequence, or with `hsdp` over some of them: the way in which most large language models are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from conjoin.errors import StrategyError, UsageError
from conjoin.ir import Leaf, LeafKind, Node, region_of, region_shape
from conjoin.machine import Mesh
from conjoin.ops import Layout, Split, TensorType, make_layout
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts
from conjoin.search.groups import Group, make_groups, sizes_left
from conjoin.search.propagation import Flow
from conjoin.search.request import Request
from conjoin.search.strategies.context import context_flow
from conjoin.search.strategies.data_parallel import (
    batch_group,
    data_flow,
    hybrid_degrees,
    regathering,
    split_storage,
)
from conjoin.search.strategies.experts import check_experts, expert_degree, expert_flow
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
    """Tensor parallel on the innermost axes, then sequences where that is asked for, data parallel on the rest."""
    request = _checked(request)
    degrees = _degrees(facts, mesh, request)
    groups = make_groups(mesh, degrees)
    if "ep" in groups:
        check_experts(facts, request.degrees.get("ep", mesh.size), degrees["ep"])
    flows = [data_flow(facts, batch_group(mesh, groups))]
    if "cp" in groups:
        flows.append(context_flow(facts, groups["cp"], flows, "heads" in request.flags))
    if "ep" in groups:
        flows.append(expert_flow(facts, mesh, groups, tuple(flows)))
    if "tp" in groups:
        flows.append(_tensor_flow(facts, groups["tp"], request, tuple(flows)))
        splits = flows[-1].stuck or _num_rows(facts, flows[-1]) or _is_stage(facts)
        if groups["tp"].degree > 1 and not splits:
            raise _no_pairs(facts, groups["tp"])
    filled = replace(request, degrees=degrees, flags=request.flags - {"expert"})
    draft = Draft(filled, tuple(flows))
    if request.flags.isdisjoint(STORED):
        return draft
    sharding = _sharding(mesh, groups)
    return stored_in_pieces(facts, mesh, draft, sharding, [flow for flow in flows if flow.group.role in ("ep", "tp")])


def _checked(request: Request) -> Request:
    """The request, with `hsdp` where degrees of it are given; UsageError where parameters or batch are split twice."""
    given = [key for key in ("shard", "replicate") if key in request.degrees]
    flags = request.flags | ({"hsdp"} if given else set())
    ways = [flag for flag in STORED if flag in flags]
    if len(ways) > 1:
        raise UsageError(
            f"The strategy {request.name} was given both {' and '.join(ways)}. Each says how parameters are stored: "
            f"zero1 gathers them once a step, fsdp again for the backward pass, hsdp from some devices only. Leave all "
            f"but one of them out."
        )
    if "hsdp" in flags and "dp" in request.degrees:
        raise UsageError(
            f"The strategy {request.name} was given dp={request.degrees['dp']} and {' and '.join(given) or 'hsdp'}. "
            f"Both split the batch: with hsdp it is split over shard × replicate devices. Leave dp out."
        )
    is_split = "cp" in request.degrees or request.name == "context"
    if "ring" in flags and ("heads" in flags or not is_split):
        why = "With heads every device has whole sequences" if "heads" in flags else "No sequence is split without cp"
        raise UsageError(
            f"The strategy {request.name} was given ring: keys and values are to go around between the devices that "
            f"split sequences. {why}. Leave ring out, or write context:cp=2,ring."
        )
    return replace(request, flags=flags)


def stored_in_pieces(facts: Facts, mesh: Mesh, draft: Draft, sharding: Group, inner: Sequence[Flow]) -> Draft:
    """A draft whose parameters are split once more, over devices that use them alike; `inner` flows split them."""
    stored = _stored_split(facts, mesh, sharding, inner)
    is_regathered = "zero1" not in draft.request.flags and sharding.degree > 1
    return replace(draft, storage=stored, memory=regathering(stored) if is_regathered else ())


def _stored_split(facts: Facts, mesh: Mesh, sharding: Group, inner: Sequence[Flow]) -> dict[Leaf, Layout]:
    """Parameters in pieces, as inner groups use them, and once more over devices that use them alike."""
    storage = {}
    for leaf in facts.parameters():
        used = make_layout((axis, flow.leaves[leaf]) for flow in inner for axis in flow.group.axes)
        last = mesh.rank_at({axis: mesh.sizes[axis] - 1 for axis, _ in used})  # its pieces are the smallest
        piece = TensorType(region_shape(region_of(leaf.type.shape, used, mesh, last)), leaf.type.dtype)
        free = tuple(axis for axis in sharding.axes if axis not in dict(used))
        own = Group(sharding.role, free, prod(mesh.sizes[axis] for axis in free))
        storage[leaf] = make_layout((*used, *split_storage(piece, own, mesh)))
    return storage


def _sharding(mesh: Mesh, groups: Mapping[str, Group]) -> Group:
    """The devices that share what a group of tensor-parallel ones stores."""
    some = [groups[role] for role in ("cp", "ep", "shard" if "shard" in groups else "dp") if role in groups]
    axes = mesh.in_order(axis for group in some for axis in group.axes)
    return Group(" × ".join(group.role for group in some), axes, prod(group.degree for group in some))


def _tensor_flow(facts: Facts, group: Group, request: Request, earlier: tuple[Flow, ...]) -> Flow:
    policy = ColumnsThenRows(
        sequence="sp" in request.flags, vocabulary=embedding_nodes(facts), at_once=request.chunks > 1
    )
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
    """All degrees, the innermost first: what is left out is the batch's, or else what the strategy is about."""
    given = request.degrees
    inner = {role: given[role] for role in ("tp", "cp", "ep") if role in given}
    own = _OWN[request.name]
    is_told = {"shard", "replicate"} <= given.keys() or "dp" in given
    if own not in given:
        is_left = is_told or own == "cp" or not {"cp", "ep"}.isdisjoint(given)
        rest = prod(sizes_left(mesh, given)) if is_left and own != "ep" else 0
        inner[own] = rest or _chosen(own, facts, mesh, request, is_told)
    if "expert" in request.flags and "ep" not in inner:
        inner["ep"] = expert_degree(facts, mesh, {**given, **inner})
    inner = {role: inner[role] for role in ("tp", "cp", "ep") if role in inner}
    if "hsdp" in request.flags:
        return {**inner, **hybrid_degrees(mesh, given, inner)}
    return {**inner, "dp": given.get("dp", prod(sizes_left(mesh, inner)))}


_OWN = {"megatron": "tp", "context": "cp", "expert": "ep"}
"""What each strategy is about."""


def _chosen(own: str, facts: Facts, mesh: Mesh, request: Request, is_told: bool) -> int:
    """The degree of what a strategy is about, where it was not given."""
    if own == "tp":
        return _largest(facts, mesh, request)
    return prod(sizes_left(mesh, request.degrees)) if is_told else expert_degree(facts, mesh, request.degrees)


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


def _is_stage(facts: Facts) -> bool:
    """Whether a graph goes on from another stage: it may begin or end between the layers of a pair."""
    return any(leaf.trainable for leaf in facts.graph.leaves_of(LeafKind.INPUT))


def _no_pairs(facts: Facts, group: Group) -> StrategyError:
    widths = [width_of(node) for node in facts.nodes if node.layer is not None]
    return StrategyError(
        f"The layers of {facts.graph.name} were to be split {group.degree} ways ({group}). None of its {len(widths)} "
        f"layers with weights, of at most {max(widths, default=0)} features, can be split by columns and lead to one "
        f"split by rows without a gather between. Choose a lower tp, or data-parallel."
    )
