"""Regions of a forward with gradients or autocast switched, made explicit in the calls themselves.

Export leaves a marker where a region begins and ends. Afterwards there are none: what enters a `no_grad` region is
detached, the casts that autocast made are written out, and calls inside any autocast region are marked as pinned, so
that they are computed in the dtypes written whatever autocast the graph is run under.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from conjoin.frontends.problems import MODEL_PREFIX, Problem, source_of
from conjoin.frontends.torch_autocast import autocast_knows
from conjoin.frontends.torch_private import (
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    PINNED,
    SET_GRAD,
    ExportedProgram,
    InputKind,
    aliases_input,
    decomposition_of,
    is_mutable,
    set_storages,
    storages_of_node,
)
from conjoin.ops import bind_args, find_spec, operator_name

CASTS = ("to.dtype", "to.dtype_layout", "to.device", "to.other", "to.prim_Device", "type_as")
"""Ways to ask for a dtype, which hand on what has it already."""
_HANDING_ON = ("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "sum_to_size", "type_as")
"""Calls that may hand on what they are given, though their schemas do not tell."""
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")


@dataclass(slots=True)
class _Walk:
    """Where the walk along the calls stands: gradients on or off, the autocast regions open, what carries gradients."""

    graph: fx.Graph
    grad: bool = True
    open: list[fx.Node] = field(default_factory=list)
    roots: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """For a view the node whose memory it shows, for any other node itself."""
    carrying: set[fx.Node] = field(default_factory=set)
    """Roots through which gradients flow."""
    memory: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """For a node the one whose memory it shares, gradients or not."""
    names: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    """For a node the others that share its memory, itself included."""
    order: dict[fx.Node, int] = field(default_factory=dict)
    last_read: dict[fx.Node, int] = field(default_factory=dict)
    protected: dict[fx.Node, str] = field(default_factory=dict)
    """Inputs and parameters, with what they are called: a forward may not write to them."""
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)
    casts: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = field(default_factory=dict)
    """Casts of parameters, made once a region as autocast does."""
    problems: list[Problem] = field(default_factory=list)

    def carries(self, node: fx.Node) -> bool:
        return self.roots.get(node, node) in self.carrying


def has_cuda_autocast(program: ExportedProgram) -> bool:
    """Whether a program has a region that switches CUDA's autocast on."""
    return any(_regions(program.graph, "cuda"))


def _regions(graph: fx.Graph, device: str) -> Iterator[fx.Node]:
    """Where regions begin that switch autocast on for a kind of device."""
    for node in graph.nodes:
        if node.target is ENTER_AUTOCAST and node.args[0] == device and node.args[2]:
            yield node


def _device_of(node: fx.Node) -> str:
    """The kind of device that a call runs on, whose autocast counts for it."""
    tensors = [tensor for n in (*node.all_input_nodes, node) for tensor in _tensors(n)]
    return next((tensor.device.type for tensor in tensors), "")


def _idle(graph: fx.Graph) -> Iterator[str]:
    """Regions for a kind of device on which nothing runs: they have no effect, here as in the model."""
    used = {_device_of(node) for node in graph.nodes}
    for device in {"cuda", "cpu"} - used:
        for node in _regions(graph, device):
            where = f" at {source_of(node)}" if source_of(node) else ""
            yield (
                f"autocast for {device}{where}: the model is on another device, where that has no effect; "
                f"capture it on {device}, or on the meta device"
            )


def make_explicit(program: ExportedProgram, input_names: Sequence[str]) -> tuple[tuple[Problem, ...], tuple[str, ...]]:
    """Take the markers out of a program; what a graph cannot say comes back as problems, what does nothing as words."""
    idle = tuple(dict.fromkeys(_idle(program.graph)))
    _remove_identities(program.graph)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    last_read = {node: max((order[user] for user in node.users), default=-1) for node in order}
    walk = _Walk(program.graph, order=order, last_read=last_read)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    names = iter(input_names)
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.PARAMETER:
            walk.protected[node] = f"parameter {str(spec.target).removeprefix(MODEL_PREFIX)}"
        elif spec.kind is InputKind.USER_INPUT:
            walk.protected[node] = f"input {next(names)}"
        if node in walk.protected and _is_floating(node):
            walk.carrying.add(node)
    markers = []
    for node in list(program.graph.nodes):
        if node.op == "call_function":
            if _is_marker(walk, node):
                markers.append(node)
            else:
                _visit(walk, node)
    for node in reversed(markers):
        program.graph.erase_node(node)
    return tuple(walk.problems), idle


def _is_marker(walk: _Walk, node: fx.Node) -> bool:
    if node.target is SET_GRAD:
        walk.grad = bool(node.args[0])
    elif node.target is ENTER_AUTOCAST:
        walk.open.append(node)
    elif node.target is EXIT_AUTOCAST:
        walk.open.pop()
        if not walk.open:
            walk.casts.clear()
    else:
        return False
    return True


