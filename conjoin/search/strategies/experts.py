"""Expert parallel: each device has some of the experts, and all else is data parallel over the same devices.

Where experts have slots, as in GShard (Lepikhin et al., 2020), rows go to their experts and back by all-to-all,
S(batch) -> S(experts). Where no row is dropped (Gale et al., 2022), nobody knows how many rows an expert gets: rows are
gathered, every device computes those of its own experts, and the sums are scattered, S -> B and P -> S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from conjoin.errors import StrategyError
from conjoin.machine import Mesh
from conjoin.ops import Copies, Partial, Placement, ShardingRule, Split
from conjoin.search.batch import split_batch
from conjoin.search.drafting import Draft
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.groups import Group, make_groups, products, sizes_left
from conjoin.search.propagation import Flow, Rules, follow, propagate
from conjoin.search.request import Request
from conjoin.search.strategies.data_parallel import data_flow
from conjoin.search.strategies.layers import legal_of


def draft_experts(facts: Facts, mesh: Mesh, request: Request) -> Draft:
    """Experts over the innermost axes, the batch over all of them."""
    numbers = [_num_experts(node) for node in facts.nodes if node.experts]
    degrees = _degrees(mesh, request, min(numbers, default=1))
    groups = make_groups(mesh, degrees)
    ep = groups["ep"]
    asked = request.degrees.get("ep", mesh.size)
    if asked > 1 and (not numbers or ep.degree > min(numbers)):
        raise _too_few(facts, asked, numbers)
    inputs = split_batch(facts.graph, Group("ep × dp", mesh.names, mesh.size))
    outer = data_flow(facts, groups["dp"])
    inputs = inputs if ep.degree > 1 else {}
    plain = propagate(facts, ep, inputs, follow, (outer,))
    return Draft(request.filled(degrees), (outer, propagate(facts, ep, inputs, ToExperts(plain), (outer,))))


@dataclass(frozen=True, slots=True)
class ToExperts:
    """Experts are split; what only they have touched goes on as they left it, and all else as data parallel has it."""

    plain: Flow
    """Data parallel on the same axes."""

    def __call__(self, facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> Rules:
        """The ways considered at a node."""
        ways = legal_of(facts.experts, legal) or _passing(facts, arriving, legal)
        if ways:
            return ways
        usual = self.plain.rules[facts.node]
        splits = [
            (placement, wanted)
            for placement, wanted, of_weights in zip(arriving, usual.operands, facts.weights, strict=True)
            if isinstance(placement, Split) and not of_weights
        ]
        is_theirs = bool(splits) and all(placement != wanted for placement, wanted in splits)
        return follow(facts, arriving, legal) if is_theirs or usual not in legal else [usual]


def _passing(facts: NodeFacts, arriving: tuple[Placement, ...], legal: Rules) -> list[ShardingRule]:
    """The ways that pass sums on, as those of a row's experts are weighed and added up: less is left to be scattered.

    What they are multiplied with is gathered where it is smaller than they are.
    """
    sums = [placement == Partial() for placement in arriving]
    sizes = [value.type.num_elements for value in facts.inputs]
    summed = sum(size for size, is_sum in zip(sizes, sums, strict=True) if is_sum)
    others = sum(size for size, is_sum in zip(sizes, sums, strict=True) if not is_sum)
    if not any(sums) or others >= summed or sum(type.num_elements for type in facts.node.types) > summed:
        return []
    wanted = tuple(Partial() if is_sum else Copies() for is_sum in sums)
    return [rule for rule in legal if rule.operands == wanted and set(rule.outputs) == {Partial()}]


def _num_experts(node: NodeFacts) -> int:
    (index,) = {rule.index for rule in node.experts}
    assert index is not None, "experts are split along an index"
    return node.sizes[index]


def _degrees(mesh: Mesh, request: Request, num_experts: int) -> Mapping[str, int]:
    """What was asked for; else as many devices as there are experts, from the innermost."""
    given = request.degrees
    if "ep" in given:
        return {"ep": given["ep"], "dp": given.get("dp", prod(sizes_left(mesh, {"ep": given["ep"]})))}
    if "dp" in given:
        return {"ep": prod(sizes_left(mesh, given)), "dp": given["dp"]}
    ep = max(degree for degree in products([axis.size for axis in mesh.axes]) if degree <= num_experts)
    return {"ep": ep, "dp": mesh.size // ep}


def _too_few(facts: Facts, degree: int, numbers: list[int]) -> StrategyError:
    if not numbers:
        return StrategyError(
            f"The experts of {facts.graph.name} were to be split over {degree} devices. None of its "
            f"{len(facts.nodes)} operators multiplies data with a matrix for each of several experts. Choose "
            f"data-parallel, or stack the weights of experts along their first dim."
        )
    return StrategyError(
        f"The experts of {facts.graph.name} were to be split over {degree} devices. The smallest of its {len(numbers)} "
        f"layers of experts has {min(numbers)} of them, and no device may be left without one. Ask for "
        f"ep={min(numbers)} or less, and for more dp."
    )
