"""Random small graphs over many operators, random legal layouts for them, and one device to compare with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.ir import (
    LEAF,
    Choice,
    Graph,
    GraphBuilder,
    Leaf,
    LeafKind,
    Mark,
    Node,
    Plan,
    Structure,
    Value,
    choose,
    layout_fault,
    make_leaf,
    parallelize,
    plain_call,
    region_of,
    rules_for,
)
from conjoin.machine import Axis, Mesh
from conjoin.ops import (
    At,
    Call,
    Copies,
    Invariant,
    Layout,
    Placement,
    ShardingRule,
    Split,
    TensorType,
    bind_args,
    find_spec,
    make_layout,
    map_tensors,
    output_types,
    random_call,
    random_tensors,
    space_of,
    spec_for,
)
from conjoin.runtime import to_module
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.storage import Store

MESHES = tuple(
    Mesh(tuple(Axis(name, size) for name, size in zip("xyz", sizes, strict=False)))
    for sizes in ((2,), (3,), (2, 2), (2, 2), (2, 3), (2, 2, 2))
)
SEED = 11
"""Of what random operators draw, on one device and on many."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A graph with a model and inputs to run it on."""

    graph: Graph
    model: nn.Module
    inputs: tuple[Tensor, ...]


@dataclass(slots=True)
class Maker:
    """A graph as far as it is drawn, with the tensors of its leaves."""

    rng: Random
    builder: GraphBuilder = field(default_factory=GraphBuilder)
    model: nn.Module = field(default_factory=nn.Module)
    inputs: dict[Value, Tensor] = field(default_factory=dict)
    updates: list[tuple[str, Value]] = field(default_factory=list)

    def leaf(self, tensor: Tensor, kind: LeafKind | None = None) -> Value:
        """A new leaf with these values: of a drawn kind where they could be trained, else an input."""
        if kind is None:
            drawn = self.rng.choice([LeafKind.PARAMETER] * 4 + [LeafKind.INPUT, LeafKind.BUFFER, LeafKind.CONSTANT])
            kind = drawn if tensor.is_floating_point() else LeafKind.INPUT
        name = f"{kind.value}{len(self.inputs)}_{len(list(self.model.state_dict()))}_{self.rng.randrange(10**9)}"
        type = TensorType(tuple(tensor.shape), tensor.dtype)
        trainable = kind is LeafKind.PARAMETER and (not tensor.is_floating_point() or self.rng.random() < 0.9)
        data = tensor.detach().numpy().tobytes() if kind is LeafKind.CONSTANT else None
        value = self.builder.add_leaf(make_leaf(kind, name, type, trainable=trainable, data=data))
        match kind:
            case LeafKind.PARAMETER:
                self.model.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=trainable))
            case LeafKind.BUFFER:
                self.model.register_buffer(name, tensor.detach())
            case LeafKind.INPUT:
                self.inputs[value] = tensor.detach()
        return value

    def new(self, *shape: int, kind: LeafKind | None = None) -> Value:
        """A new leaf of random values."""
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        return self.leaf(torch.randn(shape, generator=generator, dtype=torch.float64), kind)

    def addresses(self, bound: int, *shape: int) -> Value:
        """A new input of numbers below a bound."""
        generator = torch.Generator().manual_seed(self.rng.randrange(2**31))
        return self.leaf(torch.randint(bound, shape, generator=generator))

    def calls(self, op: str, *args: Any, **kwargs: Any) -> tuple[Value, ...]:
        """All outputs of a call."""
        bound = bind_args(op, args, kwargs)
        call = Call(op, map_tensors(op, bound, lambda value: value.type))
        spec = spec_for(call)
        assert spec is not None, f"{op} is drawn in a form nobody declared"
        return tuple(self.builder.add_call(op, bound, output_types(spec, call)).outputs())

    def call(self, op: str, *args: Any, **kwargs: Any) -> Value:
        """The first output of a call."""
        return self.calls(op, *args, **kwargs)[0]

    def weighed(self, value: Value) -> Value:
        """A number that depends on every element in another way."""
        if value.type.dtype.is_complex:
            value = self.call("view_as_real", value)
        if value.type.dtype != torch.float64:
            value = self.call("_to_copy", value, dtype=torch.float64)
        weights = self.new(*value.type.shape, kind=LeafKind.INPUT)
        return self.call("sum", self.call("mul.Tensor", value, weights))

    def finish(self, loss: Value, *others: Value) -> Sample:
        """The graph that gives the loss and some more."""
        taken = Structure("tuple", (), (LEAF,) * len(self.inputs))
        none = Structure("tuple"), Structure("dict")
        graph = self.builder.finish(
            "random",
            training=True,
            inputs=tuple(self.inputs),
            outputs=(loss, *others),
            updates=tuple(self.updates),
            loss=0,
            input_structure=Structure("list", (), (taken, none[1], none[0], none[1])),
            output_structure=Structure("tuple", (), (LEAF,) * (1 + len(others))),
        )
        return Sample(graph, self.model, tuple(self.inputs.values()))