def _remove_identities(graph: fx.Graph) -> None:
    """Export sees two tensors where a call hands its argument on, though a write to one changes both.

    Nor does such a call end what gradients flow through: inside `no_grad` it gives what it was given. What was traced
    as a view of the result is one of the argument.
    """
    moved: dict[int, frozenset[int]] = {}
    for node in list(graph.nodes):
        if moved.keys() & storages_of_node(node):
            set_storages(node, frozenset[int]().union(*(moved.get(place, {place}) for place in storages_of_node(node))))
        handed = list(_handed_on(node)) if node.op == "call_function" else []
        for made, given in handed:
            moved.update(dict.fromkeys(storages_of_node(made) - storages_of_node(given), storages_of_node(given)))
            made.replace_all_uses_with(given)
            graph.erase_node(made)
        if handed and node not in dict(handed) and not node.users:
            graph.erase_node(node)


def _visit(walk: _Walk, node: fx.Node) -> None:
    _share_memory(walk, node)
    objection = _objection_to_writing(walk, node)
    if objection:
        walk.problems.append(Problem(f"operator {operator_name(node.target)}", source_of(node), objection))  # type: ignore[arg-type]
        return
    device = _device_of(node) if walk.open else ""
    region = next((marker for marker in reversed(walk.open) if marker.args[0] == device), None)
    if region is not None:
        _take_loss_apart(walk, node, region)
        _write_casts(walk, node, region)
        node.meta["custom"] = {**node.meta.get("custom", {}), PINNED: True}
    if not walk.grad:
        _stop_gradients(walk, node)
    _follow(walk, node)


def _shares(node: fx.Node) -> fx.Node | None:
    """The operand whose memory a call's result shares, as it was traced, or may share, as its schema says."""
    if node.target is not operator.getitem and not isinstance(node.target, OpOverload):
        return None
    made = node.all_input_nodes[:1] if node.target is operator.getitem else []
    operands = [*(operand for whole in made for operand in whole.all_input_nodes), *node.all_input_nodes]
    shared = next((operand for operand in operands if storages_of_node(operand) & storages_of_node(node)), None)
    if shared is None and (made or aliases_input(node.target)):  # type: ignore[arg-type]
        return next(iter(node.all_input_nodes), None)
    return shared


def _share_memory(walk: _Walk, node: fx.Node) -> None:
    source = _shares(node)
    if source is not None:
        walk.memory[node] = walk.memory.get(source, source)


def _objection_to_writing(walk: _Walk, node: fx.Node) -> str | None:
    """Why a call must not write where it does; None when it may, or does not write."""
    if not isinstance(node.target, OpOverload) or not is_mutable(node.target) or _is_detach(node):
        return None
    target = node.all_input_nodes[0]
    root = walk.memory.get(target, target)
    if root in walk.protected:
        return f"it writes to {walk.protected[root]}, and forward may write to buffers only: compute a new tensor"
    # The same memory under other names that are read later: with gradients where this write has none, or without.
    own = walk.roots.get(target, target)
    later = [n for n in walk.names.get(root, ()) if walk.last_read.get(n, -1) > walk.order[node]]
    later += [target] if node.users else []
    flows = walk.grad and any(walk.carries(operand) for operand in node.all_input_nodes)
    past = any(walk.carries(n) and (not walk.grad or walk.roots.get(n, n) is not own) for n in later)
    if past or (flows and any(walk.roots.get(n, n) is not own for n in later)):
        return "it writes into a tensor through which gradients flow, past those gradients: compute a new tensor"
    return None


def _follow(walk: _Walk, node: fx.Node) -> None:
    """Note whether gradients flow through what a call makes."""
    source = _shares(node)
    if source is not None and walk.grad and not _is_detach(node):
        walk.roots[node] = walk.roots.get(source, source)
    walk.names.setdefault(walk.memory.get(node, node), []).append(node)
    flows = any(walk.carries(operand) for operand in node.all_input_nodes)
    if walk.grad and flows and _is_floating(node) and not _is_detach(node):
        walk.carrying.add(walk.roots.get(node, node))


def _stop_gradients(walk: _Walk, node: fx.Node) -> None:
    for operand in node.all_input_nodes:
        if walk.carries(operand):
            node.replace_input_with(operand, _detach(walk, operand, node))


def _detach(walk: _Walk, operand: fx.Node, before: fx.Node) -> fx.Node:
    if operand not in walk.detached:
        with walk.graph.inserting_before(before):
            made = walk.graph.call_function(torch.ops.aten.detach.default, (operand,))
        made.meta = {**before.meta, "val": operand.meta["val"]}
        walk.memory[made] = walk.memory.get(operand, operand)
        walk.detached[operand] = made
    return walk.detached[operand]


def _is_detach(node: fx.Node) -> bool:
    return node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def _tensors(node: fx.Node) -> list[Tensor]:
    value = node.meta.get("val")
    return [item for item in (value if isinstance(value, tuple | list) else (value,)) if isinstance(item, Tensor)]


