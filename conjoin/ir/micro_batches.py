"""A step in micro-batches, one after the other: gradients and losses of the parts add up to those of the batch.

That is a split of the batch along an axis of *time*, on which the algebra of layouts says what is legal: inputs are
S(0), parameters B, the loss comes out as P. Nothing can be sent between times, so no operator may need a reshard along
this axis. What depends on the batch alone, such as how many targets count, is there as a whole at any time.

What is made of parameters and constants alone is whole, too. Where it has one entry for every sample, as a class token
that is spread over a batch, a micro-batch makes its part of it; where it is added to a sum over samples, as a penalty
to a loss, every micro-batch adds an equal share.

The graph of one micro-batch is a graph like any other: each operator in its local form on a piece of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from conjoin.errors import StrategyError
from conjoin.ir.accumulation import WHOLE, Accumulation
from conjoin.ir.builder import GraphBuilder, is_random
from conjoin.ir.expansion import can_expand, drop_unused, expand
from conjoin.ir.graph import Graph
from conjoin.ir.legality import plain_call, rules_for
from conjoin.ir.nodes import Leaf, LeafKind, Node, Value, make_leaf, make_node, retype
from conjoin.ir.structure import LEAF
from conjoin.ops import (
    PIPELINE,
    Call,
    Copies,
    Invariant,
    Partial,
    Placement,
    ShardingRule,
    Split,
    TensorType,
    bind_args,
    call_cache,
    call_on,
    map_tensors,
    output_types,
    run_local,
    space_of,
    spec_for,
    why_opaque,
)

_ADDING = ("add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "rsub.Scalar")
_BATCH_NORM = "_native_batch_norm_legit_functional"
_FEWER = "Use fewer micro-batches, or none"
_OTHERWISE = (
    "Take what needs them out of the loss, or do without micro-batches: strategies that split the batch over devices "
    "only, as fsdp, do; and with part= in the place of micro= what works on samples apart runs in micro-batches, and "
    "the rest on the whole batch"
)


def cut_in_micro_batches(graph: Graph, steps: int, *, own_statistics: bool = False) -> tuple[Graph, Accumulation]:
    """The graph of one of so many micro-batches; StrategyError where the step cannot be taken so.

    With `own_statistics` batch norm takes those of each micro-batch, as in a loop over them, and buffers change with
    every one; otherwise a step means the same as that of the whole batch.
    """
    _check(graph, steps, own_statistics)
    expandable = {node for node in graph.nodes if can_expand(node) and not (own_statistics and _has_statistics(node))}
    expanded = expand(graph, expandable)
    work = Cutting(expanded, steps, 0)
    made = work.run()
    if not work.is_same_all_over:
        other = _first_other(made, Cutting(expanded, steps, steps - 1).run())
        why = f"{other} is not the same for every part of a batch"
        raise _refusal(graph, steps, why, _OTHERWISE)
    return made, Accumulation(steps, tuple(leaf.name for leaf in work.cut), tuple(work.whole_names(made)))


def _first_other(graph: Graph, other: Graph) -> str:
    """The first call of a graph that the other has not, and where it stands."""
    there = set(other.nodes)
    node = next((node for node in graph.nodes if node not in there), None)
    return "what its operators do" if node is None else f"what {node.op}{_where(graph, node)} makes"


def _where(graph: Graph, node: Node) -> str:
    source = graph.source_of(node)
    return f" ({source.module or source.file}:{source.line})" if source else ""


def _at_once(node: Node) -> str:
    """Why a node has to have the whole batch."""
    if node.spec is not None:
        return "needs all samples at once"
    reason = why_opaque(node.call, tuple(type.laid_out(()) for type in node.types))
    return f"is given all samples at once: {reason or 'its declaration does not cover this form'}"


def _has_statistics(node: Node) -> bool:
    """Whether a node takes statistics of a batch, beside what it makes of every sample."""
    return node.op == _BATCH_NORM


def _check(graph: Graph, steps: int, own_statistics: bool) -> None:
    outputs = [value for value in graph.outputs if isinstance(value, Value)]
    if not graph.training or graph.loss is None or len(outputs) != 1 or len(graph.input_structure.children) != 4:
        why = "micro-batches give a loss and nothing else, and it is not trained like that"
        raise _refusal(graph, steps, why, "Plan it in training, with loss=, as loss=lambda output: output.loss")
    if graph.updates and not own_statistics:
        names = ", ".join(name for name, _ in graph.updates[:2])
        advice = (
            "Use norms of one sample, as group norm, or a pipeline, where every micro-batch has its own statistics, or "
            "part= in the place of micro=, which runs in micro-batches only what works on samples apart"
        )
        raise _refusal(graph, steps, f"it takes statistics of a whole batch ({names})", advice)


def _refusal(graph: Graph, steps: int, why: str, advice: str = _FEWER) -> StrategyError:
    return StrategyError(
        f"A step of {graph.name} was to be taken in {steps} micro-batches. That cannot be: {why}. {advice}."
    )


def _cut_inputs(graph: Graph, steps: int) -> tuple[Leaf, ...]:
    """The inputs that have the batch: the size that the leading dims of most inputs share."""
    inputs = [leaf for leaf in graph.leaves_of(LeafKind.INPUT) if leaf.type.shape]
    size = Counter(leaf.type.shape[0] for leaf in inputs).most_common(1)[0][0] if inputs else 0
    if size < steps or size % steps:
        fits = max((n for n in range(1, steps) if size and size % n == 0), default=1)
        advice = f"Use {fits} micro-batches, or a batch of a multiple of {steps} samples"
        raise _refusal(graph, steps, f"a batch of {size} has no {steps} equal parts", advice)
    return tuple(leaf for leaf in inputs if leaf.type.shape[0] == size)


class Cutting:
    """The graph of one micro-batch as far as it is built; or, `inside` of one, a part of it that runs in some."""

    def __init__(self, graph: Graph, steps: int, number: int, *, inside: bool = False) -> None:
        self.graph, self.steps, self.number, self._inside = graph, steps, number, inside
        self.cut = _cut_inputs(graph, steps)
        self.is_same_all_over = True
        """Whether the last micro-batch does what this one does, as far as it is built."""
        self.builder = self._builder = GraphBuilder()
        self._placed: dict[Value, Placement] = {}
        """Along the axis of time."""
        self._parts: dict[Value, Value] = {}
        self._wholes: dict[Value, Value] = {}
        """What is there as a whole: of parameters and constants, and of the batch where nothing else is in it."""
        self._made: dict[tuple[Value, Placement], Value | None] = {}
        """Of what is only there as a whole, what a micro-batch makes itself of it; None where it cannot."""
        self._whole_leaves: dict[Leaf, Leaf] = {}
        self._of_batch = {Value(leaf) for leaf in self.cut}
        self._learned = {Value(leaf) for leaf in graph.leaves if leaf.trainable}
        for leaf in graph.leaves:
            self._add_leaf(leaf)

    def run(self) -> Graph:
        results = (*self.graph.outputs, *(value for _, value in self.graph.updates))
        read = {value for node in self.graph.nodes for value in node.inputs}.union(results)
        for node in self.graph.nodes:
            if not is_random(node.op, node.args) or not read.isdisjoint(node.outputs()):
                self._add(node)  # what is drawn for nothing is left: every micro-batch draws from a stream of its own
        loss = next(value for value in self.graph.outputs if isinstance(value, Value))
        if not self._reads(loss, Partial()):
            raise _refusal(self.graph, self.steps, "its loss is not a sum over the samples of a batch", _OTHERWISE)
        self._parts[loss] = self._part(loss, Partial())
        for name, value in self.graph.updates:
            if value in self._placed or value in self._of_batch:
                why = f"the buffer {name} is made of all samples of a batch"
                raise _refusal(self.graph, self.steps, why, _OTHERWISE)
        return self._finish(loss)

    def whole_names(self, made: Graph) -> list[tuple[str, str]]:
        kept = {leaf.name for leaf in made.leaves_of(LeafKind.INPUT)}
        return [(new.name, old.name) for old, new in self._whole_leaves.items() if new.name in kept]

    def _add_leaf(self, leaf: Leaf) -> None:
        if leaf not in self.cut:
            self._wholes[Value(leaf)] = self._builder.add_leaf(leaf)
            return
        if self._inside:
            whole = self._wholes[Value(leaf)] = self._builder.add_leaf(leaf)
            self._parts[Value(leaf)] = self._call(None, PIPELINE, whole, 0, self.steps)
            self._placed[Value(leaf)] = Split(0)
            return
        part = retype(leaf, _shrunk(leaf, self.steps))
        self._parts[Value(leaf)], self._placed[Value(leaf)] = self._builder.add_leaf(part), Split(0)
        apart = make_leaf(leaf.kind, leaf.name + WHOLE, leaf.type, channels_last=leaf.channels_last)
        self._whole_leaves[leaf], self._wholes[Value(leaf)] = apart, Value(apart)

    def add_whole(self, node: Node, wholes: Mapping[Value, Value]) -> None:
        """Add a node as it is, of what is there as a whole."""
        args = map_tensors(node.op, node.args, wholes.__getitem__)
        whole = make_node(node.op, args, node.types, occurrence=node.occurrence, pinned=node.pinned)
        self._builder.add_node(whole, self.graph.source_of(node))
        self._wholes.update(zip(node.outputs(), whole.outputs(), strict=True))

    def add_apart(self, node: Node) -> bool:
        """Add a node for a micro-batch, or as it is where nothing of one is in it; False if it needs all samples."""
        if self._can_be_whole(node):
            self.add_whole(node, self._wholes)
        if not any(value in self._placed for value in node.inputs):
            return all(value in self._wholes for value in node.outputs())
        rule = self._rule(node)
        if rule is None and self._take_rows(node):
            return True
        if rule is None or any(not isinstance(p, Split) for p in rule.outputs):
            return all(value in self._wholes for value in node.outputs())
        try:
            self._emit(node, rule)
        except StrategyError:
            return False
        return True

    def part(self, value: Value) -> tuple[Value, Placement] | None:
        """What a micro-batch has of a value, and how; None where it is not made in micro-batches."""
        return (self._parts[value], self._placed[value]) if value in self._placed else None

    def whole(self, value: Value) -> Value | None:
        """A value as a whole, where it is there."""
        return self._wholes.get(value)

    def call(self, op: str, *given: Any) -> Value:
        """Add a call of an operator that is declared."""
        made: Value = self._call(None, op, *given)
        return made

    def _add(self, node: Node) -> None:
        if _has_statistics(node) and self._placed.get(node.inputs[0]) == Split(0):
            self._emit_with_statistics(node)  # also where nothing is learned before it, and the whole batch is there
            return
        if self._can_be_whole(node):
            self.add_whole(node, self._wholes)
        if not any(value in self._placed for value in node.inputs):
            if any(value not in self._wholes for value in node.outputs()):
                self._draw(node)
            return
        rule = self._rule(node)
        if rule is not None:
            self._emit(node, rule)
        elif self._take_rows(node) or self._add_share(node):
            return
        elif any(value not in self._wholes for value in node.outputs()):
            raise self._cannot(node, _at_once(node))

    def _add_share(self, node: Node) -> bool:
        """A number that is added to a sum over samples, as to a loss: every micro-batch adds an equal share."""
        if node.op not in _ADDING or not all(self._placed.get(value) == Partial() for value in node.inputs):
            return False
        if len(node.inputs) != 1 or isinstance(node.args[1], Value) or not node.types[0].dtype.is_floating_point:
            return False
        made = self._call(node, node.op, self._parts[node.inputs[0]], node.args[1] / self.steps, *node.args[2:])
        self._parts[Value(node)], self._placed[Value(node)] = made, Partial()
        return True

    def _take_rows(self, node: Node) -> bool:
        """`x[arange(batch), places]`, one row of every sample: a micro-batch takes those of its samples."""
        if node.op != "index.Tensor" or len(node.args[1]) != 2 or not _counts_up(node.args[1][0]):
            return False
        x, (count, places) = node.args[0], node.args[1]
        both = isinstance(places, Value) and self._placed.get(x) == self._placed.get(places) == Split(0)
        if not both or len(places.type.shape) != 1 or count.type.shape[0] != x.type.shape[0]:
            return False
        part, rest = self._parts[x], x.type.shape[2:]
        rows = self._call(node, "remainder.Scalar", self._parts[places], x.type.shape[1])  # counted from the end, too
        rows = self._call(node, "reshape", rows, (part.type.shape[0], 1, *(1 for _ in rest)))
        rows = self._call(node, "expand", rows, (part.type.shape[0], 1, *rest))
        taken = self._call(node, "gather", part, 1, rows)
        self._parts[Value(node)], self._placed[Value(node)] = self._call(node, "squeeze.dim", taken, 1), Split(0)
        return True

    def _draw(self, node: Node) -> None:
        """Random numbers of which every sample has its own: a micro-batch draws those of its samples."""
        size = self.cut[0].type.shape[0]
        rules = [rule for rule in self._rules(node) if all(p == Split(0) for p in rule.outputs)]
        rule = next((rule for rule in rules if all(map(self._reads, node.inputs, rule.operands))), None)
        if rule is None or node.types[0].shape[0] != size:
            draws = is_random(node.op, node.args)
            why = "draws random numbers that all samples share" if draws else _at_once(node)
            raise self._cannot(node, why)
        self._emit(node, rule)

    def _can_be_whole(self, node: Node) -> bool:
        """Whether what a node makes is there as a whole: of the batch alone, or of all but the batch."""
        if is_random(node.op, node.args) or any(value not in self._wholes for value in node.inputs):
            return False
        of_batch = any(value in self._of_batch for value in node.inputs)
        learned = any(value in self._learned for value in node.inputs)
        self._of_batch.update(node.outputs() if of_batch else ())
        self._learned.update(node.outputs() if learned else ())
        return not (of_batch and learned)

    def _cannot(self, node: Node, why: str) -> StrategyError:
        return _refusal(self.graph, self.steps, f"{node.op}{_where(self.graph, node)} {why}", _OTHERWISE)

    def _rule(self, node: Node) -> ShardingRule | None:
        """The way in which a node works on a part of the batch, with what is there; rather split than summed up, and
        rather with what is there in parts than with what is made into some."""

        def rank(rule: ShardingRule) -> tuple[int, int]:
            pairs = zip(node.inputs, rule.operands, strict=True)
            made = sum(not isinstance(p, Copies) and self._placed.get(v) != p for v, p in pairs)
            return sum(isinstance(p, Partial) for p in rule.outputs), made

        return min((rule for rule in self._rules(node) if self._suits(node, rule)), key=rank, default=None)

    def _rules(self, node: Node) -> tuple[ShardingRule, ...]:
        """The ways in which a node makes one part after the other, all alike."""
        return _rules_in(self.steps, plain_call(node), len(node.types))

    def _suits(self, node: Node, rule: ShardingRule) -> bool:
        pairs = list(zip(node.inputs, rule.operands, strict=True))
        return any(self._placed.get(v) == p for v, p in pairs) and all(self._reads(v, p) for v, p in pairs)

    def _reads(self, value: Value, wanted: Placement) -> bool:
        if isinstance(wanted, Copies):
            return value in self._wholes
        if value in self._placed:
            return self._placed[value] == wanted
        return self._part_of_whole(value, wanted) is not None

    def _part(self, value: Value, wanted: Placement) -> Value:
        if isinstance(wanted, Copies):
            return self._wholes[value]
        made = self._parts[value] if value in self._placed else self._part_of_whole(value, wanted)
        assert made is not None, "it was read so"
        return made

    def _part_of_whole(self, value: Value, wanted: Placement) -> Value | None:
        """A part of what is there as a whole alone: where every sample has one, as when something is spread over the
        batch; or an equal share of what is added to a sum."""
        if (value, wanted) not in self._made:
            self._made[value, wanted] = None
            if value in self._wholes and wanted == Partial() and value.type.dtype.is_floating_point:
                whole = self._wholes[value]
                self._made[value, wanted] = self._call(None, "div.Tensor", whole, self.steps)
            elif value in self._wholes and isinstance(wanted, Split) and isinstance(value.owner, Node):
                self._made[value, wanted] = self._made_again(value, value.owner, wanted)
        return self._made[value, wanted]

    def _made_again(self, value: Value, node: Node, wanted: Placement) -> Value | None:
        for rule in self._rules(node):
            if rule.outputs[value.index] == wanted and all(map(self._reads, node.inputs, rule.operands)):
                return self._local(node, rule)[value.index]
        return None

    def _emit(self, node: Node, rule: ShardingRule) -> None:
        self._parts.update(zip(node.outputs(), self._local(node, rule), strict=True))
        self._placed.update(zip(node.outputs(), rule.outputs, strict=True))

    def _local(self, node: Node, rule: ShardingRule) -> tuple[Value, ...]:
        """What a node makes of one micro-batch."""
        call, spec = plain_call(node), spec_for(plain_call(node))
        parts = [self._part(v, p) for v, p in zip(node.inputs, rule.operands, strict=True)]
        if rule.index is None or spec is None:
            feed = iter(parts)
            made: Any = self._call(node, node.op, *map_tensors(node.op, node.args, lambda _: next(feed)))
            return made if isinstance(made, tuple) else (made,)
        size = space_of(spec, call).sizes[rule.index] // self.steps
        types = tuple(part.type for part in parts)
        piece, last = ((rule.index, i * size, (i + 1) * size) for i in (self.number, self.steps - 1))
        try:
            form = _local_form(call, piece, types)
            self.is_same_all_over &= _are_alike(call, piece, last, types)
        except _Undeclared as error:
            raise self._cannot(node, f"calls {error} in a form nobody declared") from None
        values = dict(zip(map(Value, form.leaves), parts, strict=True))
        for one in form.nodes:
            args, source = map_tensors(one.op, one.args, values.__getitem__), self.graph.source_of(node)
            again = self._builder.add_call(one.op, args, one.types, source, pinned=node.pinned)
            values.update(zip(one.outputs(), again.outputs(), strict=True))
        return tuple(values[value] for value in form.outputs if isinstance(value, Value))

    def _emit_with_statistics(self, node: Node) -> None:
        """A batch norm of a micro-batch, by its own statistics; what it notes of them is for buffers alone."""
        args = map_tensors(node.op, node.args, lambda v: self._parts[v] if v in self._placed else self._wholes[v])
        call = call_on(node.op, args, lambda value: value.type)
        spec = spec_for(call)
        assert spec is not None, "batch norm is declared"
        made = self._builder.add_call(
            node.op, args, output_types(spec, call), self.graph.source_of(node), pinned=node.pinned
        )
        self._parts.update(zip(node.outputs(), made.outputs(), strict=True))
        self._placed[Value(node)] = Split(0)

    def _call(self, node: Node | None, op: str, *given: Any) -> Any:
        bound = bind_args(op, given, {})
        call = call_on(op, bound, lambda value: value.type)
        declared = spec_for(call)
        if declared is None:
            assert node is not None, f"{op} is declared"
            raise self._cannot(node, f"calls {op} in a form nobody declared")
        source = None if node is None else self.graph.source_of(node)
        pinned = node is not None and node.pinned
        made = self._builder.add_call(op, bound, output_types(declared, call), source, pinned=pinned)
        outputs = tuple(made.outputs())
        return outputs if len(outputs) > 1 else outputs[0]

    def _finish(self, loss: Value) -> Graph:
        """The boundary of the old graph; inputs that are read as a whole come after those of the loss."""
        old = self.graph
        read = {value.owner for node in self._needed(loss) for value in node.inputs}
        wholes = [new for new in self._whole_leaves.values() if new in read]
        for new in wholes:
            self._builder.add_leaf(new)
        given: list[Any] = [self._given(value) for value in old.inputs]
        children = old.input_structure.children
        place = sum(child.num_leaves for child in children[:3])
        given[place:place] = [Value(new) for new in wholes]
        for_loss = replace(children[2], children=(*children[2].children, *(LEAF for _ in wholes)))
        structure = replace(old.input_structure, children=(*children[:2], for_loss, children[3]))
        made = self._builder.finish(
            old.name,
            training=True,
            inputs=tuple(given),
            outputs=tuple(self._parts[v] if isinstance(v, Value) else v for v in old.outputs),
            updates=tuple((name, self._parts.get(value) or self._wholes[value]) for name, value in old.updates),
            loss=old.loss,
            input_structure=structure,
            output_structure=old.output_structure,
        )
        return drop_unused(replace(made, rounding=old.rounding))

    def _needed(self, loss: Value) -> Sequence[Node]:
        """The nodes that the loss of a micro-batch is made of."""
        graph = self._builder.finish("", training=True, inputs=(), outputs=(self._parts[loss],))
        return drop_unused(graph).nodes

    def _given(self, value: Any) -> Any:
        if not isinstance(value, Value):
            return value
        return self._parts.get(value, self._wholes[value])


class _Undeclared(Exception):
    """An operator in a form nobody declared."""


@call_cache()
def _local_form(call: Call, piece: tuple[str, int, int], types: tuple[TensorType, ...]) -> Graph:
    """What a call makes of a piece of one of its indices, from parts of its operands of these types: equal layers do
    so alike. Undeclared where it calls something in a form nobody declared."""
    builder, spec = GraphBuilder(), spec_for(call)
    assert spec is not None, "it is split along an index of its declaration"
    parts = [builder.add_leaf(make_leaf(LeafKind.INPUT, f"x{i}", type)) for i, type in enumerate(types)]

    def emit(op: str, *given: Any) -> Any:
        bound = bind_args(op, given, {})
        inner = call_on(op, bound, lambda value: value.type)
        declared = spec_for(inner)
        if declared is None:
            raise _Undeclared(op)
        made = tuple(builder.add_call(op, bound, output_types(declared, inner)).outputs())
        return made if len(made) > 1 else made[0]

    index, start, stop = piece
    made = run_local(spec, call, {index: (start, stop)}, parts, emit)
    return builder.finish("local form", training=True, inputs=(), outputs=made)


@call_cache()
def _are_alike(
    call: Call, piece: tuple[str, int, int], other: tuple[str, int, int], types: tuple[TensorType, ...]
) -> bool:
    """Whether a call does the same with two pieces."""
    return _local_form(call, piece, types) == _local_form(call, other, types)


@call_cache()
def _rules_in(steps: int, call: Call, num_outputs: int) -> tuple[ShardingRule, ...]:
    """The ways in which a call can be made in so many equal parts, one after the other."""
    spec, found = spec_for(call), list[ShardingRule]()
    for rule in rules_for(call, num_outputs):
        alike = all(isinstance(p, Invariant | Copies) for p in rule.outputs)
        uneven = rule.index is not None and spec is not None and space_of(spec, call).sizes[rule.index] % steps
        if not alike and not uneven:
            found.append(rule)
    return tuple(found)


def _counts_up(value: Any) -> bool:
    """Whether something is 0, 1, 2, ..."""
    owner = value.owner if isinstance(value, Value) else None
    if not isinstance(owner, Node) or owner.op not in ("arange", "arange.start", "arange.start_step"):
        return False
    step = owner.args[2] if owner.op == "arange.start_step" else 1
    return bool(step == 1 and (owner.op == "arange" or owner.args[0] == 0))


def _shrunk(leaf: Leaf, steps: int) -> Any:
    return replace(leaf.type, shape=(leaf.type.shape[0] // steps, *leaf.type.shape[1:]))
