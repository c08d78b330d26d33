"""`to_module`: a graph as an `nn.Module` again, by generated code, over the model's own parameters and buffers."""

from __future__ import annotations

import linecache
import operator
from collections import ChainMap
from collections.abc import Callable, Mapping, MutableMapping, Set
from typing import Any

import torch
from torch import Tensor, fx, nn

from conjoin.errors import GraphError, UsageError
from conjoin.frontends.torch_private import flatten_tree, spec_of, unflatten_tree
from conjoin.ir import Graph, Leaf, LeafKind, Node, Value, fingerprint, from_json, to_json, verify
from conjoin.ops import Kind, TensorType, find_operator, signature

Slot = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter or buffer."""
_GRAPH_TEXT = "conjoin graph"
"""Under this the graph of a saved module is found."""


def run_pinned(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call with autocast switched off."""
    device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
    if not torch.is_autocast_enabled(device):
        return function(*args, **kwargs)
    with torch.autocast(device, enabled=False):
        return function(*args, **kwargs)


def run_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *attributes: Any,
) -> tuple[Tensor, None, None, Tensor, Tensor]:
    """Batch norm by the operator users call, which takes the device's own kernels; new statistics beside its output."""
    mean, var = mean.clone(), var.clone()
    training, momentum, eps = attributes
    y = torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, torch.backends.cudnn.enabled)
    return y, None, None, mean, var


def _function_of(node: Node, read: Set[Value]) -> Callable[..., Any]:
    """What runs a call: the operator itself, but for batch norm where nobody reads its saved statistics."""
    is_batch_norm = node.op == "_native_batch_norm_legit_functional" and read.isdisjoint(tuple(node.outputs())[1:3])
    return run_batch_norm if is_batch_norm else find_operator(node.op)


