"""The graph of a model for a batch of other sizes, made of the one that was captured, without capturing again.

    graph of (batch 32)  ×  model called on stand-ins of batch 32 and of batch 5   gives   graph of (batch 5), or None

Both calls are written down, operator by operator. Only where they are the same ones on the same tensors, in the same
order, with the same numbers but for sizes, is the graph taken over: forward then takes the same way for both batches.
What a size became is what it became in the calls: a node whose operator stands among them has its sizes from there;
of any other every way to replace its sizes is tried, and one alone may give a shape that was seen. Wherever that is
not so, or a size is or becomes 0 or 1, which operators may take for something else, the answer is None.

A graph of the other mode is taken over likewise, where nothing in it is told the mode: the model is called in both.

What capture found out from values is asked again: whether the mask of an attention says nothing, or is causal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from logging import getLogger
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from conjoin.frontends.dealt_batch import Batch
from conjoin.frontends.folded_constants import MAX_ELEMENTS, seen_under
from conjoin.frontends.known_values import KnownValues
from conjoin.frontends.lowering import has_channels_last
from conjoin.frontends.torch_export import AutocastRegions, StepCall, is_plain, neutral
from conjoin.frontends.torch_private import disable_current_modes, has_alias_info, pretend_exporting, quiet
from conjoin.ir import Graph, Leaf, LeafKind, Node, Rewriting, Value, find_faults, make_node, retype
from conjoin.ops import Args, Call, Kind, TensorType, map_tensors, output_types, signature, types_on_meta

_log = getLogger(__name__)
_SIZES = frozenset({
    "size", "shape", "sizes", "split_size", "split_sizes", "start", "end", "length", "repeats", "index", "stride",
    "dim_size", "output_size",
})  # fmt: skip
"""Names of parameters that may be others for another batch."""
_MODES = ("train", "training", "dropout_p", "use_input_stats")
"""Names of parameters by which an operator is told the mode, or does something in one only."""
_LITERALS = (torch.tensor, torch.as_tensor)
_MOST_WAYS = 64
_RESULT = ""
Shape = tuple[int, ...]


def resize(
    graph: Graph, model: nn.Module, batch: Batch, loss: Callable[..., Any] | None, autocast: AutocastRegions
) -> Graph | None:
    """The graph of a model without values for another batch, after the one it has for the batch of a graph.

    >>> from conjoin.frontends import capture
    >>> model = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(0, 1)).to("meta")
    >>> graph = capture(model, torch.zeros(8, 4))
    >>> made = resize(graph, model, torch.zeros(5, 4, device="meta"), None, ())
    >>> made == capture(model, torch.zeros(5, 4)), made.outputs[0].type.shape
    (True, (10, 3))
    """
    try:
        return _resized(graph, model, StepCall(model, batch, loss), autocast)
    except Exception as error:  # also what stand-ins cannot do that forward asks of them: capture tells of that
        _log.debug("%s is captured again: %s: %s", graph.name, type(error).__name__, error)
        return None


class _Differs(Exception):
    """More than sizes differs, and what does."""


def _resized(graph: Graph, model: nn.Module, call: StepCall, autocast: AutocastRegions) -> Graph:
    inputs = _inputs(graph, call)
    _check_constants(graph)
    old, new = zip(*inputs.values(), strict=True)
    with _in_mode(model, graph):
        before = _record(call, model, old, autocast)
    after = _record(call, model, new, autocast)
    then, now = ([repr(x) if is_plain(x) else type(x) for x in outputs] for outputs, *_ in call.seen[-2:])
    _, structure, reassigned, changed = call.seen[-1]
    if then != now or structure != call.seen[-2][1] or reassigned or changed:
        raise _Differs("what forward returns beside tensors, or changes")
    _check_masks(graph, before, after)
    made = _Resizing(graph, {leaf: new for leaf, (_, new) in inputs.items()}, _Comparison(before, after).run()).run()
    made = made if made.training == model.training else replace(made, training=model.training)
    faults = find_faults(made)
    if faults:
        raise _Differs(str(faults[0]))
    return made


@contextmanager
def _in_mode(model: nn.Module, graph: Graph) -> Iterator[None]:
    """The model in the mode of a graph, where that is another one and no operator of it is told which."""
    modes = {module: module.training for module in model.modules()} if model.training != graph.training else {}
    told = [node.op for node in graph.nodes if modes and any(node.call[name] for name in _MODES)]
    if told:
        raise _Differs(f"what {told[0]} does in the other mode")
    try:
        for module in modes:
            module.training = graph.training
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _inputs(graph: Graph, call: StepCall) -> dict[Leaf, tuple[Tensor, Tensor]]:
    """For every input of the graph stand-ins as large as it is, and as large as it is to be."""
    if call.structure != graph.input_structure or len(call.leaves) != len(graph.inputs):
        raise _Differs("how the batch is nested")
    found: dict[Leaf, tuple[Tensor, Tensor]] = {}
    for value, given in zip(graph.inputs, call.leaves, strict=True):
        if not isinstance(value, Value) or not isinstance(given, Tensor):
            if isinstance(value, Value) or type(value) is not type(given) or value != given:
                raise _Differs(f"the plain value {given!r} of the batch")
            continue
        leaf = value.owner
        if not isinstance(leaf, Leaf) or leaf in found or not _alike(leaf, given):
            raise _Differs("the dtype, the rank or the memory order of an input")
        shapes = leaf.type.shape, tuple(given.shape)
        if not all(a == b or min(a, b) > 1 for a, b in zip(*shapes, strict=True)):
            raise _Differs(f"a size that is or was none or a single one, of {leaf}")
        order = torch.channels_last if leaf.channels_last else torch.contiguous_format
        old, new = (torch.empty(shape, dtype=given.dtype, device="meta", memory_format=order) for shape in shapes)
        found[leaf] = old.requires_grad_(given.requires_grad), new.requires_grad_(given.requires_grad)
    return found


def _alike(leaf: Leaf, given: Tensor) -> bool:
    is_ordered = has_channels_last(given) if leaf.channels_last else given.is_contiguous()
    return leaf.type.dtype == given.dtype and len(leaf.type.shape) == given.dim() and is_ordered


def _check_constants(graph: Graph) -> None:
    """Constants are to be numbers, which calls show; a table of them may have been made for the sizes of the batch."""
    tables = [str(leaf) for leaf in graph.leaves_of(LeafKind.CONSTANT) if leaf.type.shape]
    if tables:
        raise _Differs(f"perhaps the constant {tables[0]}")


@dataclass(slots=True)
class _Record:
    """The calls of operators in one run, and what was told of masks and of literals on the way."""

    calls: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)
    masks: list[str | None] = field(default_factory=list)
    literals: list[str] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)
    """Tensors of this run that no operator makes: what the model is called on, and literals."""


class _Calls:
    """Runs what is called and writes it down; tensors are held, so that each is one object.

    What equal calls make is alike, and is worked out once: layers of a model are much alike.
    """

    def __init__(self, record: _Record) -> None:
        self._record = record
        self._made: dict[Any, list[tuple[Shape, Shape, torch.dtype]]] = {}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            result = self._result(func, args, kwargs)
        self._record.calls.append((func, args, kwargs, result))
        return result

    def _result(self, func: Any, args: Any, kwargs: Any) -> Any:
        key = _call_key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key not in self._made:
            result = func(*args, **kwargs)
            made = result if isinstance(result, tuple) else (result,)
            if all(isinstance(tensor, Tensor) and tensor.is_meta for tensor in made):
                self._made[key] = [(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in made]
            return result
        alike = [torch.empty_strided(*of, dtype=dtype, device="meta") for *of, dtype in self._made[key]]
        return tuple(alike) if len(func._schema.returns) > 1 else alike[0]


def _call_key(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a new tensor that a call makes depends on; None of calls that make views, or write."""
    if has_alias_info(func):
        return None
    told: list[Any] = [func, *kwargs]
    for arg in (*args, *kwargs.values()):
        for item in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(item, Tensor) and not item.is_meta:
                return None
            is_tensor = isinstance(item, Tensor)
            told.append((item.shape, item.stride(), item.dtype) if is_tensor else (type(item), item))
        told.append(len(arg) if isinstance(arg, list | tuple) else -1)
    return tuple(told)


