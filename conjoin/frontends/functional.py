"""Making an exported program functional: every in-place call becomes a call that returns a new value.

torch can do this for any program by tracing it again, which takes longer than the export itself. Most programs need
less: an in-place call whose target is seen under no other name afterwards is replaced where it stands, and a write to
a slice (`x[:, 1:] = y`) becomes a new value of the whole. `x[:, 1:] += y` writes twice, as Python reads it: it adds to
the slice and puts into `x` what is there already; one addition of `y` and zeros around it is all that is left. A
program with any other kind of writing is left alone, and torch's way is taken.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import fx
from torch._ops import OpOverload

from conjoin.frontends.drawn_orders import drawn_orders, draws, keep_orders
from conjoin.frontends.torch_private import (
    ExportedProgram,
    InputKind,
    aliases_input,
    is_mutable,
    storages_of_node,
    writes_only_self,
)
from conjoin.ops import find_operator, operator_name

Updates = tuple[tuple[str, fx.Node], ...]
"""Buffers by name in the program, and the node that makes their new value."""

Part = tuple[Any, fx.Node]
"""Which part of a whole, and what was put there."""

_HIDES_ITS_INPUT = "dropout"
"""The one operator that hands its input back, outside of training, and is traced as if it made a copy."""


class _Aliases:
    """Which nodes may share memory: those whose traced results do, whatever their schemas say of it."""

    def __init__(self) -> None:
        self._storages: dict[fx.Node, frozenset[int]] = {}
        self._members: dict[int, list[fx.Node]] = {}

    def add(self, node: fx.Node) -> None:
        storages = storages_of_node(node)
        if node.op == "call_function" and _may_share(node):
            storages |= frozenset[int]().union(*(self._storages[read] for read in node.all_input_nodes))
        self._storages[node] = storages
        for storage in storages:
            self._members.setdefault(storage, []).append(node)

    def names_of(self, target: fx.Node) -> set[fx.Node]:
        """All nodes so far that memory of the target is known by."""
        return {node for storage in self._storages[target] for node in self._members[storage]}


def _may_share(node: fx.Node) -> bool:
    """Whether a result may share memory with an operand, though the traced ones do not."""
    if not isinstance(node.target, OpOverload):
        return True
    return aliases_input(node.target) or operator_name(node.target) == _HIDES_ITS_INPUT


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


_FUNCTIONAL_NAMES = {
    "bernoulli_.float": "bernoulli.p",
    "normal_": "normal_functional",
    "pow_.Tensor": "pow.Tensor_Tensor",
    "float_power_.Tensor": "float_power.Tensor_Tensor",
    "floor_divide_.Tensor": "floor_divide",
}
"""In-place operators whose functional forms have other names than theirs."""


def _functional_name(op: OpOverload) -> str:
    name = operator_name(op)
    base, dot, overload = name.partition(".")
    return _FUNCTIONAL_NAMES.get(name, base.removesuffix("_") + dot + overload)


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
            targets = targets_of(node)
            for target in targets:
                whole = _whole(target)
                names = aliases.names_of(target) - {target, whole}
                outside = {name for name in names if name in kinds and not _are_tied(name, whole)}
                if whole in kinds and kinds[whole] is not InputKind.BUFFER:
                    outside.add(whole)
                if (outside or any(last_read[name] > now for name in names)) and not _is_detach(node):
                    return None
            writers += [node] if targets else []
        aliases.add(node)
    return writers


def _are_tied(one: fx.Node, other: fx.Node) -> bool:
    """Whether two inputs of the program are one tensor under two names."""
    first, second = one.meta["val"], other.meta["val"]
    places = [(x.shape, x.stride(), x.storage_offset()) for x in (first, second)]
    return other.op == "placeholder" and places[0] == places[1]


def _is_detach(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.detach_.default


def targets_of(node: fx.Node) -> list[fx.Node]:
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
        made = graph.call_function(_SCATTERS[part.target], (whole, value, *part.args[1:]), dict(part.kwargs))
        made.meta = {**value.meta, "val": whole.meta["val"]}
        with graph.inserting_after(made):
            part, value = whole, _in_real_parts(graph, made)
    return value


def _is_there(node: fx.Node, put: Mapping[fx.Node, Part]) -> bool:
    """Whether a call copies into a part what was put there before."""
    if node.target is not torch.ops.aten.copy_.default or len(node.args) > 2:
        return False
    target, source = cast(fx.Node, node.args[0]), node.args[1]
    return _whole(target) is not target and put.get(_whole(target)) == (_path(target), source)


def _path(part: fx.Node) -> tuple[Any, ...]:
    """Which part of a whole this is: the views from the part to the whole."""
    found: list[Any] = []
    while part.target in _SCATTERS:
        found.append((part.target, part.args[1:], tuple(part.kwargs.items())))
        part = part.args[0]  # type: ignore[assignment]
    return tuple(found)


def _added_around(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """The whole with something added to the larger part of it: zeros are added to the rest."""
    function = _ADDITIONS.get(node.target)
    target, other = (*node.args, None)[:2]
    if function is None or not isinstance(target, fx.Node) or not isinstance(other, fx.Node):
        return None
    whole, pads = _whole(target), _pads(target)
    if pads is None:
        return None
    part, added = target.meta["val"], other.meta["val"]
    alike = (added.shape, added.dtype) == (part.shape, part.dtype) and not part.is_complex()
    if not alike or 2 * part.numel() < whole.meta["val"].numel():
        return None
    pad = torch.ops.aten.constant_pad_nd.default
    around = graph.call_function(pad, (other, pads))
    around.meta = {**node.meta, "val": pad(added, pads)}
    return _insert(graph, node, function, (whole, around), whole.meta["val"])


_ADDITIONS: dict[Any, OpOverload] = {
    torch.ops.aten.add_.Tensor: torch.ops.aten.add.Tensor,
    torch.ops.aten.sub_.Tensor: torch.ops.aten.sub.Tensor,
}


def _pads(part: fx.Node) -> list[int] | None:
    """How many elements of the whole lie before and after a part in each dim, the last one first; None with gaps."""
    rank = part.meta["val"].dim()
    around = [[0, 0] for _ in range(rank)]
    if part.target not in _SCATTERS:
        return None
    while part.target in _SCATTERS:
        base = cast(fx.Node, part.args[0])
        if part.target is not torch.ops.aten.slice.Tensor:
            return None
        given: list[Any] = [*part.args[1:], *(0, None, None, 1)[len(part.args) - 1 :]]
        dim, size = given[0] % rank, base.meta["val"].shape[given[0]]
        places = range(size)[slice(*given[1:])]
        if places.step != 1:
            return None
        around[dim][0] += places.start
        around[dim][1] += size - places.stop
        part = base
    return [count for ends in reversed(around) for count in ends]


def _in_real_parts(graph: fx.Graph, put: fx.Node) -> fx.Node:
    """What puts a part into a complex tensor, by real and imaginary parts: torch has no gradient for it as it is."""
    if not put.meta["val"].is_complex() or put.kwargs:
        return put
    whole, value, dim, *rest = (*put.args, 0) if len(put.args) == 2 else put.args

    def call(function: Any, *args: Any) -> fx.Node:
        return _insert(graph, put, function, args, _evaluate(function, put, args))

    with graph.inserting_before(put):
        resolved = [call(torch.ops.aten.resolve_conj.default, x) if _is_conjugate(x) else x for x in (whole, value)]
        parts = [call(torch.ops.aten.view_as_real.default, x) for x in resolved]
        made = call(put.target, *parts, dim % put.meta["val"].dim(), *rest)
        result = call(torch.ops.aten.view_as_complex.default, made)
    put.replace_all_uses_with(result)
    graph.erase_node(put)
    return result


def _is_conjugate(node: Any) -> bool:
    return bool(node.meta["val"].is_conj())


def put_in_real_parts(graph: fx.Graph) -> None:
    """As `functionalize` does it, where torch has made the graph functional."""
    for node in list(graph.nodes):
        if node.target in _SCATTERS.values():
            _in_real_parts(graph, node)


def functionalize(program: ExportedProgram) -> Updates | None:
    """Replace every in-place call; the new values of buffers, or None when torch has to do it."""
    writers = _plan(program)
    if writers is None:
        return None
    graph = program.graph
    orders = drawn_orders(graph)
    specs = program.graph_signature.input_specs
    names = {
        node: str(spec.target)
        for node, spec in zip((n for n in graph.nodes if n.op == "placeholder"), specs, strict=True)
    }
    order = {node: i for i, node in enumerate(graph.nodes)}
    updates: dict[str, fx.Node] = {}
    replaced: set[fx.Node] = set()
    put: dict[fx.Node, Part] = {}
    for node in writers:
        if _is_there(node, put):
            node.replace_all_uses_with(cast(fx.Node, node.args[1]))
            graph.erase_node(node)
            continue
        wholes = [_whole(target) for target in targets_of(node)]
        with graph.inserting_before(node):
            if _is_batch_norm_in_training(node):
                result, *new = _replace_batch_norm(graph, node)
            else:
                function = find_operator(_functional_name(node.target))  # type: ignore[arg-type]
                result = _insert(graph, node, function, node.args, node.meta["val"])
                new = [result]
            around = _added_around(graph, node)
            written = [around] if around is not None else [
                _put_back(graph, target, value) for target, value in zip(targets_of(node), new, strict=True)
            ]
            replaced.update((result, *written))
            parts = [(_path(target), value) for target, value in zip(targets_of(node), new, strict=True)]
            put.update(zip(written, parts, strict=True))
        for target, value, whole, full in zip(targets_of(node), new, wholes, written, strict=True):
            name = _original(whole, names, updates)
            _replace_later(target, value, order, order[node])
            _replace_later(whole, full, order, order[node])
            if name is not None and not _is_detach(node):
                updates[name] = full
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    kept = set(updates.values())
    graph.eliminate_dead_code(lambda node: node in kept or node.op in ("placeholder", "output") or draws(node))
    keep_orders(graph, orders, replaced)
    return tuple(updates.items())


def _original(target: fx.Node, names: dict[fx.Node, str], updates: dict[str, fx.Node]) -> str | None:
    """The buffer a target is the current value of."""
    return names.get(target) or next((name for name, value in updates.items() if value is target), None)
