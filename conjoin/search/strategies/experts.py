"""Expert parallel: each device has some of the experts, and all else is data parallel over the same devices.

Where experts have slots, as in GShard (Lepikhin et al., 2020), rows go to their experts and back by all-to-all,
S(batch) -> S(experts). Where no row is dropped (Gale et al., 2022), nobody knows how many rows an expert gets: they are
sent as they come (`routes.py`), or where that sends no less rows are gathered, every device computes those of its own
experts, and the sums are scattered, S -> B and P -> S.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from conjoin.errors import StrategyError
from conjoin.machine import Mesh
from conjoin.ops import Copies, Partial, Placement, ShardingRule, Split
from conjoin.search.batch import split_batch
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.groups import Group, products, sizes_left
from conjoin.search.propagation import Flow, Rules, follow, propagate
from conjoin.search.strategies.layers import legal_of

OF_BATCH = ("ep", "dp", "shard", "replicate")
"""Roles of devices that have different samples."""


def expert_flow(facts: Facts, mesh: Mesh, groups: Mapping[str, Group], earlier: Sequence[Flow]) -> Flow:
    """Experts over the devices of a group, which split the batch too, inside those that split nothing else."""
    group = groups["ep"]
    axes = {axis for role in OF_BATCH if role in groups for axis in groups[role].axes}
    whole = Group("ep × dp", mesh.in_order(axes), prod(mesh.sizes[axis] for axis in axes))
    inputs = split_batch(facts.graph, whole) if group.degree > 1 else {}
    plain = propagate(facts, group, inputs, follow, earlier)
    return propagate(facts, group, inputs, ToExperts(plain), earlier)


def expert_degree(facts: Facts, mesh: Mesh, given: Mapping[str, int]) -> int:
    """Over how many devices experts are split: as many as there are experts, of those that other degrees leave."""
    most = min(_numbers(facts), default=1)
    return max(degree for degree in products(sizes_left(mesh, given)) if degree <= most)


def check_experts(facts: Facts, asked: int, degree: int) -> None:
    """Refuse where a device would have no expert, and models that have none."""
    numbers = _numbers(facts)
    if asked > 1 and (not numbers or degree > min(numbers)):
        raise _too_few(facts, asked, numbers)


def _numbers(facts: Facts) -> list[int]:
    return [_num_experts(node) for node in facts.nodes if node.experts]


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
    """As many as matrices are stacked: the index of rows that are sent to them is that of the rows."""
    shapes = [value.type.shape for value in node.inputs]
    stacked = {
        shapes[i][0]
        for rule in node.experts
        for i, placement in enumerate(rule.operands)
        if node.weights[i] and placement == Split(0) and len(shapes[i]) == 3
    }
    (number,) = stacked
    return number


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
