"""Weights that a model keeps in one tensor and cuts before it uses them, stored each by itself: query, key and value.

    q, k, v = split(w);  linear(x, q), …    becomes    linear(x, w[0:e]), linear(x, w[e:2e]), …

Cut from a tensor that every device has whole, the weights of a device's heads are 1/n of it, and the rest lies there
for nothing, with its gradient and the optimizer's state. As *sections* of the tensor (`ir/sections.py`) they are split.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from conjoin.ir import (
    Graph,
    Leaf,
    LeafKind,
    Node,
    Rewriting,
    Value,
    by_tensor,
    drop_unused,
    permutation,
    retype,
    section_of,
    stored_alike,
)
from conjoin.machine import Mesh
from conjoin.ops import CAST, Split
from conjoin.search.fused_layers import find_cut
from conjoin.search.propagation import Flow
from conjoin.sim import Layouts

_CUTS = ("split.Tensor", "split_with_sizes", "split.sizes", "chunk", "slice.Tensor")
_AS_IT_IS = (CAST, "contiguous")
"""What makes of every element of a weight one in its place."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where what is made of a weight is cut: what was done to it before, and the parts, each with its length."""

    way: tuple[Node, ...]
    dim: int
    """That is cut, of the weight itself."""
    parts: tuple[tuple[Value, int], ...]

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        return self.dim, tuple(size for _, size in self.parts)


def find_packed(graph: Graph, node: Node) -> Leaf | None:
    """The parameter that a node cuts, where all who read it cut it in the same places."""
    if node.op not in _CUTS:
        return None
    value = node.args[0]
    while isinstance(value.owner, Node) and _keeps_elements(value.owner):
        value = value.owner.args[0]
    leaf = value.owner
    if not isinstance(leaf, Leaf) or leaf.kind is not LeafKind.PARAMETER:
        return None
    cuts = _cuts(graph, leaf)
    one = {cut.key for cut in cuts}
    is_along = leaf.section is None or all(cut.dim == leaf.section.dim for cut in cuts)
    return leaf if len(one) == 1 and is_along else None


def _keeps_elements(node: Node) -> bool:
    return node.op in _AS_IT_IS or permutation(node) is not None


def _cuts(graph: Graph, leaf: Leaf) -> list[_Cut]:
    """Where a parameter is cut; none where somebody reads more of it than parts."""
    found = list[_Cut]()
    none: tuple[Node, ...] = ()
    waiting = [(Value(leaf), none, tuple(range(len(leaf.type.shape))))]
    while waiting:
        value, way, order = waiting.pop()
        slices = list[Node]()
        for user in graph.users.get(value, ()):
            if _keeps_elements(user):
                turned = permutation(user)
                now = order if turned is None else tuple(order[place] for place in turned)
                waiting.append((Value(user), (*way, user), now))
            else:
                slices.append(user)
        groups = [[user] for user in slices if user.op != "slice.Tensor"]
        groups += [rest] if (rest := [user for user in slices if user.op == "slice.Tensor"]) else []
        for users in groups:
            dim, parts = find_cut(tuple(users), value.type.shape)
            if len(parts) < 2 or users[0].op not in _CUTS or not all(size for _, size in parts):
                return []
            found.append(_Cut(way, order[dim], parts))
        if value in graph.outputs:
            return []
    return found


def cuts_of_split_weights(graph: Graph, flow: Flow) -> tuple[Node, ...]:
    """The cuts of packed weights whose parts are then split along the dim that was cut."""
    found = (node for node in graph.nodes if node.op in _CUTS and find_packed(graph, node) is not None)
    return tuple(node for node in found if any(_is_split(graph, flow, v, node.call.dim()) for v in node.outputs()))


def _is_split(graph: Graph, flow: Flow, value: Value, dim: int) -> bool:
    """Whether a part of a weight is read split along a dim, perhaps after it was turned."""
    for user in graph.users.get(value, ()):
        if user not in flow.rules:
            continue
        if flow.rules[user].operands[user.inputs.index(value)] == Split(dim):
            return True
        turned = permutation(user)
        now = dim if turned is None else turned.index(dim)
        if _keeps_elements(user) and _is_split(graph, flow, Value(user), now):
            return True
    return False


