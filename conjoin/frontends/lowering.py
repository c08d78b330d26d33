"""From an exported FX graph to our graph: leaves named as the user named them, operators in canonical form."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch._ops import OpOverload

from conjoin.frontends.exporting import Exported
from conjoin.frontends.loss_output import find_loss
from conjoin.frontends.problems import LOSS_PREFIX, MODEL_PREFIX, Problem, source_of
from conjoin.frontends.regions import CASTS
from conjoin.frontends.torch_private import PINNED, InputKind, OutputKind, memory_of
from conjoin.ir import MAX_CONSTANT_BYTES, Graph, GraphBuilder, Leaf, LeafKind, Node, Result, Source, Value, make_leaf
from conjoin.ops import (
    EMBEDDING_BAG,
    OPAQUE,
    OVERWRITE,
    RAGGED_EMBEDDING_BAG,
    STRIDED_VIEW,
    STRIDED_WRITE,
    Call,
    TensorType,
    bind_args,
    find_spec,
    map_tensors,
    operator_name,
    output_types,
    signature,
    spec_for,
    walk_tensors,
    why_opaque,
)

_CHECKS = (
    "_assert_tensor_metadata",
    "_assert_async.msg",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range_for_size",
)
_BAG_MODES = ("sum", "mean", "max")


class _Refused(Exception):
    """A call in a form that cannot be captured; says what to do."""


def tensor_type(value: Any) -> TensorType:
    """The type of a (fake) tensor."""
    if not isinstance(value, Tensor):
        raise _Refused(f"it returns a {type(value).__name__}, and a graph holds tensors only")
    if not all(isinstance(size, int) for size in value.shape):
        raise _Refused("the shape of its result depends on tensor values: use fixed shapes")
    return TensorType(tuple(value.shape), value.dtype)


@dataclass(slots=True)
class Lowering:
    """The state of one translation: the builder, what each FX node became, and every problem met."""

    exported: Exported
    model: nn.Module
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    lost: set[fx.Node] = field(default_factory=set)
    """Nodes that were not understood: what is made from them is not told again."""

    def __post_init__(self) -> None:
        self.problems += self.exported.problems

    def run(self, name: str, training: bool) -> Graph | None:
        """The graph, or None when there were problems."""
        self._lower_inputs()
        for node in self.exported.program.graph.nodes:
            if node.op == "call_function":
                self._lower_call(node)
            elif node.op == "get_attr":
                self._lower_attribute(node)
        return None if self.problems else self._finish(name, training)

    def _lower_inputs(self) -> None:
        program = self.exported.program
        placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
        tensors = iter(
            name
            for name, leaf in zip(self.exported.input_names, self.exported.inputs, strict=True)
            if isinstance(leaf, Tensor)
        )
        names = _canonical_names(self.model)
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            match spec.kind:
                case InputKind.PARAMETER | InputKind.BUFFER if str(spec.target).startswith(MODEL_PREFIX):
                    self.values[node] = self._state_leaf(str(spec.target).removeprefix(MODEL_PREFIX), spec.kind, names)
                case InputKind.PARAMETER | InputKind.BUFFER | InputKind.CONSTANT_TENSOR:
                    self.values[node] = self._constant_leaf(str(spec.target), node)
                case InputKind.USER_INPUT:
                    self.values[node] = self._add(LeafKind.INPUT, next(tensors), tensor_type(node.meta["val"]))
                case _:
                    self._problem(f"input of kind {spec.kind.name.lower()}", None, "only tensors can be captured")

    def _add(self, kind: LeafKind, name: str, type: TensorType, **facts: Any) -> Value:
        leaf = make_leaf(kind, name, type, **facts)
        known = self.builder.leaf(str(leaf))
        return Value(known) if known is leaf else self.builder.add_leaf(leaf)

    def _state_leaf(self, name: str, kind: InputKind, names: Mapping[str, tuple[str, ...]]) -> Value:
        first, *aliases = names[name]
        tensor = _find_tensor(self.model, first)
        parameter = kind is InputKind.PARAMETER
        return self._add(
            LeafKind.PARAMETER if parameter else LeafKind.BUFFER,
            first,
            tensor_type(tensor),
            trainable=parameter and tensor.requires_grad,
            aliases=tuple(aliases),
        )

    def _constant_leaf(self, target: str, node: fx.Node) -> Value:
        program = self.exported.program
        found = program.constants.get(target)
        found = program.state_dict.get(target) if found is None else found
        type = tensor_type(node.meta["val"])
        name = target.removeprefix(MODEL_PREFIX)
        if target.startswith(MODEL_PREFIX) and name in self.exported.changed:
            self._problem(f"attribute {name}", None, "forward reads it and replaces it, as state: use register_buffer")
        if target.startswith(LOSS_PREFIX) and isinstance(found, nn.Parameter) and found.requires_grad:
            self._problem(f"parameter {target}", None, "a loss with parameters of its own: make it part of the model")
        state = self._state_in_memory_of(name, found)
        if state is not None:
            advice = f"it is the memory of {state}, which changes, and would be frozen: read self.{state} itself"
            self._problem(f"tensor {name}", source_of(next(iter(node.users), node)), advice)
        if type.bytes > MAX_CONSTANT_BYTES:
            self._problem(
                f"constant {name} of {type.bytes / 2**20:.0f} MiB", source_of(node),
                "tensors this large belong to the model's state: use register_buffer",
            )  # fmt: skip
            found = None
        return self._add(LeafKind.CONSTANT, name, type, data=_bytes_of(found))

    def _state_in_memory_of(self, name: str, found: Any) -> str | None:
        """The parameter or buffer that a tensor beside the model's state shows: in a list, detached, in a closure."""
        owner, _, last = name.rpartition(".")
        parts = dict(self.model.named_modules())
        shown = vars(parts[owner]).get(last, found) if owner in parts else found
        return self.exported.memory.get(memory_of(shown)) if isinstance(shown, Tensor) else None

    def _lower_attribute(self, node: fx.Node) -> None:
        found = getattr(self.exported.program.graph_module, str(node.target), None)
        if isinstance(found, Tensor):
            self.values[node] = self._add(
                LeafKind.CONSTANT, str(node.target), tensor_type(found), data=_bytes_of(found)
            )

    def _problem(self, what: str, source: Source | None, advice: str) -> None:
        self.problems.append(Problem(what, source, advice))

    def _lose(self, node: fx.Node, advice: str) -> None:
        target = node.target
        name = operator_name(target) if isinstance(target, OpOverload) else getattr(target, "__name__", str(target))
        self.lost.add(node)
        self._problem(f"operator {name}", source_of(node), advice)

    def _lower_call(self, node: fx.Node) -> None:
        if any(operand in self.lost for operand in node.all_input_nodes):
            self.lost.add(node)
        elif node.target is operator.getitem:
            source, index = cast(tuple[fx.Node, int], node.args)
            made = self.values.get(source)
            self.values[node] = made[index] if isinstance(made, tuple) and index < len(made) else None
        elif isinstance(node.target, OpOverload):
            self._lower_operator(node, operator_name(node.target))
        elif not isinstance(node.meta.get("val"), bool | int | float):
            self._lose(node, "control-flow operators are not supported: unroll or use torch.where")

    def _lower_operator(self, node: fx.Node, op: str) -> None:
        if op in _CHECKS:
            return
        if signature(op).mutates:
            self._lose(node, "it writes to its inputs in a way export cannot make functional")
            return
        outputs = node.meta.get("val")
        if isinstance(outputs, SymInt | SymFloat | SymBool):
            self._lose(node, "what follows depends on tensor values read into Python: keep them in tensors")
            return
        try:
            types = tuple(tensor_type(t) for t in (outputs if isinstance(outputs, tuple | list) else (outputs,)))
            args = bind_args(
                op, fx.node.map_arg(node.args, self._value_of), fx.node.map_arg(node.kwargs, self._value_of)
            )
            op, args, types = canonical(op, args, types, node)
        except _Refused as refused:
            self._lose(node, str(refused))
            return
        if op == _IDENTITY:
            self.values[node] = args[0]
            return
        pinned = bool(node.meta.get("custom", {}).get(PINNED))
        add = partial(self.builder.add_call, source=source_of(node), pinned=pinned)
        op, args = _with_stated_dtype(op, args, types[0], add)
        types = _corrected(op, args, types, node)
        op = op if spec_for(_call(op, args)) is None or not why_opaque(_call(op, args), types) else OPAQUE + op
        values = tuple(add(op, args, types).outputs())
        self.values[node] = values if isinstance(outputs, tuple | list) else values[0]

    def _value_of(self, node: fx.Node) -> Any:
        found = self.values.get(node)
        if found is not None:
            return found
        value = node.meta.get("val")
        if isinstance(value, bool | int | float):
            return value
        raise _Refused(f"what it reads from {node.name} is not a tensor or a number")

    def _finish(self, name: str, training: bool) -> Graph | None:
        program, exported = self.exported.program, self.exported
        results = next(node for node in program.graph.nodes if node.op == "output").args[0]
        user: list[Result] = []
        written: list[tuple[str, Value]] = [(name, self._value_of(node)) for name, node in exported.updates]
        for result, spec in zip(cast(tuple[Any, ...], results), program.graph_signature.output_specs, strict=True):
            match spec.kind:
                case OutputKind.USER_OUTPUT | OutputKind.LOSS_OUTPUT:
                    user.append(self._value_of(result) if isinstance(result, fx.Node) else result)
                case OutputKind.BUFFER_MUTATION:
                    written.append((str(spec.target), self._value_of(result)))
                case _:
                    self._problem(
                        f"{spec.kind.name.lower().replace('_', ' ')} of {spec.target}",
                        None,
                        "forward may write to buffers only",
                    )
        user, replaced = user[: len(user) - len(exported.reassigned)], user[len(user) - len(exported.reassigned) :]
        updates = self._updates(written, dict(zip(exported.reassigned, replaced, strict=True)))
        if self.problems:
            return None
        tensors = iter(user)
        outputs = tuple(next(tensors) if repr(leaf) == "TENSOR" else leaf for leaf in exported.outputs)
        return self.builder.finish(
            name,
            training=training,
            inputs=self._input_values(),
            outputs=outputs,
            updates=updates,
            loss=find_loss(outputs, list(exported.output_structure.paths())),
            input_structure=exported.input_structure,
            output_structure=exported.output_structure,
        )

    def _updates(self, written: list[tuple[str, Value]], replaced: dict[str, Any]) -> tuple[tuple[str, Value], ...]:
        """New values of buffers, written in place or replaced, under the first name of each."""
        names = _canonical_names(self.model)
        for name, _ in written:
            if name.startswith(LOSS_PREFIX):
                advice = "a loss that changes buffers of its own: make it part of the model"
                self._problem(f"buffer {name}", None, advice)
        for name, value in replaced.items():
            buffer = _find_tensor(self.model, name)
            if len(names[name]) > 1 or value.type != tensor_type(buffer):
                self._problem(
                    f"buffer {name}", None, "forward puts another tensor there than fits its type and all its names: "
                    "write into it with copy_",
                )  # fmt: skip
        own = [(name.removeprefix(MODEL_PREFIX), value) for name, value in written if name.startswith(MODEL_PREFIX)]
        return tuple({**{names[name][0]: value for name, value in own}, **replaced}.items())

    def _input_values(self) -> tuple[Result, ...]:
        found: list[Result] = []
        for name, leaf in zip(self.exported.input_names, self.exported.inputs, strict=True):
            made = self.builder.leaf(f"input:{name}")
            found.append(Value(made) if isinstance(leaf, Tensor) and made is not None else leaf)
        return tuple(found)


