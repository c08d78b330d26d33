"""Which parameters are used in other layouts than stored, by whom, and the bundles in which they travel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from conjoin.comm import BundleSizes, Entry, ParameterBundle, Use, bundle_parameters
from conjoin.ir import Choice, Segment, Value, make_node, retype
from conjoin.ops import Layout
from conjoin.sim.fragments import Drafts
from conjoin.sim.skeleton import Skeleton

ParameterUse = tuple[tuple[int, int], int, Entry, Use]
"""The first operator and operand that read a parameter in a layout, its number, parameter and layout, and the use."""
FoundBundles = tuple[tuple[ParameterBundle, ...], Mapping[Value, int]]
"""Bundles, and the numbers of the parameters in them."""


class ParameterUses:
    """The uses of the parameters of a step in some layouts."""

    def __init__(
        self, skeleton: Skeleton, choices: Sequence[Choice], leaves: Mapping[int, Layout], again: Sequence[Segment]
    ) -> None:
        self._skeleton, self._choices, self._leaves, self._cast_from = skeleton, choices, leaves, skeleton.casts
        self._ends = {position: last for first, last in again for position in range(first, last + 1)}

    def all(self) -> dict[int, list[ParameterUse]]:
        """Of every parameter, and of what some are cast to."""
        return {root: self.find(root) for root in (*self._skeleton.parameters, *self._cast_from)}

    def find(self, root: int) -> list[ParameterUse]:
        """In which other layouts than stored a parameter is used, and where, as far as it may be in a bundle."""
        own, operators, ends = self._layout_of(root), self._skeleton.operators, self._ends
        if root in self._cast_from and self._layout_of(self._cast_from[root]) != own:
            return []
        found: dict[Layout, list[tuple[int, int]]] = {}
        for position, operand in self._skeleton.readers[root]:
            wanted = self._choices[position].operands[operand]
            if wanted != own:
                found.setdefault(wanted, []).append((position, operand))
        uses: list[ParameterUse] = []
        for layout, readers in found.items():
            kept = [position for position, operand in readers if operand in operators[position].keeps]
            kept += [ends[position] for position, _ in readers if position in ends]
            back = any(operand in operators[position].needs for position, operand in readers)
            if not back and self._skeleton.graph.training and self._is_trained(root):
                continue
            use = Use(tuple(dict.fromkeys(position for position, _ in readers)), max(kept, default=-1), back)
            uses.append((readers[0], root, (self._stored(root, own), layout), use))
        return uses

    def _layout_of(self, root: int) -> Layout:
        maker = self._skeleton.roots[root].maker
        return self._leaves[root] if maker < 0 else self._choices[maker].outputs[self._skeleton.outputs[root]]

    def _is_trained(self, root: int) -> bool:
        leaf = self._skeleton.roots[self._cast_from.get(root, root)].leaf
        return leaf is not None and leaf.is_trained

    def _stored(self, root: int, layout: Layout) -> Value:
        """A parameter as it is stored, or what it is cast to there."""
        if root in self._cast_from:
            made = self._skeleton.roots[root]
            node, source = self._skeleton.operators[made.maker].node, self._stored(self._cast_from[root], layout)
            args, types = (source, *node.args[1:]), (made.type.laid_out(layout),)
            return Value(make_node(node.op, args, types, occurrence=node.occurrence))
        leaf = self._skeleton.roots[root].leaf
        assert leaf is not None
        return Value(retype(leaf, leaf.type.laid_out(layout)))


def bundle_uses(
    uses: Mapping[int, Sequence[ParameterUse]],
    skeleton: Skeleton,
    drafts: Drafts,
    regathered: frozenset[str],
    again: Sequence[Segment],
) -> FoundBundles:
    """The bundles of some uses."""
    found = sorted((item for some in uses.values() for item in some), key=lambda item: item[0])
    sizes = BundleSizes(drafts.bundle_bytes, skeleton.graph.rounding)
    entries = {entry: use for _, _, entry, use in found}
    bundles = bundle_parameters(entries, drafts.mesh, sizes, regathered, again)
    return bundles, {entry[0]: root for _, root, entry, _ in found}
