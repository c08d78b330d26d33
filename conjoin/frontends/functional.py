"""Making an exported program functional: every in-place call becomes a call that returns a new value.

torch can do this for any program by tracing it again, which takes longer than the export itself. Most programs need
less: an in-place call whose target is seen under no other name afterwards is replaced where it stands, and a write to a
slice (`x[:, 1:] = y`) becomes a new value of the whole. A program with any other kind of writing is left alone, and
torch's way is taken.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from conjoin.frontends.torch_private import ExportedProgram, InputKind, aliases_input, is_mutable, writes_only_self
from conjoin.ops import find_operator, operator_name

Updates = tuple[tuple[str, fx.Node], ...]
"""Buffers by name in the program, and the node that makes their new value."""

_MAY_RETURN_INPUT = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "type_as", "pad")
"""Composite operators that hand their input back in some modes, though their schemas do not say so."""


@dataclass(slots=True)
class _Aliases:
    """Which nodes may share memory."""

    root: dict[fx.Node, fx.Node] = field(default_factory=dict)
    members: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)

    def add(self, node: fx.Node, source: fx.Node | None) -> None:
        root = self.root[source] if source is not None else node
        self.root[node] = root
        self.members.setdefault(root, []).append(node)

    def seen_otherwise(self, target: fx.Node, now: int, last_read: dict[fx.Node, int]) -> bool:
        """Whether memory of the target is read later under a name other than its own or, for a slice, the whole's."""
        own = {target, _whole(target)}
        return any(other not in own and last_read.get(other, -1) > now for other in self.members[self.root[target]])