def _canonical_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For every parameter and buffer name all names of that tensor, the first one first."""
    by_tensor: dict[int, list[str]] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: tuple(by_tensor[id(tensor)]) for name, tensor in named}


def _find_tensor(model: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    found = getattr(model.get_submodule(owner), last)
    assert isinstance(found, Tensor)
    return found


def _bytes_of(tensor: Any) -> bytes | None:
    """The values of a real tensor, row by row; None for one without values."""
    if not isinstance(tensor, Tensor) or tensor.is_meta or type(tensor) not in (Tensor, nn.Parameter):
        return None
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def _corrected(op: str, args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> tuple[TensorType, ...]:
    """The types that export states, but for what some torch releases state wrong about calls with several outputs.

    Those are outputs nobody reads, the states of an LSTM, which have a dim of size 1 too many, and new running
    statistics, which take the place of the old ones and so keep their dtype.
    """
    call = _call(op, args)
    spec = spec_for(call) if len(types) > 1 else None
    derived = output_types(spec, call) if spec is not None else types
    if len(derived) != len(types):
        return types
    return tuple(
        declared if op == _UPDATES or _unused(node, i) or _same_but_for_ones(stated, declared) else stated
        for i, (stated, declared) in enumerate(zip(types, derived, strict=True))
    )


def _call(op: str, args: tuple[Any, ...]) -> Call:
    return Call(op, map_tensors(op, args, lambda value: value.type))


def _with_stated_dtype(
    op: str, args: tuple[Any, ...], stated: TensorType, add: Callable[..., Node]
) -> tuple[str, tuple[Any, ...]]:
    """A call whose result has torch's default dtype, which may be another where the graph runs: it is written out.

    Either the operator takes a dtype, or its whole numbers become floats before it, as torch would make them.
    """
    call = _call(op, args)
    spec = spec_for(call)
    if spec is None or output_types(spec, call) == output_types(spec, call, torch.float64):
        return op, args

    def cast(value: Any) -> Any:
        dtype = value.type.dtype
        if dtype.is_floating_point or dtype.is_complex:
            return value
        made = TensorType(value.type.shape, stated.dtype)
        return Value(add("_to_copy", bind_args("_to_copy", (value,), {"dtype": stated.dtype}), (made,)))

    if op == "where.Scalar":
        numbers = [Value(add("scalar_tensor", bind_args("scalar_tensor", (number,), {"dtype": stated.dtype}),
                             (TensorType((), stated.dtype),))) for number in args[1:]]  # fmt: skip
        return "where.self", (args[0], *numbers)
    place = signature(op).position("dtype")
    if place >= 0:
        return op, (*args[:place], stated.dtype, *args[place + 1 :])
    names = [parameter.name for parameter in signature(op).parameters]
    return op, tuple(
        cast(value) if isinstance(value, Value) and name != "condition" else value
        for name, value in zip(names, args, strict=True)
    )


def _same_but_for_ones(a: TensorType, b: TensorType) -> bool:
    return a.dtype == b.dtype and [n for n in a.shape if n != 1] == [n for n in b.shape if n != 1]


_UPDATES = "_native_batch_norm_legit_functional"
"""Batch norm in training, which gives its buffers anew."""
_IDENTITY = "identity"
"""Stands for a call that hands its first argument on."""
Canonical = tuple[str, tuple[Any, ...], tuple[TensorType, ...]]


def canonical(op: str, args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """The form in which a call enters the graph, where that differs from what export emits."""
    spec = find_spec(op)
    if spec is not None and spec.one_dtype:
        dtypes = {value.type.dtype for _, value in walk_tensors(op, args) if value.type.dtype.is_floating_point}
        if len(dtypes) > 1:
            raise _Refused(f"it is given {' and '.join(sorted(map(str, dtypes)))}: convert one to the other")
    change = _CANONICAL.get(op)
    return change(args, types, node) if change else (op, args, types)


def _unused(node: fx.Node, index: int) -> bool:
    return all(user.target is operator.getitem and user.args[1] != index for user in node.users)


def _native_dropout(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """The operator the user's module calls, which draws as it does; the mask output is kept only where it is read."""
    return ("dropout", args, types[:1]) if _unused(node, 1) else ("native_dropout", args, types)


