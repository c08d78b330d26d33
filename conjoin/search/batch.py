"""Which dim of the inputs is the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from conjoin.errors import StrategyError
from conjoin.ir import Graph, Leaf, LeafKind
from conjoin.ops import Placement, Split
from conjoin.search.groups import Group


def split_batch(graph: Graph, group: Group) -> Mapping[Leaf, Placement]:
    """The inputs that have the batch, split along it: the size that the leading dims of most inputs share."""
    if group.degree == 1:
        return {}
    inputs = [leaf for leaf in graph.leaves_of(LeafKind.INPUT) if leaf.type.shape]
    if not inputs:
        raise StrategyError(
            f"The batch of {graph.name} was to be split {group.degree} ways ({group}). The model has no input with a "
            f"dim. Choose a strategy that splits the weights."
        )
    size, _ = Counter(leaf.type.shape[0] for leaf in inputs).most_common(1)[0]
    if size < group.degree:
        raise StrategyError(
            f"The batch of {graph.name} was to be split {group.degree} ways ({group}). It has {size} "
            f"sample{'s' if size != 1 else ''}, the leading dim of {inputs[0].name}, and no device may be left without "
            f"one. Use a batch of at least {group.degree}, or a lower {group.role}."
        )
    return {leaf: Split(0) for leaf in inputs if leaf.type.shape[0] == size}