class _Asked(TorchFunctionMode):
    """Asks of masks what they hide, and writes down literals."""

    def __init__(self, record: _Record, known: KnownValues) -> None:
        super().__init__()
        self._record, self._known = record, known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LITERALS:
            self._record.literals.append(repr((args, kwargs)))
            result = func(*args, **{**kwargs, "device": "meta"})
            self._record.own.append(result)
            with disable_current_modes():
                self._known.note(result, func(*args, **{**kwargs, "device": "cpu"}))
            return result
        if func is functional.scaled_dot_product_attention:
            self._note(*args, **kwargs)
            with self._known.unnoted():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(
        self, query: Tensor, key: Tensor, _: Tensor, attn_mask: Tensor | None = None, *rest: Any, **more: Any
    ) -> None:
        if attn_mask is None:
            return
        known = self._known.value(attn_mask)
        with disable_current_modes():
            self._record.masks.append(None if known is None else seen_under(known, query.shape[-2], key.shape[-2]))


def _record(call: StepCall, model: nn.Module, tensors: tuple[Tensor, ...], autocast: AutocastRegions) -> _Record:
    """Call model and loss on stand-ins without values, and write down what they call."""
    record = _Record(own=list(tensors))
    known = KnownValues(MAX_ELEMENTS, _Calls(record).run)
    step = call.step(model, autocast, known)
    with quiet(), neutral(), pretend_exporting(), torch.device("meta"), _Asked(record, known):
        step(*tensors)
    return record


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What sizes became."""

    given: Mapping[tuple[str, str], dict[Any, set[Any]]]
    """For operators and their parameters: what was given for them, and what was then."""
    single: Mapping[int, set[int]]
    """For a size by itself what it became wherever it stood."""
    shapes: frozenset[tuple[Shape, Shape]]
    """The shapes of tensors, then and now."""


class _Comparison:
    """Two runs, call by call: what sizes became."""

    def __init__(self, before: _Record, after: _Record) -> None:
        self._before, self._after = before, after
        self._numbers = tuple({id(x): i for i, x in enumerate(record.own)} for record in (before, after))
        self._given: dict[tuple[str, str], dict[Any, set[Any]]] = {}
        self._single: dict[int, set[int]] = {}
        self._shapes: set[tuple[Shape, Shape]] = set()

    def run(self) -> _Sizes:
        if len(self._before.calls) != len(self._after.calls) or self._before.literals != self._after.literals:
            raise _Differs("how many operators are called, or a literal")
        for (func, args, kwargs, result), (other, *given, other_result) in zip(
            self._before.calls, self._after.calls, strict=True
        ):
            if func is not other or len(args) != len(given[0]) or kwargs.keys() != given[1].keys():
                raise _Differs(f"which operator is called: {func}, {other}")
            operator = func.name().partition("::")[2]
            names = [argument.name for argument in func._schema.arguments]
            for name, x, y in zip(names, args, given[0], strict=False):
                self._note(x, y, operator, name)
            for name in kwargs:
                self._note(kwargs[name], given[1][name], operator, name)
            self._note(result, other_result, operator, _RESULT)
        return _Sizes(self._given, self._single, frozenset(self._shapes))

    def _note(self, x: Any, y: Any, operator: str, name: str) -> None:
        """Two arguments have to be the same but for sizes, which are noted."""
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            self._note_tensors(x, y, operator, is_made=name == _RESULT)
        elif name in _SIZES and _are_sizes(x) and _are_sizes(y) and type(x) is type(y):
            self._given.setdefault((operator, name), {}).setdefault(_key(x), set()).add(_key(y))
            self._note_sizes(_flat(x), _flat(y), operator)
        elif isinstance(x, list | tuple) and type(x) is type(y) and len(x) == len(y):
            for mine, its in zip(x, y, strict=True):
                self._note(mine, its, operator, name)
        elif type(x) is not type(y) or repr(x) != repr(y):
            raise _Differs(f"{name} of {operator}: {x}, {y}")

    def _note_tensors(self, x: Tensor, y: Tensor, operator: str, is_made: bool) -> None:
        """Two tensors have to be made by the same call, or be one: a parameter is the same in both runs."""
        is_new = id(x) not in self._numbers[0]
        mine, its = (each.setdefault(id(t), len(each)) for each, t in zip(self._numbers, (x, y), strict=True))
        if is_new and not is_made and x.is_meta and x is not y:
            raise _Differs(f"which tensor {operator} reads")
        if mine != its or x.dtype != y.dtype or x.dim() != y.dim() or x.is_meta != y.is_meta:
            raise _Differs(f"a tensor that {operator} reads or makes")
        if not x.is_meta and not torch.equal(x, y):
            raise _Differs(f"the values of a tensor that {operator} reads")
        self._shapes.add((tuple(x.shape), tuple(y.shape)))
        self._note_sizes(tuple(x.shape), tuple(y.shape), operator)

    def _note_sizes(self, x: Shape, y: Shape, operator: str) -> None:
        if len(x) != len(y):
            raise _Differs(f"how many sizes {operator} takes")
        for a, b in zip(x, y, strict=True):
            if a != b and min(a, b) < 2:
                raise _Differs(f"a size of {operator} that is or was none or a single one")
            self._single.setdefault(a, set()).add(b)


def _are_sizes(x: Any) -> bool:
    return type(x) is int or (isinstance(x, list | tuple) and all(type(item) is int for item in x))


def _key(x: Any) -> Any:
    return tuple(x) if isinstance(x, list | tuple) else x


def _flat(x: Any) -> tuple[int, ...]:
    return tuple(x) if isinstance(x, list | tuple) else (x,)


def _check_masks(graph: Graph, before: _Record, after: _Record) -> None:
    """Every mask that capture left away, as it hides nothing or the future alone, has to do so now."""
    attentions = (node.call for node in graph.nodes if node.op == "scaled_dot_product_attention")
    kept = sum(call["attn_mask"] is not None for call in attentions)
    if before.masks != after.masks or kept != sum(seen not in ("all", "past") for seen in before.masks):
        raise _Differs(f"what masks hide, or what is known of it: {before.masks[:1]}, {after.masks[:1]}")


class _Resizing:
    """The graph for other sizes as far as it is built."""

    def __init__(self, graph: Graph, inputs: Mapping[Leaf, Tensor], sizes: _Sizes) -> None:
        self._graph, self._sizes, self._inputs = graph, sizes, inputs
        self._made = Rewriting(graph, self._leaf)
        self._known: dict[Any, tuple[Args, tuple[TensorType, ...]]] = {}

    def run(self) -> Graph:
        for node in self._graph.nodes:
            args = map_tensors(node.op, node.args, lambda value: self._made.values[value])
            found = self._call(node, Call(node.op, map_tensors(node.op, args, lambda value: value.type)))
            self._add(node, args, *found)
        return self._made.finish()

    def _leaf(self, leaf: Leaf) -> Leaf:
        return (
            retype(leaf, TensorType(tuple(self._inputs[leaf].shape), leaf.type.dtype)) if leaf in self._inputs else leaf
        )

    def _add(self, node: Node, args: Args, sized: Args, types: tuple[TensorType, ...]) -> None:
        parameters = signature(node.op).parameters
        chosen = tuple(s if p.kind is Kind.ATTRIBUTE else x for p, s, x in zip(parameters, sized, args, strict=True))
        made = make_node(node.op, chosen, types, occurrence=node.occurrence, pinned=node.pinned)
        self._made.builder.add_node(made, self._graph.source_of(node))
        self._made.values.update(zip(node.outputs(), made.outputs(), strict=True))

    def _call(self, node: Node, call: Call) -> tuple[Args, tuple[TensorType, ...]]:
        """The arguments of a node and what it makes, for other sizes; the same for equal calls."""
        key = node.call, node.types, call
        if key not in self._known:
            self._known[key] = self._found(node, call)
        return self._known[key]

    def _found(self, node: Node, call: Call) -> tuple[Args, tuple[TensorType, ...]]:
        ways: dict[Args, tuple[TensorType, ...]] = {}
        for args in self._ways(node, call.args):
            types = _types(Call(node.op, args), node)
            if types is not None and self._were_seen(node, types):
                ways[args] = types
        if len(ways) != 1:
            raise _Differs(f"{node.op} of {node.types[0]}, which may become {len(ways)} things")
        return next(iter(ways.items()))

    def _ways(self, node: Node, args: Args) -> Iterator[Args]:
        """The arguments with every way to replace sizes among them."""
        parameters = signature(node.op).parameters
        choices = [
            self._choices(node.op, p.name, arg) if p.name in _SIZES and _are_sizes(arg) else (arg,)
            for p, arg in zip(parameters, args, strict=True)
        ]
        count = 1
        for choice in choices:
            count *= len(choice)
        return iter(product(*choices)) if 0 < count <= _MOST_WAYS else iter(())

    def _choices(self, op: str, name: str, arg: Any) -> tuple[Any, ...]:
        known = self._sizes.given.get((op, name), {}).get(arg)
        if known is not None:
            return tuple(known)
        single = [sorted(self._sizes.single.get(size, {size})) for size in _flat(arg)]
        made = tuple(product(*single))
        return made if isinstance(arg, tuple) else tuple(way[0] for way in made)

    def _were_seen(self, node: Node, types: tuple[TensorType, ...]) -> bool:
        """Whether what a node with sizes makes has shapes that became one another in the calls."""
        if not any(p.name in _SIZES for p in signature(node.op).parameters):
            return True
        return all((old.shape, new.shape) in self._sizes.shapes for old, new in zip(node.types, types, strict=True))


def _types(call: Call, node: Node) -> tuple[TensorType, ...] | None:
    """What a call makes; None where it cannot be, or is of another kind than a node."""
    try:
        types = types_on_meta(call) if node.spec is None else output_types(node.spec, call)
    except Exception:  # sizes that do not fit each other
        return None
    if types is None or [t.dtype for t in types] != [t.dtype for t in node.types]:
        return None
    return types if all(len(a.shape) == len(b.shape) for a, b in zip(types, node.types, strict=True)) else None
