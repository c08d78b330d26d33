"""Which dims of the inputs are the batch and the sequence.

The batch is the first dim, as a rule; torch's own transformers have positions there and samples behind them, unless
they are told otherwise (`batch_first=True`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
    size = _shared_size(inputs, 0)
    if size < group.degree:
        raise StrategyError(
            f"The batch of {graph.name} was to be split {group.degree} ways ({group}). It has {size} "
            f"sample{'s' if size != 1 else ''}, the leading dim of {inputs[0].name}, and no device may be left without "
            f"one. Use a batch of at least {group.degree}, or a lower {group.role}."
        )
    return {leaf: Split(0) for leaf in inputs if leaf.type.shape[0] == size}


def split_second_dims(graph: Graph, group: Group) -> Mapping[Leaf, Placement]:
    """The inputs split along the size that their second dims share, as if samples stood behind positions there; those
    that have it first only, as lengths of sequences, along that. Nothing where it is too short."""
    inputs = [leaf for leaf in graph.leaves_of(LeafKind.INPUT) if leaf.type.shape]
    behind = [leaf for leaf in inputs if len(leaf.type.shape) > 1]
    size = _shared_size(behind, 1) if behind else 0
    if size < group.degree:
        return {}
    second = {leaf: Split(1) for leaf in behind if leaf.type.shape[1] == size}
    return {**{leaf: Split(0) for leaf in inputs if leaf.type.shape[0] == size}, **second}


def check_samples(graph: Graph) -> None:
    """Refuse to train on nothing."""
    inputs = [leaf for leaf in graph.leaves_of(LeafKind.INPUT) if leaf.type.shape]
    if graph.training and inputs and _shared_size(inputs, 0) == 0:
        raise StrategyError(
            f"{graph.name} was to be trained on one device. Its batch has 0 samples, the leading dim of "
            f"{inputs[0].name}. Use a batch of at least 1."
        )


def split_sequences(graph: Graph, group: Group) -> Mapping[Leaf, Placement]:
    """The inputs that have the sequence, split along it: the size that the second dims of most inputs share."""
    if group.degree == 1:
        return {}
    inputs = [leaf for leaf in graph.leaves_of(LeafKind.INPUT) if len(leaf.type.shape) > 1]
    if not inputs:
        raise StrategyError(
            f"The sequences of {graph.name} were to be split {group.degree} ways ({group}). None of its inputs "
            f"has a second dim. Choose data-parallel, or megatron."
        )
    size = _shared_size(inputs, 1)
    if size < group.degree:
        raise StrategyError(
            f"The sequences of {graph.name} were to be split {group.degree} ways ({group}). They are {size} "
            f"long, the second dim of {inputs[0].name}, and no device may be left without a part. Choose cp={size} or "
            f"lower."
        )
    return {leaf: Split(1) for leaf in inputs if leaf.type.shape[1] == size}


def _shared_size(inputs: Sequence[Leaf], dim: int) -> int:
    """How long most inputs are along a dim."""
    return Counter(leaf.type.shape[dim] for leaf in inputs).most_common(1)[0][0]
