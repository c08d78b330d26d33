"""Kinds of operators: what they must share to have the same choices and tables."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from enum import Enum

from conjoin.ir import Leaf, LeafKind, Value
from conjoin.search.exact.choices import Task
from conjoin.search.exact.recompute import Held
from conjoin.sim import Operator, Skeleton


class Source(Enum):
    """Where an operand comes from: another operator, a parameter, or what is the same on every device."""

    MADE = "made"
    TRAINED = "trained"
    FROZEN = "frozen"
    GIVEN = "given"


@dataclass(frozen=True, slots=True)
class Kind:
    """What operators must share to have the same choices and tables."""

    task: Task
    sources: tuple[Source, ...]
    results: tuple[int, ...]
    """Outputs that have to come out whole."""
    left: tuple[int, ...]
    """Outputs that come out as they are made, but for copies and sums."""
    passed: tuple[bool, ...]
    """Through which outputs a gradient comes."""
    shared: tuple[bool, ...]
    """Which operands are parameters that others read too."""
    held: tuple[Held, ...]
    """What is held for the backward pass in every mode of its block; none where memory does not count."""
    _hash: int = field(init=False, compare=False, repr=False)
    """Worked out once: kinds are asked for all the time."""

    def __post_init__(self) -> None:
        told = self.task, self.sources, self.results, self.left, self.passed, self.shared, self.held
        object.__setattr__(self, "_hash", hash(told))

    def __hash__(self) -> int:
        return self._hash


def _kind_of(
    skeleton: Skeleton, operator: Operator, of_weights: bool, out: tuple[Set[int], Set[int]], held: tuple[Held, ...]
) -> Kind:
    roots = [skeleton.roots[root] for root in operator.reads]
    sources = tuple(_source_of(root.leaf) for root in roots)
    types = tuple(type.laid_out(()) for type in operator.node.types)
    task = Task(operator.call, types, operator.needs, tuple(root.leaf is not None for root in roots), of_weights)
    results, left = (tuple(i for i, root in enumerate(operator.makes) if root in some) for some in out)
    passed = tuple(
        any(operand in skeleton.operators[position].needs for position, operand in skeleton.readers[root])
        for root in operator.makes
    )
    shared = tuple(is_shared(skeleton, root) for root in operator.reads)
    return Kind(task, sources, results, left, passed, shared, held)


def kinds_of(
    skeleton: Skeleton, held: Sequence[tuple[Held, ...]] | None = None, *, is_stage: bool = False
) -> list[Kind]:
    """The kind of every operator of a model, or of a stage of one; where memory counts with what each holds."""
    fed = {i for i, root in enumerate(skeleton.roots) if root.leaf is not None and root.leaf.kind is LeafKind.INPUT}
    results = list(zip(skeleton.results, kept_split(skeleton, is_stage), strict=True))
    whole = {root for root, kept in results if not kept}
    left = {root for root, kept in results if kept} if is_stage else set[int]()
    once: dict[Kind, Kind] = {}  # what is the same object need not be compared
    kinds = []
    for operator, mine in zip(skeleton.operators, held or [()] * len(skeleton.operators), strict=True):
        of_inputs = not fed.isdisjoint(operator.reads)
        fed.update(operator.makes if of_inputs else ())
        kind = _kind_of(skeleton, operator, not of_inputs, (whole, left), mine)
        kinds.append(once.setdefault(kind, kind))
    return kinds


def _source_of(leaf: Leaf | None) -> Source:
    if leaf is None:
        return Source.MADE
    if not is_stored(leaf.kind):
        return Source.GIVEN
    return Source.TRAINED if leaf.is_trained else Source.FROZEN


def is_given(leaf: Leaf | None) -> bool:
    return leaf is not None and not is_stored(leaf.kind)


def is_stored(kind: LeafKind) -> bool:
    """Whether it is kept from step to step in a layout that is searched."""
    return kind is LeafKind.PARAMETER


def is_shared(skeleton: Skeleton, root: int) -> bool:
    """Whether it is a parameter that several operators read, or one more than once."""
    leaf = skeleton.roots[root].leaf
    return leaf is not None and is_stored(leaf.kind) and len(skeleton.readers[root]) > 1


def kept_split(skeleton: Skeleton, is_stage: bool = False) -> list[bool]:
    """Which results may stay split: outputs of a model with a loss, or of a stage, but for the loss itself."""
    graph = skeleton.graph
    outputs = [i for i, value in enumerate(graph.outputs) if isinstance(value, Value)]
    of_outputs = [(is_stage or graph.loss is not None) and i != graph.loss for i in outputs]
    makers = [skeleton.roots[root].maker for root in skeleton.results]
    return [
        kept and maker >= 0 for kept, maker in zip([*of_outputs, *(False for _ in graph.updates)], makers, strict=True)
    ]