def _batch_norm_in_evaluation(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """The operator the user's module calls; the statistics among the outputs of this one depend on the device."""
    if not (_unused(node, 1) and _unused(node, 2)):
        raise _Refused("its second and third outputs are empty on some devices: do not use them")
    x, weight, bias, mean, variance, momentum, eps = args
    return "batch_norm", (x, weight, bias, mean, variance, False, momentum, eps, True), types[:1]


def _dropout(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Out of training nothing is dropped."""
    return ("dropout" if args[2] else _IDENTITY), args, types


def _cast(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Every way to ask for a dtype is one operator; where the dtype is there already, nothing is done."""
    if args[0].type.dtype == types[0].dtype:
        return _IDENTITY, args, types
    return "_to_copy", bind_args("_to_copy", (args[0],), {"dtype": types[0].dtype}), types


def _divided(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Division that rounds in no way is division."""
    op = operator_name(cast(OpOverload, node.target))
    return (op, args, types) if args[2] is not None else (op.removesuffix("_mode"), args[:2], types)


def _sized(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """A shape without -1, so that a piece's shape can take its place."""
    return "expand", bind_args("expand", (args[0], types[0].shape), {}), types


def _reshaped(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """One operator for every change of shape, blind to strides: those of a run may differ from those at capture."""
    return "reshape", (args[0], types[0].shape), types


def _copy(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """The target's values are overwritten: only its type counts, and whether it then gets a gradient of zeros."""
    source, kind = args[1], types[0]
    if _trains(args[0]) and kind.dtype.is_floating_point:
        return OVERWRITE, args[:2], types
    if source.type.shape == kind.shape:
        return "_to_copy", bind_args("_to_copy", (source,), {"dtype": kind.dtype}), types
    return "expand", bind_args("expand", (source, kind.shape), {}), (TensorType(kind.shape, source.type.dtype),)


def _trains(value: Value) -> bool:
    """Whether a value is made of parameters that are trained."""
    waiting, seen = [value], set[Value]()
    while waiting:
        owner = (found := waiting.pop()).owner
        if isinstance(owner, Leaf):
            if owner.trainable:
                return True
        elif found not in seen and owner.op != "detach":
            waiting += owner.inputs
        seen.add(found)
    return False


def _strided(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """By where elements lie in memory: where those of the operand lay at capture is written down with the call."""
    x, *src, size, stride, offset = args
    memory = cast(fx.Node, node.args[0]).meta["val"]
    if memory.storage_offset() or memory.untyped_storage().nbytes() != x.type.bytes:
        raise _Refused("its operand is a part of another tensor, whose memory a graph does not have: use slices")
    given = tuple(memory.stride())
    return (STRIDED_WRITE if src else STRIDED_VIEW), (x, *src, given, tuple(size), tuple(stride), offset or 0), types


def _embedding_bag(args: tuple[Any, ...], types: tuple[TensorType, ...], node: fx.Node) -> Canonical:
    """Bags of equal length, as `nn.EmbeddingBag` makes of a matrix of indices, are told from bags of any length."""
    weight, indices, offsets, scaled, mode, sparse, per_sample, last, padding = (*args, None)[:9]
    if scaled or sparse:
        raise _Refused("its scale_grad_by_freq and sparse options change the gradient: leave them off")
    length = _bag_length(indices, offsets)
    flat = indices.owner.args[0] if length else None
    if length and per_sample is None and not last:
        return EMBEDDING_BAG, (weight, flat, None, _BAG_MODES[mode], padding), types[:1]
    return (
        RAGGED_EMBEDDING_BAG,
        (weight, indices, offsets, per_sample, _BAG_MODES[mode], bool(last), padding),
        types[:1],
    )


def _bag_length(indices: Value, offsets: Value) -> int | None:
    """The bag length when the indices are a flattened matrix and the offsets count its rows."""
    flat, steps = indices.owner, offsets.owner
    if not (isinstance(flat, Node) and isinstance(steps, Node)):
        return None
    if flat.op not in ("view", "reshape") or not steps.op.startswith("arange"):
        return None
    rows = flat.args[0].type.shape
    names = [parameter.name for parameter in signature(steps.op).parameters]
    given = dict(zip(names, steps.args, strict=True))
    found = (given.get("start", 0), given["end"], given.get("step", 1))
    return rows[1] if len(rows) == 2 and found == (0, rows[0] * rows[1], rows[1]) else None


_RESHAPES = (
    "view", "reshape", "_unsafe_view", "flatten.using_ints", "unflatten.int", "view_as", "reshape_as", "ravel",
)  # fmt: skip
_CANONICAL: Mapping[str, Callable[[Any, Any, fx.Node], Canonical]] = {
    "native_dropout": _native_dropout,
    "_native_batch_norm_legit_no_training": _batch_norm_in_evaluation,
    "dropout": _dropout,
    **dict.fromkeys(_RESHAPES, _reshaped),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _sized),
    **dict.fromkeys((*CASTS, "_to_copy"), _cast),
    "copy": _copy,
    **dict.fromkeys(("as_strided", "as_strided_scatter"), _strided),
    **dict.fromkeys(("div.Tensor_mode", "div.Scalar_mode"), _divided),
    "embedding_bag.padding_idx": _embedding_bag,
    "embedding_bag": _embedding_bag,
}
