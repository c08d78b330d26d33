"""From an exported FX graph to our graph: leaves named as the user named them, operators in canonical form."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, cast

import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch._ops import OpOverload

from conjoin.frontends.canonical_forms import IDENTITY, Refused, canonical, unused
from conjoin.frontends.folded_constants import LITERAL
from conjoin.frontends.known_shapes import known_results, read_at_indices, takes_values
from conjoin.frontends.loss_output import find_loss
from conjoin.frontends.problems import LOSS_PREFIX, MODEL_PREFIX, Problem, source_of
from conjoin.frontends.torch_export import Exported
from conjoin.frontends.torch_private import PINNED, InputKind, OutputKind, memory_of
from conjoin.ir import MAX_CONSTANT_BYTES, Graph, GraphBuilder, LeafKind, Node, Result, Source, Value, make_leaf
from conjoin.ops import (
    CAST,
    OPAQUE,
    Call,
    TensorType,
    bind_args,
    call_on,
    operator_name,
    output_types,
    signature,
    spec_for,
    why_opaque,
)

_CHECKS = (
    "_assert_tensor_metadata",
    "_assert_async.msg",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range_for_size",
)
_IMAGE_RANK = 4
_UPDATES = "_native_batch_norm_legit_functional"
"""Batch norm in training, which gives its buffers anew."""
_NORM = "linalg_vector_norm"


def has_channels_last(tensor: Tensor) -> bool:
    """Whether the channels of images lie last in memory, and nothing else can be said of them."""
    last = tensor.dim() == _IMAGE_RANK and tensor.is_contiguous(memory_format=torch.channels_last)
    return last and not tensor.is_contiguous()


def tensor_type(value: Any) -> TensorType:
    """The type of a (fake) tensor."""
    if not isinstance(value, Tensor):
        raise Refused(f"it returns a {type(value).__name__}, and a graph holds tensors only")
    if not all(isinstance(size, int) for size in value.shape):
        raise Refused("the shape of its result depends on tensor values: use fixed shapes")
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
                    self.values[node] = self._add_input(next(tensors), node.meta["val"])
                case _:
                    self._problem(f"input of kind {spec.kind.name.lower()}", None, "only tensors can be captured")

    def _add_input(self, name: str, tensor: Any) -> Value:
        return self._add(LeafKind.INPUT, name, tensor_type(tensor), channels_last=has_channels_last(tensor))

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
            channels_last=has_channels_last(tensor),
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
            if takes_values(op, args):
                op, args = self._with_known_values(node, op, args)
            op, args, types = canonical(op, args, types, node)
        except Refused as refused:
            self._lose(node, str(refused))
            return
        if op == IDENTITY:
            self.values[node] = args[0]
            return
        pinned = bool(node.meta.get("custom", {}).get(PINNED))
        add = partial(self.builder.add_call, source=source_of(node), pinned=pinned)
        op, args = _with_stated_dtype(op, args, types[0], add)
        types = _corrected(op, args, types, node)
        op = op if spec_for(_call(op, args)) is None or not why_opaque(_call(op, args), types) else OPAQUE + op
        values = tuple(add(op, args, types).outputs())
        self.values[node] = values if isinstance(outputs, tuple | list) else values[0]

    def _with_known_values(self, node: fx.Node, op: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """A call whose shape may depend on values, for those that are known: constants, or a call at indices."""

        numbers = count()

        def constant(tensor: Tensor) -> Value:
            name = f"{LITERAL}_{node.name}_{next(numbers)}"
            return self._add(LeafKind.CONSTANT, name, tensor_type(tensor), data=_bytes_of(tensor))

        known = known_results(op, args)
        if known is not None:
            made = tuple(map(constant, known))
            return IDENTITY, (made if isinstance(node.meta.get("val"), tuple | list) else made[0],)
        return read_at_indices(op, args, constant)

    def _value_of(self, node: fx.Node) -> Any:
        found = self.values.get(node)
        if found is not None:
            return found
        value = node.meta.get("val")
        if isinstance(value, bool | int | float):
            return value
        raise Refused(f"what it reads from {node.name} is not a tensor or a number")

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
        self.builder.forget_unread((*outputs, *(value for _, value in updates)))
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
    """The types that export states, but for what some torch releases state wrong.

    Of calls with several outputs those are outputs nobody reads, the states of an LSTM, which have a dim of size 1 too
    many, and new running statistics, which take the place of the old ones and so keep their dtype. A norm over a dim of
    size 1 keeps that dim, and so does what is made of it.
    """
    call = _call(op, args)
    known = {tensor_type(n.meta["val"]) for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)}
    misled = op == _NORM or not known.issuperset(call.tensors)
    spec = spec_for(call) if len(types) > 1 or misled else None
    derived = output_types(spec, call) if spec is not None else types
    if len(derived) != len(types):
        return types
    return tuple(
        declared if op == _UPDATES or unused(node, i) or _same_but_for_ones(stated, declared) else stated
        for i, (stated, declared) in enumerate(zip(types, derived, strict=True))
    )


def _call(op: str, args: tuple[Any, ...]) -> Call:
    return call_on(op, args, lambda value: value.type)


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
        return Value(add(CAST, bind_args(CAST, (value,), {"dtype": stated.dtype}), (made,)))

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