def store_in_sections(graph: Graph, cuts: Collection[Node]) -> Graph:
    """The graph in which the packed weights that are cut here are stored in the parts that they are cut into."""
    packed = dict.fromkeys(leaf for node in cuts if (leaf := find_packed(graph, node)) is not None)
    work = Rewriting(graph)
    sections: dict[Leaf, tuple[Leaf, ...]] = {}
    of_cut: dict[Node, tuple[_Cut, tuple[Leaf, ...]]] = {}
    passed = set[Node]()
    for leaf in packed:
        found = _cuts(graph, leaf)
        dim, sizes = found[0].key
        starts = accumulate(sizes, initial=0)
        sections[leaf] = tuple(section_of(leaf, dim, *span) for span in zip(starts, sizes, strict=False))
        for each in sections[leaf]:
            work.builder.add_leaf(each)
        of_cut |= {value.owner: (cut, sections[leaf]) for cut in found for value, _ in cut.parts}  # type: ignore[misc]
        passed |= {node for cut in found for node in cut.way}
    for node in graph.nodes:
        if node in of_cut:
            cut, some = of_cut[node]
            for (value, _), leaf in zip(cut.parts, some, strict=True):
                if value.owner is node:
                    work.values[value] = _on_the_way(cut, leaf, work)
        elif node not in passed:
            work.keep(node)
    return _with_leaves(work.finish(), sections)


def _on_the_way(cut: _Cut, leaf: Leaf, work: Rewriting) -> Value:
    """What becomes of a section on the way to where the whole was cut."""
    value = Value(leaf)
    for node in cut.way:
        value = work.emit(node, node.op, value, *node.args[1:])
    return value


def _with_leaves(graph: Graph, sections: dict[Leaf, tuple[Leaf, ...]]) -> Graph:
    """The graph with sections where the tensors stood that they are of."""
    added = {leaf for some in sections.values() for leaf in some}
    stood = (leaf for leaf in graph.leaves if leaf not in added)
    return drop_unused(replace(graph, leaves=tuple(x for leaf in stood for x in sections.get(leaf, (leaf,)))))


def stored_as_in(graph: Graph, other: Graph) -> Graph:
    """The graph with every parameter whole or in sections as another one has it; what is read otherwise is put
    together, or cut out."""
    known = {key: tuple(retype(x, x.type.laid_out(())) for x in some) for key, some in by_tensor(other.leaves).items()}
    unlike = {key: some for key, some in by_tensor(graph.leaves).items() if known.get(key, some) != some}
    unlike = {key: some for key, some in unlike.items() if any(x.section for x in (*some, *known[key]))}
    if not unlike:
        return graph
    work = Rewriting(graph)
    first = {value: node for node in reversed(graph.nodes) for value in node.inputs}
    sections: dict[Leaf, tuple[Leaf, ...]] = {}
    for key, some in unlike.items():
        for leaf in known[key]:
            work.builder.add_leaf(leaf)
        sections |= {some[0]: known[key]} | dict.fromkeys(some[1:], ())
        read = next((first[Value(leaf)] for leaf in some if Value(leaf) in first), None)
        if read is not None:
            work.values.update(zip(map(Value, some), _cut_anew(work, read, some, known[key]), strict=True))
    for node in graph.nodes:
        work.keep(node)
    return _with_leaves(work.finish(), sections)


def _cut_anew(work: Rewriting, node: Node, some: tuple[Leaf, ...], stored: tuple[Leaf, ...]) -> Iterator[Value]:
    """The leaves of a tensor, made of those in which it is stored."""
    section = next(leaf.section for leaf in (*some, *stored) if leaf.section is not None)
    values = tuple(map(Value, stored))
    whole = values[0] if len(values) == 1 else work.emit(node, "cat", values, section.dim)
    if len(some) == 1:
        yield whole
    else:
        sizes = tuple(leaf.type.shape[section.dim] for leaf in some)
        yield from work.emit(node, "split_with_sizes", whole, sizes, section.dim)


def sections_alike(graph: Graph, layouts: Layouts, mesh: Mesh) -> Layouts:
    """Layouts in which all sections of a weight are stored alike; the same object where they are."""
    packed = {leaf: i for i, leaf in enumerate(graph.leaves) if leaf.section is not None}
    stored = {leaf: layouts.leaves.get(i, ()) for leaf, i in packed.items()}
    alike = stored_alike(stored, mesh)
    if alike is stored:
        return layouts
    return replace(layouts, leaves={**layouts.leaves, **{packed[leaf]: layout for leaf, layout in alike.items()}})
