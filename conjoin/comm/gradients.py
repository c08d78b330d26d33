"""Through which tensors a gradient comes back in a training step, as autograd decides it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakKeyDictionary

from conjoin.ir import Graph, Node, Value, is_parallel, is_random, origin, plain_call
from conjoin.ops import Call, Layout, OpSpec, find_spec, spec_for

Entry = tuple[Value, Layout]
"""A value, mostly a parameter, and a layout in which somebody reads it."""


_NORMS = ("batch_norm", "group_norm", "layer_norm")
_KEPT_WHOLE = ("conv", *_NORMS, *(f"native_{norm}" for norm in _NORMS))
"""Operators of which torch keeps all factors always: the gradients of all their operands come from one call."""


class GradientFlow:
    """Which values need a gradient, and which get one: those from which a path leads to the loss."""

    def __init__(self, graph: Graph) -> None:
        self._passing: dict[Node, tuple[int, ...]] = {}
        """For every node the operands that it gives a gradient to."""
        self._rows: set[Node] = set()
        """Nodes that make a view of each of their operands."""
        self._needing = {Value(leaf) for leaf in graph.leaves if leaf.trainable}
        self._entries: set[Entry] = set()
        self._reached: set[Value] = set()
        self._saved: set[Entry] = set()
        self._kept: dict[Node, tuple[int, ...]] = {}
        nodes = [node for node in graph.nodes if not is_parallel(node)]
        for node in nodes:
            self._find_needs(node)
        self._reach(_ends(graph))
        for node in reversed(nodes):
            if any(value in self._reached for value in node.outputs()):
                inputs = node.inputs
                self._reach(inputs[i] for i in self._passing[node] if self.reach_operand(node, i))
                self._kept[node] = tuple(self._find_saved(node))
                self._saved.update((origin(inputs[i]), inputs[i].type.layout) for i in self._kept[node])

    def reach_read(self, root: Value, layout: Layout) -> bool:
        """Whether a gradient comes back to a value from those who read it in this layout."""
        return (root, layout) in self._entries

    def save(self, root: Value, layout: Layout) -> bool:
        """Whether somebody who reads a value in this layout keeps it for the backward pass."""
        return (root, layout) in self._saved

    def reach_operand(self, node: Node, operand: int) -> bool:
        """Whether a node gives a gradient to one of its operands."""
        return operand in self._passing[node] and any(value in self._reached for value in self._made_of(node, operand))

    def passing_operands(self, node: Node, output: int) -> tuple[int, ...]:
        """The operands through which a gradient goes back where one comes to an output of a node."""
        return tuple(i for i in self._passing[node] if node not in self._rows or i == output)

    def kept_operands(self, node: Node) -> tuple[int, ...]:
        """The operands whose values the backward of a node reads; none where no gradient comes to it."""
        return self._kept.get(node, ())

    def remember(self, node: Node) -> bool:
        """Whether autograd may keep anything of a node for the backward pass: an operand, a result, a mask."""
        reached = any(value in self._reached for value in node.outputs())
        spec = spec_for(plain_call(node))
        if not reached or not self._passing[node] or (spec is not None and spec.view):
            return False
        others = len(self._passing[node]) < len(node.inputs)
        return others or bool(self.kept_operands(node)) or is_random(node.op, node.args)

    def reach(self, value: Value) -> bool:
        """Whether a value gets a gradient from anyone."""
        return value in self._reached

    def _find_needs(self, node: Node) -> None:
        call = plain_call(node)
        spec = spec_for(call)
        if spec is not None and not spec.smooth:
            self._passing[node] = ()
            return
        constants = spec.constants if spec is not None else ()
        self._passing[node] = tuple(
            i
            for i, (name, value) in enumerate(zip(call.operand_names, node.inputs, strict=True))
            if name not in constants and origin(value) in self._needing
        )
        if _views_each(call):
            self._rows.add(node)
        for i in self._passing[node]:
            made = (v for v in self._made_of(node, i) if v.type.dtype.is_floating_point or v.type.dtype.is_complex)
            self._needing.update(made)

    def _made_of(self, node: Node, operand: int) -> Iterator[Value]:
        """The outputs that an operand has a part in."""
        return iter((Value(node, operand),)) if node in self._rows else node.outputs()

    def _find_saved(self, node: Node) -> list[int]:
        """The operands whose values the backward of a node reads.

        A factor of a product is read for the gradients of the other factors, what is only added is not read; where the
        call is not linear in what needs a gradient all is read; who reads a view reads what it is a view of.
        """
        call, passing = plain_call(node), self._passing[node]
        spec = spec_for(call)
        if spec is None:
            return list(range(len(node.inputs)))
        if spec.view:
            viewed = range(len(node.inputs)) if node in self._rows else (0,)
            return [i for i in viewed if any((v, v.type.layout) in self._saved for v in self._made_of(node, i))]
        terms = _terms(spec, call)
        reads_all = node.op.removeprefix("_").startswith(_KEPT_WHOLE)
        if reads_all or not set(passing) <= set().union(*terms):
            return list(range(len(call.operand_names)))
        return [i for i in range(len(call.operand_names)) if any(i in t and set(passing) & (t - {i}) for t in terms)]

    def _reach(self, values: Iterable[Value]) -> None:
        for value in values:
            root = origin(value)
            if root in self._needing:
                self._reached.add(root)
                self._entries.add((root, value.type.layout))


_flows: WeakKeyDictionary[Graph, GradientFlow] = WeakKeyDictionary()


def gradient_flow(graph: Graph) -> GradientFlow:
    """That of a graph, found once while the graph is there: all ranks of a process ask, each more than once."""
    found = _flows.get(graph)
    if found is None:
        found = _flows[graph] = GradientFlow(graph)
    return found


def _views_each(call: Call) -> bool:
    """Whether a call makes a view of each of its tensors: every output is then made of one of them alone.

    So `mse_loss` of a prediction and a target, which are broadcast together first, gives the target no gradient.
    """
    spec = find_spec(call.op)
    return spec is not None and spec.view and sum(name not in spec.constants for name in call.operand_names) > 1


def _terms(spec: OpSpec, call: Call) -> list[set[int]]:
    """The operands, by position, multiplied in each term of a sum; a list is added up, or multiplied (`*`)."""
    declared = spec.terms if isinstance(spec.terms, str) else spec.terms(call)
    terms = []
    for words in (term.split() for term in declared.split("+")):
        places = {i for i, name in enumerate(call.operand_names) if name in {word.strip("*") for word in words}}
        multiplied = len(words) > 1 or declared.endswith("*")
        terms += [places] if multiplied else [{place} for place in places]
    return terms


def _ends(graph: Graph) -> list[Value]:
    """Where gradients start: the loss; every output of a model trained with a loss of the caller's; nothing in eval."""
    if not graph.training:
        return []
    ends = graph.outputs if graph.loss is None else (graph.outputs[graph.loss],)
    return [value for value in ends if isinstance(value, Value)]