def _is_floating(node: fx.Node) -> bool:
    return any(tensor.is_floating_point() or tensor.is_complex() for tensor in _tensors(node))


def _handed_on(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Results of a call that are operands themselves, with these: torch is asked, on stand-ins of their types."""
    if not isinstance(node.target, OpOverload) or not node.args:
        return
    name = operator_name(node.target)
    if name in _DROPOUTS:
        if node.args[2] is False or node.args[1] == 0:
            yield node, cast(fx.Node, node.args[0])
        return
    parts = decomposition_of(node.target) if aliases_input(node.target) or name in _HANDING_ON else None
    if parts is None or is_mutable(node.target):
        return
    operands = {id(n.meta["val"]): n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    try:
        with torch.no_grad():
            made = parts(*args, **kwargs)
    except RuntimeError:
        return
    if isinstance(made, Tensor):
        if id(made) in operands:
            yield node, operands[id(made)]
    else:
        for user in node.users:
            if user.target is operator.getitem and id(made[user.args[1]]) in operands:
                yield user, operands[id(made[user.args[1]])]


def _take_loss_apart(walk: _Walk, node: fx.Node, region: fx.Node) -> None:
    """Where autocast does not know cross entropy, as on CUDA, it knows the second of the two calls that it consists of:
    logarithms of half precision stay so, and the loss of them is in full precision."""
    device, _, enabled = cast(tuple[str, torch.dtype, bool], region.args[:3])
    loss, softmax = torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.log_softmax.int
    if not enabled or node.target is not loss or autocast_knows(loss, device):
        return
    logits, target, *rest, smoothing = bind_args(operator_name(loss), node.args, node.kwargs)
    (given,) = _tensors(logits)
    if given.dtype.itemsize != 2 or _is_floating(target) or smoothing:
        return
    classes = min(given.dim(), 2) - 1
    with torch.no_grad():
        made = softmax(given, classes, given.dtype)
    logarithms = _put_before(walk, node, softmax, (logits, classes, given.dtype), made)
    node.target = torch.ops.aten.nll_loss_nd.default
    node.args, node.kwargs = (logarithms, target, *rest), {}


def _write_casts(walk: _Walk, node: fx.Node, region: fx.Node) -> None:
    """Put in front of a call the casts that autocast made: those under which it gives the dtypes it gave.

    What is on no list may be left as it is; what is on one is cast to the dtype of the region or to float32, though
    some calls give the same dtype on mixed operands. Those that export lets mix, and that never do, are cast first.
    """
    device, dtype, enabled = cast(tuple[str, torch.dtype, bool], region.args[:3])
    if not enabled or not isinstance(node.target, OpOverload) or is_mutable(node.target):
        return
    operands = [n for n in node.all_input_nodes if _can_be_cast(n)]
    wanted = [tensor.dtype for tensor in _tensors(node)]
    spec = find_spec(operator_name(node.target))
    if not autocast_knows(node.target, device):
        candidates: tuple[torch.dtype | None, ...] = (None, dtype, torch.float32)
    elif spec is not None and spec.one_dtype:
        candidates = (dtype, torch.float32, None)
    else:
        candidates = (torch.float32, dtype, None)
    for target in candidates:
        if operands and _dtypes_given(node, operands, target) == wanted:
            for operand in operands:
                if target is not None and operand.meta["val"].dtype != target:
                    node.replace_input_with(operand, _cast(walk, operand, target, node))
            return


def _can_be_cast(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float16, torch.bfloat16)


def _dtypes_given(node: fx.Node, operands: list[fx.Node], target: torch.dtype | None) -> list[torch.dtype] | None:
    """The dtypes a call gives when these operands are cast; None when it cannot be made so."""

    def value(n: fx.Node) -> Any:
        return n.meta["val"].to(target) if target is not None and n in operands else n.meta["val"]

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    try:
        with torch.no_grad():
            made = node.target(*args, **kwargs)  # type: ignore[operator]
    except RuntimeError:
        return None
    return [t.dtype for t in (made if isinstance(made, tuple | list) else (made,)) if isinstance(t, Tensor)]


def _cast(walk: _Walk, operand: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
    key = (operand, dtype, walk.grad)
    if operand.op == "placeholder" and key in walk.casts:
        return walk.casts[key]
    made = _put_before(
        walk, before, torch.ops.aten._to_copy.default, (operand,), operand.meta["val"].to(dtype), dtype=dtype
    )
    walk.casts[key] = made
    return made


def _put_before(
    walk: _Walk, node: fx.Node, call: OpOverload, args: tuple[Any, ...], value: Tensor, **more: Any
) -> fx.Node:
    """A pinned call in front of another, at its line."""
    with walk.graph.inserting_before(node):
        made = walk.graph.call_function(call, args, more)
    made.meta = {**node.meta, "val": value, "custom": {**node.meta.get("custom", {}), PINNED: True}}
    if not walk.grad:
        _stop_gradients(walk, made)
    _follow(walk, made)
    return made
