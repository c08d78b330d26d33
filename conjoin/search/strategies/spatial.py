"""Spatial parallelism: images are split along height and width; windows read a halo from their neighbours.

What arrives split along space stays so; where an operator needs space whole, or it became too small, it is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from conjoin.errors import StrategyError
from conjoin.ir import Leaf, LeafKind
from conjoin.machine import Mesh
from conjoin.ops import Placement, Split
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.groups import Group, deal, make_groups, sizes_left
from conjoin.search.propagation import Flow, Rules, follow, propagate
from conjoin.search.request import Request
from conjoin.search.strategies.data_parallel import data_flow

_DIMS = {"h": 2, "w": 3}


def keep_or_gather(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
    """What arrives split stays split as it is, or is gathered; it is never exchanged for another split."""
    kept = follow(facts, arriving, legal)
    is_kept = all(p == rule.operands[i] for rule in kept for i, p in enumerate(arriving) if isinstance(p, Split))
    return kept if is_kept else [rule for rule in legal if rule.index is None]


def draft_spatial(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """Width on the innermost axes, then height, the batch on the rest."""
    degrees = _degrees(mesh, request.degrees)
    groups = make_groups(mesh, {role: degrees[role] for role in ("w", "h", "dp")})
    flows = [data_flow(facts, groups["dp"])]
    for role in "h", "w":
        if groups[role].degree > 1:
            flow = propagate(facts, groups[role], _split_images(facts, groups[role]), keep_or_gather, flows)
            _check_convolutions(facts, flow)
            flows.append(flow)
    return Draft(request.filled({role: degree for role, degree in degrees.items() if degree > 1}), tuple(flows))


def _degrees(mesh: Mesh, given: Mapping[str, int]) -> dict[str, int]:
    """What is left out: all of it the batch's once height or width is given; else axes between nodes are."""
    if "h" in given or "w" in given:
        space = {"h": given.get("h", 1), "w": given.get("w", 1)}
        return {**space, "dp": given.get("dp", prod(sizes_left(mesh, {"w": space["w"], "h": space["h"]})))}
    inside = [axis.size for axis in mesh.axes if not axis.between_nodes]
    dp = given.get("dp", mesh.size // prod(inside))
    return {**deal(sizes_left(mesh, {"dp": dp}) if "dp" in given else inside, ("h", "w")), "dp": dp}


def _split_images(facts: Facts, group: Group) -> dict[Leaf, Placement]:
    dim = _DIMS[group.role]
    inputs = facts.graph.leaves_of(LeafKind.INPUT)
    images = [leaf for leaf in inputs if len(leaf.type.shape) == 4 and leaf.type.dtype.is_floating_point]
    if not images:
        raise StrategyError(
            f"The images of {facts.graph.name} were to be split {group.degree} ways ({group}). None of its "
            f"{len(inputs)} inputs is an image: a float tensor of samples, channels, height and width. Choose "
            f"data-parallel, or megatron."
        )
    largest = max(leaf.type.shape[dim] for leaf in images)
    if largest < group.degree:
        raise StrategyError(
            f"The images of {facts.graph.name} were to be split {group.degree} ways ({group}). They are {largest} "
            f"long there, and no device may be left without a part. Choose {group.role}={largest} or lower."
        )
    return {leaf: Split(dim) for leaf in images if leaf.type.shape[dim] >= group.degree}


def _check_convolutions(facts: Facts, flow: Flow) -> None:
    convolutions = [node for node in facts.nodes if node.is_convolution]
    if any(flow.rules[node.node].index is not None for node in convolutions):
        return
    raise StrategyError(
        f"The images of {facts.graph.name} were to be split {flow.group.degree} ways ({flow.group}). None of its "
        f"{len(convolutions)} convolutions can be: what they make is shorter than {flow.group.degree}. Choose a lower "
        f"{flow.group.role}, or data-parallel."
    )