def _emit_call(
    program: fx.Graph, node: Node, values: MutableMapping[Value, fx.Node], device: fx.Node, function: Callable[..., Any]
) -> fx.Node:
    """One call: the function on the values of the arguments, on the caller's device where it makes a tensor."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    read = _as_written(program, node, values) if node.pinned else values
    for parameter, argument in zip(signature(node.op).parameters, node.args, strict=True):
        value = _resolve(argument, read)
        if parameter.name == "device" and not node.inputs:
            value = device
        if not parameter.keyword_only:
            positional.append(list(value) if parameter.kind is Kind.TENSORS and value is not None else value)
        elif value is not None:
            keywords[parameter.name] = value
    if node.pinned:
        return program.call_function(run_pinned, (function, *positional), keywords)  # type: ignore[arg-type]
    return program.call_function(function, tuple(positional), keywords)


def _as_written(program: fx.Graph, node: Node, values: MutableMapping[Value, fx.Node]) -> Mapping[Value, fx.Node]:
    """What a pinned call reads, in the dtypes written: an autocast around the program may have made others."""
    open_to_autocast = [v for v in node.inputs if isinstance(v.owner, Node) and not v.owner.pinned]
    casts = {
        v: program.call_function(torch.ops.aten.to.dtype, (values[v], v.type.dtype))
        for v in dict.fromkeys(open_to_autocast)
        if v.type.dtype.is_floating_point
    }
    return ChainMap(casts, values) if casts else values


def _resolve(argument: Any, values: Mapping[Value, fx.Node]) -> Any:
    if isinstance(argument, Value):
        return values[argument]
    return tuple(_resolve(item, values) for item in argument) if isinstance(argument, tuple) else argument


def emit_program(graph: Graph, state: tuple[Leaf, ...]) -> fx.Graph:
    """The graph as FX: `forward(self, state, device, *inputs)` returns the outputs, then the new values of buffers."""
    program = fx.Graph()
    stored, device = program.placeholder("state"), program.placeholder("device")
    values: dict[Value, fx.Node] = {}
    for i, leaf in enumerate(graph.leaves_of(LeafKind.INPUT)):
        values[Value(leaf)] = program.placeholder(f"input_{i}")
    for i, leaf in enumerate(state):
        values[Value(leaf)] = program.call_function(operator.getitem, (stored, i))
    read = graph.users.keys() | {output for output in graph.outputs if isinstance(output, Value)}
    for node in graph.nodes:
        made = _emit_call(program, node, values, device, _function_of(node, read))
        outputs = tuple(node.outputs())
        single = signature(node.op).num_outputs == 1 and not signature(node.op).returns_list
        for i, value in enumerate(outputs):
            values[value] = made if single else program.call_function(operator.getitem, (made, i))
    results = [values[output] if isinstance(output, Value) else output for output in graph.outputs]
    program.output((*results, *(values[value] for _, value in graph.updates)))
    return program


def compile_program(program: fx.Graph, name: str) -> Callable[..., tuple[Any, ...]]:
    """Turn FX into a Python function; its text can be seen in tracebacks and debuggers."""
    code = program.python_code("self")
    filename = f"<conjoin {name}>"
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, filename, "exec"), namespace)  # text made by torch.fx from operators looked up by name
    return namespace["forward"]  # type: ignore[no-any-return]


def _find_slot(model: nn.Module, name: str) -> Slot | None:
    owner, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return None
    return (module, last) if _read((module, last)) is not None else None


def _read(slot: Slot) -> Tensor | None:
    """The parameter or buffer in its dictionary: an attribute of that name may be something else."""
    module, name = slot
    found = module._parameters.get(name)
    return module._buffers.get(name) if found is None else found


def _slots(model: nn.Module, leaf: Leaf) -> tuple[Slot, ...]:
    """Where the model holds the tensor of a leaf: once for every name it has."""
    found: list[Slot] = []
    for name in (leaf.name, *leaf.aliases):
        slot = _find_slot(model, name)
        tensor = _read(slot) if slot else None
        if slot is None or tensor is None:
            raise _mismatch(leaf, "the model has no tensor of that name" if name == leaf.name else f"{name} is missing")
        type = TensorType(tuple(tensor.shape), tensor.dtype)
        if type != TensorType(leaf.type.shape, leaf.type.dtype):
            raise _mismatch(leaf, f"the model's is {type}")
        if found and tensor is not _read(found[0]):
            raise _mismatch(leaf, f"{name} is another tensor in the model, where the graph has one under both names")
        found.append(slot)
    return tuple(found)


def _mismatch(leaf: Leaf, why: str) -> UsageError:
    return UsageError(
        f"The graph needs {leaf} of type {leaf.type}, but {why}. The graph was captured from another model or another "
        f"dtype. Capture this model again, or pass the model the graph came from."
    )


def _constant(model: nn.Module, leaf: Leaf) -> Tensor:
    """A constant's values: those in the graph, else the model's attribute of that name."""
    if leaf.data is not None:
        empty = torch.empty(leaf.type.shape, dtype=leaf.type.dtype)
        if leaf.data:
            empty = torch.frombuffer(bytearray(leaf.data), dtype=leaf.type.dtype).reshape(leaf.type.shape).clone()
        return empty
    owner, _, name = leaf.name.rpartition(".")
    try:
        found = getattr(model.get_submodule(owner), name)
    except AttributeError:
        found = None
    if not isinstance(found, Tensor) or TensorType(tuple(found.shape), found.dtype) != leaf.type:
        raise _mismatch(leaf, "the graph was captured without its values and the model has no such attribute")
    return found


class CapturedModule(nn.Module):
    """A graph that runs on one device: the model's own submodules, parameters and buffers under a generated forward."""

    graph: Graph
    code: str
    """The generated forward as Python text."""
    _program: Callable[..., tuple[Any, ...]]
    _sources: tuple[Slot | str, ...]
    """Where the value of each leaf is found: in a module, or among the constants."""
    _targets: tuple[tuple[Slot, ...], ...]
    """Where the new value of each buffer goes."""
    _constants: dict[str, Tensor]
    _input_spec: Any
    _output_spec: Any

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        super().__init__()
        # The shell shares the model's dictionaries: names and state_dict are the model's own.
        for store in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[store] = model.__dict__[store]
        self.training = graph.training
        self.__dict__["_constants"] = {leaf.name: _constant(model, leaf) for leaf in graph.leaves_of(LeafKind.CONSTANT)}
        self._prepare(graph)

    def _prepare(self, graph: Graph) -> None:
        """Make all that follows from the graph; past `__setattr__`, as a submodule may have any of these names."""
        kept = tuple(leaf for leaf in graph.leaves if leaf.kind is not LeafKind.INPUT)
        slots = {leaf: _slots(self, leaf) for leaf in kept if leaf.kind is not LeafKind.CONSTANT}
        places = {leaf.name: slots[leaf] for leaf in slots if leaf.kind is LeafKind.BUFFER}
        program = emit_program(graph, kept)
        self.__dict__.update(
            graph=graph,
            code=program.python_code("self").src,
            _program=compile_program(program, f"{graph.name} {fingerprint(graph)[:12]}"),
            _sources=tuple(slots[leaf][0] if leaf in slots else leaf.name for leaf in kept),
            _targets=tuple(places[name] for name, _ in graph.updates),
            _input_spec=spec_of(graph.input_structure),
            _output_spec=spec_of(graph.output_structure),
        )

    def __getstate__(self) -> dict[str, Any]:
        """The module's own state and the graph as text; the rest is made anew."""
        made = ("graph", "code", "_program", "_sources", "_targets", "_input_spec", "_output_spec")
        kept = {key: value for key, value in self.__dict__.items() if key not in made}
        return {**kept, _GRAPH_TEXT: to_json(self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        text = state.pop(_GRAPH_TEXT)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare(from_json(text))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CapturedModule:
        state = (LeafKind.PARAMETER, LeafKind.BUFFER)
        for dtype in {leaf.type.dtype for leaf in self.graph.leaves if leaf.kind in state}:
            wanted = fn(torch.empty(0, dtype=dtype)).dtype
            if wanted != dtype:
                raise UsageError(
                    f"The captured {self.graph.name} was asked to change from {dtype} to {wanted}. A graph holds the "
                    f"dtypes it was captured with. Change the original model and capture it again."
                )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def train(self, mode: bool = True) -> CapturedModule:
        """Only the captured mode: dropout and batch norm were fixed when the graph was made."""
        if mode != self.graph.training:
            wanted, have = ("training", "eval") if mode else ("eval", "training")
            raise UsageError(
                f"A graph captured in {have} mode was asked to switch to {wanted} mode. Dropout and batch norm are "
                f"part of the graph. Call model.{'train' if mode else 'eval'}() on the original model and capture "
                f"it again."
            )
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph: the inputs as the model takes them, then what the loss takes; or the batch as captured."""
        inputs = [x for x in self._arrange(args, kwargs) if isinstance(x, Tensor)]
        for tensor, leaf in zip(inputs, self.graph.leaves_of(LeafKind.INPUT), strict=True):
            kind = leaf.type
            if tuple(tensor.shape) != kind.shape or tensor.dtype != kind.dtype:
                raise self._refuse(
                    f"it was captured for {kind} where {tensor.dtype} of shape {tuple(tensor.shape)} came"
                )
        results = self._program(self, self._state(inputs[0].device), inputs[0].device, *inputs)
        self._write_back(results[len(self.graph.outputs) :])
        return unflatten_tree(list(results[: len(self.graph.outputs)]), self._output_spec)

    def _state(self, device: torch.device) -> list[Tensor | None]:
        state: list[Tensor | None] = []
        for source in self._sources:
            if isinstance(source, str):
                if self._constants[source].device != device:
                    self._constants[source] = self._constants[source].to(device)
                state.append(self._constants[source])
            else:
                state.append(_read(source))
        return state

    def _write_back(self, values: tuple[Tensor, ...]) -> None:
        """Give buffers their new values: as new tensors, since the old ones may be needed for the gradients."""
        for slots, value in zip(self._targets, values, strict=True):
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                first, name = slots[0]
                first._buffers[name].copy_(value)  # type: ignore[union-attr] # one made in this mode is never trained
                continue
            made = value.detach()
            for module, name in slots:
                module._buffers[name] = made

    def _arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The flattened inputs in the captured order, from arguments or from one batch object."""
        candidates = [(args, kwargs)]
        if len(args) == 1 and not kwargs:
            whole = args[0]
            candidates += [((), dict(whole))] if isinstance(whole, Mapping) else []
            candidates += [(tuple(whole), {})] if isinstance(whole, tuple | list) else []
        for positional, named in candidates:
            leaves, spec = flatten_tree(self._deal(positional, named))
            if spec == self._input_spec and self._fixed_match(leaves):
                return leaves
        names = [leaf.name for leaf in self.graph.leaves_of(LeafKind.INPUT)]
        raise self._refuse(
            f"it takes {', '.join(names)}, as captured; {len(args)} positional and {sorted(kwargs)} came"
        )

    def _deal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        taken, named, _, loss_named = self.graph.input_structure.children
        count = len(taken.children)
        for_model = {str(key): kwargs[str(key)] for key in named.keys if key in kwargs}
        for_loss = {str(key): kwargs[str(key)] for key in loss_named.keys if key in kwargs}
        unknown = {key: value for key, value in kwargs.items() if key not in for_model and key not in for_loss}
        return [tuple(args[:count]), {**for_model, **unknown}, tuple(args[count:]), for_loss]

    def _fixed_match(self, leaves: list[Any]) -> bool:
        fixed = zip(leaves, self.graph.inputs, strict=True)
        return all(
            isinstance(leaf, Tensor) if isinstance(want, Value) else type(leaf) is type(want) and leaf == want
            for leaf, want in fixed
        )

    def _refuse(self, why: str) -> UsageError:
        return UsageError(
            f"The captured {self.graph.name} was called with other inputs: {why}. A graph holds the shapes and plain "
            f"values it was captured with. Call it like that, or capture the model again with this batch."
        )


def to_module(graph: Graph, model: nn.Module) -> CapturedModule:
    """The graph as a module over `model`'s own parameters and buffers: same names, same outputs, same gradients.

    >>> from conjoin.frontends import capture
    >>> model = nn.Linear(4, 2)
    >>> x = torch.ones(3, 4)
    >>> torch.equal(to_module(capture(model, x), model)(x), model(x))
    True
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"A {type(model).__name__} was given instead of the model. The module runs over the model's own "
            f"parameters. Pass the nn.Module the graph was captured from."
        )
    try:
        return CapturedModule(verify(graph), model)
    except LookupError as error:
        raise GraphError(
            f"The graph {graph.name!r} cannot run here: it needs {error}. An operator or an output class is not known "
            f"to this process. Import the library that defines it first."
        ) from None
