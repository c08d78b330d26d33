"""What is made of parameters alone, once for all micro-batches of a step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from conjoin.ir import Choice, LeafKind
from conjoin.ops import Layout
from conjoin.sim.skeleton import Operator, Skeleton


def reads_stored(skeleton: Skeleton, operator: Operator) -> bool:
    """Whether an operator reads parameters and nothing but what is stored."""
    leaves = [skeleton.roots[root].leaf for root in operator.reads]
    kinds = {None if leaf is None else leaf.kind for leaf in leaves}
    return LeafKind.PARAMETER in kinds and not kinds & {None, LeafKind.INPUT}


@dataclass(frozen=True, slots=True)
class HeldForStep:
    """Leaves that stay as they are for all micro-batches: not what comes in bundles, or is gathered at every use."""

    skeleton: Skeleton
    leaves: Mapping[int, Layout]
    bundled: Mapping[int, Collection[Layout]]
    regathered: frozenset[str]

    def made_once(self, choices: Sequence[Choice], casts: frozenset[int]) -> frozenset[int]:
        """The operators that make something of parameters alone, but for those that bundles cast for."""
        updated, once, depending = {name for name, _ in self.skeleton.graph.updates}, set[int](), set[int]()
        for position, operator in enumerate(self.skeleton.operators):
            if position in casts or position in self.skeleton.draws or not operator.reads:
                continue
            wanted = zip(operator.reads, choices[position].operands, strict=True)
            if all(self._is_held(root, layout, once, updated) for root, layout in wanted):
                once.add(position)
                if any(self._is_of_parameters(root, depending) for root in operator.reads):
                    depending.add(position)
        return frozenset(depending)

    def _is_held(self, root: int, layout: Layout, once: set[int], updated: set[str]) -> bool:
        maker, leaf = self.skeleton.roots[root].maker, self.skeleton.roots[root].leaf
        if leaf is None:
            return maker in once
        moves = layout != self.leaves[root]
        is_stored = leaf.kind is not LeafKind.INPUT and not (leaf.kind is LeafKind.BUFFER and leaf.name in updated)
        return is_stored and not (moves and (layout in self.bundled.get(root, ()) or leaf.name in self.regathered))

    def _is_of_parameters(self, root: int, depending: set[int]) -> bool:
        leaf = self.skeleton.roots[root].leaf
        return self.skeleton.roots[root].maker in depending if leaf is None else leaf.kind is LeafKind.PARAMETER