def one_operator(op: str, rng: Random) -> Sample:
    """A graph with one call of an operator, drawn by its declaration, and a loss that sees all of its outputs."""
    spec = find_spec(op)
    assert spec is not None
    call = random_call(spec, rng, op)
    tensors = random_tensors(spec, call, rng.randrange(2**31))
    maker = Maker(rng)
    leaves = iter([_leaf_for(maker, tensor) for tensor in tensors])
    outputs = maker.calls(op, *map_tensors(op, call.args, lambda _: next(leaves)))
    return maker.finish(_total(maker, outputs), *outputs)


def _leaf_for(maker: Maker, tensor: Tensor) -> Value:
    if tensor.requires_grad and not tensor.is_complex():
        return maker.leaf(tensor, maker.rng.choice([LeafKind.PARAMETER, LeafKind.PARAMETER, LeafKind.INPUT]))
    return maker.leaf(tensor, LeafKind.INPUT)


def _total(maker: Maker, values: tuple[Value, ...]) -> Value:
    total = maker.weighed(values[0])
    for value in values[1:]:
        total = maker.call("add.Tensor", total, maker.weighed(value))
    return total


# How a graph grows: each takes a value of the rank it is listed under and gives another.


def _linear(m: Maker, x: Value) -> Value:
    width = m.rng.randint(2, 7)
    bias = m.new(width) if m.rng.random() < 0.5 else None
    return m.call("linear", x, m.new(width, x.type.shape[-1]), bias)


def _matmul(m: Maker, x: Value) -> Value:
    *lead, k = x.type.shape
    other = m.new(*(lead[:-1] if m.rng.random() < 0.3 else ()), k, m.rng.randint(2, 6))
    return m.call("matmul", x, other)


def _scores(m: Maker, x: Value) -> Value:
    *_, _, k = x.type.shape
    return m.call("matmul", x, m.call("transpose.int", m.new(m.rng.randint(2, 5), k), 0, 1))


def _bmm(m: Maker, x: Value) -> Value:
    b, _, k = x.type.shape
    return m.call("bmm", x, m.new(b, k, m.rng.randint(2, 5)))


def _einsum(m: Maker, x: Value) -> Value:
    b, _, d = x.type.shape
    return m.call("einsum", "bsd,btd->bst", (x, m.new(b, m.rng.randint(2, 4), d)))


def _unary(m: Maker, x: Value) -> Value:
    return m.call(m.rng.choice(["tanh", "gelu", "sin", "sigmoid", "neg", "silu", "clone"]), x)


def _binary(m: Maker, x: Value) -> Value:
    shape = list(x.type.shape)
    while shape and m.rng.random() < 0.3:
        shape = shape[1:]
    shape = [1 if m.rng.random() < 0.15 else size for size in shape]
    return m.call(m.rng.choice(["add.Tensor", "mul.Tensor", "sub.Tensor"]), x, m.new(*shape))