def _source(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result may share."""
    if node.target is operator.getitem:
        return node.args[0]  # type: ignore[return-value]
    if not isinstance(node.target, OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    return node.args[0] if aliases_input(node.target) or operator_name(node.target) in _MAY_RETURN_INPUT else None


_SCATTERS = {
    torch.ops.aten.slice.Tensor: torch.ops.aten.slice_scatter.default,
    torch.ops.aten.select.int: torch.ops.aten.select_scatter.default,
}
"""Ways to look at a part of a tensor, and what puts a new part in its place; their further arguments are the same."""


def _whole(node: fx.Node) -> fx.Node:
    """The tensor that a slice of a slice … is a part of; the node itself when it is none."""
    while node.target in _SCATTERS:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _functional_name(op: OpOverload) -> str:
    base, dot, overload = operator_name(op).partition(".")
    return base.removesuffix("_") + dot + overload


def _is_batch_norm_in_training(node: fx.Node) -> bool:
    is_batch_norm = isinstance(node.target, OpOverload) and operator_name(node.target) == "batch_norm"
    return is_batch_norm and node.args[3] is not None and node.args[5] is True


def _writes(node: fx.Node) -> bool:
    if not isinstance(node.target, OpOverload):
        return False
    return is_mutable(node.target) or _is_batch_norm_in_training(node)


def _is_opaque_writer(node: fx.Node) -> bool:
    """Calls that write, or may, in ways not handled here."""
    if not isinstance(node.target, OpOverload):
        return node.target is not operator.getitem
    name = operator_name(node.target)
    if name == "instance_norm":
        return node.args[3] is not None
    if not is_mutable(node.target):
        return False
    return not writes_only_self(node.target) or _counterpart(node) is None


def _counterpart(node: fx.Node) -> Any:
    """The functional operator that computes what an in-place call leaves behind; None when types would differ."""
    try:
        function = find_operator(_functional_name(node.target))  # type: ignore[arg-type]
    except LookupError:
        return None
    target, others = node.args[0], [n for n in node.all_input_nodes if n is not node.args[0]]
    kept = target.meta["val"]  # type: ignore[union-attr]
    same = all(n.meta["val"].dtype == kept.dtype or n.meta["val"].dtype == torch.bool for n in others)
    fits = not _is_pointwise(node) or all(_broadcasts(n.meta["val"].shape, kept.shape) for n in others)
    return function if (same or _functional_name(node.target) == "copy") and fits else None  # type: ignore[arg-type]


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a shape broadcasts to the target without growing it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(have in (1, want) for have, want in pairs)


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _plan(program: ExportedProgram) -> list[fx.Node] | None:
    """The calls to replace; None when the program writes in ways not handled here."""
    specs = program.graph_signature.input_specs
    nodes = list(program.graph.nodes)
    kinds = dict(zip((n for n in nodes if n.op == "placeholder"), (spec.kind for spec in specs), strict=True))
    order = {node: i for i, node in enumerate(nodes)}
    last_read = {node: max((order[user] for user in node.users), default=-1) for node in nodes}
    aliases, writers = _Aliases(), []
    for now, node in enumerate(nodes):
        if node.op == "call_function":
            if _is_opaque_writer(node):
                return None
            targets = _targets(node)
            for target in targets:
                root = aliases.root[target]
                outside = root in kinds and (kinds[root] is not InputKind.BUFFER or root is not _whole(target))
                if (outside or aliases.seen_otherwise(target, now, last_read)) and not _is_detach(node):
                    return None
            writers += [node] if targets else []
        aliases.add(node, _source(node) if node.op == "call_function" else None)
    return writers


def _is_detach(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.detach_.default


def _targets(node: fx.Node) -> list[fx.Node]:
    if not _writes(node):
        return []
    written = node.args[3:5] if _is_batch_norm_in_training(node) else node.args[:1]
    return [target for target in written if isinstance(target, fx.Node)]


def _replace_later(old: fx.Node, new: fx.Node, order: dict[fx.Node, int], now: int) -> None:
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and order.get(user, -1) > now)


def _evaluate(function: Any, node: fx.Node, args: tuple[Any, ...]) -> Any:
    values = fx.node.map_arg((args, node.kwargs), lambda n: n.meta["val"])
    return function(*values[0], **values[1])


def _insert(graph: fx.Graph, node: fx.Node, function: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    kwargs = node.kwargs if function is not operator.getitem else {}
    made = graph.call_function(function, args, dict(kwargs))
    made.meta = {**node.meta, "val": value}
    return made


def _replace_batch_norm(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """One call that returns the output and both new statistics."""
    function = torch.ops.aten._native_batch_norm_legit_functional.default
    args = node.args[:8]
    values = _evaluate(function, node, args)
    whole = _insert(graph, node, function, args, tuple(values))
    return [_insert(graph, node, operator.getitem, (whole, i), values[i]) for i in (0, 3, 4)]


def _put_back(graph: fx.Graph, part: fx.Node, value: fx.Node) -> fx.Node:
    """The whole with a new value in place of one of its parts."""
    while part.target in _SCATTERS:
        whole: Any = part.args[0]
        scatter = _SCATTERS[part.target]
        made = graph.call_function(scatter, (whole, value, *part.args[1:]), dict(part.kwargs))
        made.meta = {**value.meta, "val": whole.meta["val"]}
        part, value = whole, made
    return value


def functionalize(program: ExportedProgram) -> Updates | None:
    """Replace every in-place call; the new values of buffers, or None when torch has to do it."""
    writers = _plan(program)
    if writers is None:
        return None
    graph = program.graph
    specs = program.graph_signature.input_specs
    names = {
        node: str(spec.target)
        for node, spec in zip((n for n in graph.nodes if n.op == "placeholder"), specs, strict=True)
    }
    order = {node: i for i, node in enumerate(graph.nodes)}
    updates: dict[str, fx.Node] = {}
    for node in writers:
        wholes = [_whole(target) for target in _targets(node)]
        with graph.inserting_before(node):
            if _is_batch_norm_in_training(node):
                result, *new = _replace_batch_norm(graph, node)
            else:
                function = find_operator(_functional_name(node.target))  # type: ignore[arg-type]
                result = _insert(graph, node, function, node.args, node.meta["val"])
                new = [result]
            written = [_put_back(graph, target, value) for target, value in zip(_targets(node), new, strict=True)]
        for target, value, whole, full in zip(_targets(node), new, wholes, written, strict=True):
            name = _original(whole, names, updates)
            _replace_later(target, value, order, order[node])
            _replace_later(whole, full, order, order[node])
            if name is not None and not _is_detach(node):
                updates[name] = full
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    kept = set(updates.values())
    graph.eliminate_dead_code(lambda node: node in kept or node.op in ("placeholder", "output") or _draws(node))
    return tuple(updates.items())


def _draws(node: fx.Node) -> bool:
    """Unused draws stay: what is drawn after them must not change."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _original(target: fx.Node, names: dict[fx.Node, str], updates: dict[str, fx.Node]) -> str | None:
    """The buffer a target is the current value of."""
    return names.get(target) or next((name for name, value in updates.items() if value is target), None)