def _scaled(m: Maker, x: Value) -> Value:
    return m.call(m.rng.choice(["mul.Tensor", "add.Tensor", "div.Tensor"]), x, 1.5)


def _itself(m: Maker, x: Value) -> Value:
    return m.call(m.rng.choice(["add.Tensor", "mul.Tensor"]), x, m.call("tanh", x))


def _softmax(m: Maker, x: Value) -> Value:
    return m.call("softmax.int", x, m.rng.randrange(len(x.type.shape)))


def _layer_norm(m: Maker, x: Value) -> Value:
    last = x.type.shape[-1:]
    if last[0] < 2:
        return x
    return m.call("layer_norm", x, last, m.new(*last), m.rng.choice([None, m.new(*last)]))


def _dropout(m: Maker, x: Value) -> Value:
    return m.call("dropout", x, 0.3, True)


def _permute(m: Maker, x: Value) -> Value:
    dims = list(range(len(x.type.shape)))
    m.rng.shuffle(dims)
    return m.call("permute", x, tuple(dims))


def _merge(m: Maker, x: Value) -> Value:
    shape = x.type.shape
    at = m.rng.randrange(len(shape) - 1)
    return m.call("reshape", x, (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]))


def _unmerge(m: Maker, x: Value) -> Value:
    shape = x.type.shape
    at = m.rng.randrange(len(shape))
    ways = [n for n in range(2, shape[at]) if shape[at] % n == 0]
    if not ways:
        return m.call("unsqueeze", x, at)
    first = m.rng.choice(ways)
    return m.call("reshape", x, (*shape[:at], first, shape[at] // first, *shape[at + 1 :]))


def _heads(m: Maker, x: Value) -> Value:
    """b s e -> attention over heads -> b s e, as transformers write it."""
    b, s, e = x.type.shape
    heads = next((n for n in (3, 2) if e % n == 0), 1)

    def split(value: Value) -> Value:
        return m.call("transpose.int", m.call("view", value, (b, s, heads, e // heads)), 1, 2)

    q, k, v = (split(m.call("linear", x, m.new(e, e))) for _ in range(3))
    causal = m.rng.random() < 0.5
    y = m.call("scaled_dot_product_attention", q, k, v, None, 0.0, causal)
    return m.call("reshape", m.call("transpose.int", y, 1, 2), (b, s, e))


def _split(m: Maker, x: Value) -> Value:
    dim = m.rng.randrange(len(x.type.shape))
    size = x.type.shape[dim]
    if size < 2:
        return x
    at = m.rng.randint(1, size - 1)
    first, second = m.calls("split_with_sizes", x, (at, size - at), dim)
    return m.call("cat", (second, m.call("tanh", first), second), dim) if m.rng.random() < 0.7 else first


def _slice(m: Maker, x: Value) -> Value:
    dim = m.rng.randrange(len(x.type.shape))
    size = x.type.shape[dim]
    return m.call("slice.Tensor", x, dim, m.rng.randint(0, size // 2), size, 1) if size > 2 else x


def _reduce(m: Maker, x: Value) -> Value:
    dim = m.rng.randrange(len(x.type.shape))
    return m.call(m.rng.choice(["sum.dim_IntList", "mean.dim"]), x, (dim,), m.rng.random() < 0.5)


def _expand(m: Maker, x: Value) -> Value:
    return m.call("expand", x, (m.rng.randint(2, 3), *x.type.shape))


def _pooled(m: Maker, x: Value) -> Value:
    op = m.rng.choice(["max_pool2d", "avg_pool2d"])
    kernel = min(3, x.type.shape[2]), min(2, x.type.shape[3])
    stride = m.rng.choice([(1, 1), (2, 2), (2, 1)])
    return m.call(op, x, kernel, stride, (kernel[0] // 2, m.rng.randint(0, kernel[1] // 2)))


def _conv(m: Maker, x: Value) -> Value:
    _, c, h, w = x.type.shape
    groups = m.rng.choice([g for g in (1, 2, 3) if c % g == 0])
    out = groups * m.rng.randint(1, 3)
    kernel = m.rng.randint(1, min(3, h + 2)), m.rng.randint(1, min(3, w))
    bias = m.new(out) if m.rng.random() < 0.5 else None
    stride = m.rng.randint(1, 2), m.rng.randint(1, 2)
    return m.call("conv2d", x, m.new(out, c // groups, *kernel), bias, stride, (1, 0), (1, 1), groups)


def _conv_transpose(m: Maker, x: Value) -> Value:
    c = x.type.shape[1]
    weight = m.new(c, m.rng.randint(1, 3), 3, 2)
    bias = m.new(weight.type.shape[1]) if m.rng.random() < 0.5 else None
    return m.call("conv_transpose2d.input", x, weight, bias, (2, 1), (1, 0))


def _batch_norm(m: Maker, x: Value) -> Value:
    c = x.type.shape[1]
    mean, var = m.new(c, kind=LeafKind.BUFFER), m.leaf(torch.ones(c, dtype=torch.float64), LeafKind.BUFFER)
    y, _, _, *moved = m.calls(
        "_native_batch_norm_legit_functional", x, m.new(c), m.new(c), mean, var, True, 0.1, 1e-5
    )
    m.updates += [(leaf.owner.name, value) for leaf, value in zip((mean, var), moved, strict=True)]  # type: ignore[union-attr]
    return y


Grow = Callable[[Maker, Value], Value]
_ANY: tuple[Grow, ...] = (_unary, _binary, _scaled, _itself)
_SHAPED: tuple[Grow, ...] = (_softmax, _layer_norm, _dropout, _unmerge, _split, _slice, _reduce, _linear, _binary)
_FLAT: tuple[Grow, ...] = (_permute, _merge, _matmul, _scores, _linear)
_BY_RANK: Mapping[int, tuple[Grow, ...]] = {
    0: _ANY,
    1: (*_ANY, *_SHAPED, _expand),
    2: (*_ANY, *_SHAPED, *_FLAT, _expand),
    3: (*_ANY, *_SHAPED, *_FLAT, _bmm, _einsum, _heads, _heads),
    4: (*_ANY, *_SHAPED, *_FLAT, _pooled, _conv, _conv, _conv_transpose, _batch_norm),
}


def _start(m: Maker) -> Value:
    match m.rng.randrange(4):
        case 0:
            table = m.new(m.rng.randint(4, 9), m.rng.choice([4, 6]))
            words = m.addresses(table.type.shape[0], m.rng.randint(2, 5), m.rng.randint(3, 7))
            return m.call("embedding", table, words)
        case 1:
            return m.new(m.rng.randint(2, 4), m.rng.randint(2, 4), m.rng.randint(5, 8), m.rng.randint(4, 7))
        case 2:
            return m.new(m.rng.randint(2, 4), m.rng.randint(3, 7), m.rng.choice([4, 6]))
        case _:
            return m.new(m.rng.randint(3, 8), m.rng.randint(3, 8))


def _loss(m: Maker, x: Value) -> Value:
    shape = x.type.shape
    kind = m.rng.choice(["weighed", "mse", "entropy", "mean"])
    if kind == "entropy" and len(shape) >= 2 and shape[-1] > 1:
        rows = x if len(shape) == 2 else m.call("reshape", x, (x.type.num_elements // shape[-1], shape[-1]))
        labels = m.addresses(shape[-1], rows.type.shape[0])
        return m.call("cross_entropy_loss", rows, labels, None, m.rng.choice([1, 2]), 0)
    if kind == "mse":
        return m.call("mse_loss", x, m.new(*shape, kind=LeafKind.INPUT))
    if kind == "mean":
        return m.call("mean", m.call("mul.Tensor", x, m.new(*shape)))
    return m.weighed(x)


def chain(rng: Random) -> Sample:
    """A graph of several operators, some values of which are read twice."""
    m = Maker(rng)
    value = m.call("add.Tensor", _start(m), m.new(1, kind=LeafKind.INPUT))
    made = [value]
    for _ in range(rng.randint(2, 6)):
        value = rng.choice(_BY_RANK[min(len(value.type.shape), 4)])(m, value)
        if value.type.num_elements > 3000 or len(value.type.shape) > 4:
            value = m.call("sum.dim_IntList", value, (0,), False)
        alike = [other for other in made if other.type == value.type and other != value]
        if alike and rng.random() < 0.4:
            value = m.call("add.Tensor", value, rng.choice(alike))
        made.append(value)
    total = _loss(m, value)
    if rng.random() < 0.4:
        total = m.call("add.Tensor", total, m.weighed(rng.choice(made)))
    return m.finish(total, *rng.sample(made, 1))


# Layouts.


def fits(types: tuple[TensorType, ...], layouts: tuple[Layout, ...], mesh: Mesh) -> bool:
    """Whether tensors can lie so at all."""
    return all(layout_fault(t.laid_out(layout), mesh) is None for t, layout in zip(types, layouts, strict=True))


def rules_at(node: Node, size: int) -> list[ShardingRule]:
    """The ways to run a node at one place of an axis of a size."""
    num = len(node.inputs), len(node.types)
    return [ShardingRule(None, (At(place),) * num[0], (At(place),) * num[1]) for place in range(size)]


def random_choice(node: Node, mesh: Mesh, rng: Random, places: float = 0.0) -> Choice:
    """A rule for every axis, drawn among those that the sizes allow; axes nest in a drawn order.

    On each axis the node is with this probability at one place.
    """
    call = plain_call(node)
    spec = spec_for(call)
    sizes = space_of(spec, call).sizes if spec else {}
    rules = rules_for(call, len(node.types))
    outputs = tuple(type.laid_out(()) for type in node.types)
    ways: dict[str, int] = {}
    taken: dict[str, ShardingRule] = {}
    for axis in rng.sample(mesh.names, len(mesh.names)):
        if places and rng.random() < places:
            taken[axis] = rng.choice(rules_at(node, mesh.sizes[axis]))
            continue
        for rule in rng.sample(rules, len(rules)):
            index = rule.index or ""
            total = ways.get(index, 1) * mesh.sizes[axis]
            choice = choose({**taken, axis: rule})
            if rule.index is not None and total > sizes[index]:
                continue
            if fits(call.tensors, choice.operands, mesh) and fits(outputs, choice.outputs, mesh):
                ways[index] = total
                taken[axis] = rule
                break
    return choose(taken)


def random_layout(type: TensorType, mesh: Mesh, rng: Random, allowed: tuple[Placement, ...]) -> Layout:
    """Any of the placements allowed or a split on every axis, as far as the sizes go."""
    entries: list[tuple[str, Placement]] = []
    options = [*allowed, *(Split(dim) for dim in range(len(type.shape)))]
    for axis in rng.sample(mesh.names, len(mesh.names)):
        added = make_layout([*entries, (axis, rng.choice(options))])
        if layout_fault(type.laid_out(added), mesh) is None:
            entries = list(added)
    return make_layout(entries)


def _leaf_layout(leaf: Leaf, mesh: Mesh, rng: Random, places: float = 0.0) -> Layout:
    kept: tuple[Placement, ...] = (Invariant(), Copies()) if leaf.kind is LeafKind.INPUT else (Invariant(),)
    if places and leaf.type.shape and rng.random() < places:
        axis = rng.choice(mesh.names)
        confined = make_layout([(axis, At(rng.randrange(mesh.sizes[axis])))])
        rest = random_layout(leaf.type, mesh, rng, kept)
        return make_layout([*(entry for entry in rest if entry[0] != axis), *confined])
    return random_layout(leaf.type, mesh, rng, kept)


def random_plan(graph: Graph, mesh: Mesh, rng: Random, places: float = 0.0) -> Plan:
    """The graph in random legal layouts, some nodes and leaves at one place of an axis; the loss is I."""
    leaves = {leaf: _leaf_layout(leaf, mesh, rng, places) for leaf in graph.leaves}
    choices = {node: random_choice(node, mesh, rng, places) for node in graph.nodes}
    outputs = {
        i: random_layout(value.type, mesh, rng, (Invariant(), Copies()))
        for i, value in enumerate(graph.outputs)
        if i != graph.loss and isinstance(value, Value)
    }
    mark = Mark("random", "")
    return Plan(parallelize(graph, leaves, choices, outputs), mesh, mark, mark, "drawn")


# One device and many.


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step leaves: outputs, the gradient of every parameter, the new buffers."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def _outcome(module: nn.Module, results: Any) -> Outcome:
    outputs = results if isinstance(results, tuple) else (results,)
    if outputs[0].requires_grad:
        outputs[0].backward()  # type: ignore[no-untyped-call]
    found = {name: parameter.grad for name, parameter in module.named_parameters()}
    gradients = {name: None if x is None else x.as_subclass(Tensor) for name, x in found.items()}
    for parameter in module.parameters():
        parameter.grad = None
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return Outcome(tuple(output.as_subclass(Tensor).detach() for output in outputs), gradients, buffers)


def on_one_device(sample: Sample) -> Outcome:
    """A step of the graph as it is; the model keeps its buffers."""
    kept = {name: buffer.clone() for name, buffer in sample.model.named_buffers()}
    torch.manual_seed(SEED)
    module = to_module(sample.graph, sample.model)
    outcome = _outcome(module, module(*sample.inputs))
    for name, buffer in kept.items():
        sample.model._buffers[name] = buffer
    return outcome


def on_ranks(plan: Plan, sample: Sample) -> list[Outcome]:
    """A step of the plan on every rank, ranks being threads."""

    def program(communicator: Any) -> Outcome:
        store = Store(plan, communicator.rank, torch.device("cpu"))
        store.fill(sample.model)
        module = ParallelModule(plan, store, communicator, exact_seed=SEED)
        return _outcome(module, module(*sample.inputs))

    return run_ranks(plan.mesh, program)


def differences(plan: Plan, got: list[Outcome], want: Outcome) -> list[str]:
    """Where a rank has something else than its part of what one device has."""
    found: list[str] = []
    layouts = {leaf.name: leaf.type.layout for leaf in plan.graph.leaves}
    outputs = [value.type.layout for value in plan.graph.outputs if isinstance(value, Value)]

    def compare(what: str, mine: Tensor | None, whole: Tensor | None, layout: Layout, rank: int) -> None:
        if mine is None or whole is None:
            given = whole if mine is None else mine
            if given is not None and given.abs().max() > TOLERANCE:
                found.append(f"rank {rank}: {what} is {'missing' if mine is None else 'there'}")
            return
        region = region_of(tuple(whole.shape), layout, plan.mesh, rank)
        part = whole[tuple(slice(*span) for span in region)]
        if mine.shape != part.shape:
            found.append(f"rank {rank}: {what} has shape {tuple(mine.shape)} instead of {tuple(part.shape)}")
        elif not torch.allclose(mine, part, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            found.append(f"rank {rank}: {what} is off by {(mine - part).abs().max().item():.3g}")

    for rank, mine in enumerate(got):
        for i, layout in enumerate(outputs):
            compare(f"output {i}", mine.outputs[i], want.outputs[i], layout, rank)
        for name, gradient in want.gradients.items():
            compare(f"the gradient of {name}", mine.gradients[name], gradient, layouts[name], rank)
        for name, buffer in want.buffers.items():
            compare(f"buffer {name}", mine.buffers[name], buffer, layouts[name], rank)
    return found


TOLERANCE = 1e-9
