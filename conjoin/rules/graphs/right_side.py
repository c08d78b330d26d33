"""The right side of a rule as calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from conjoin.ir import Elementary, Node, Value, choose, make_node, rules_for
from conjoin.ops import (
    PARALLEL_OPS,
    Args,
    NotationError,
    TensorType,
    bind_args,
    call_on,
    output_types,
    placement_on,
    spec_for,
    walk_tensors,
)
from conjoin.rules.graphs.binding import Refused, in_range
from conjoin.rules.graphs.bindings import make
from conjoin.rules.graphs.matching import Match, defaults_of
from conjoin.rules.graphs.term_index import Host
from conjoin.rules.graphs.terms import Literal, Term, Virtual
from conjoin.rules.parameters import is_any
from conjoin.rules.patterns import Apply, Expr, Input, walk

_FUSED = ("linear", "concat")
"""Left to the call that reads them, when it is the only one: a bias joins a linear layer, concatenations become one."""

_TURNS = ("transpose", "swap")
"""Left to the call that reads them: several become one, and a product may take its operand as it lies."""


class Emitter:
    """Makes the calls of one right side; equal calls are one."""

    def __init__(self, match: Match) -> None:
        self.match = match
        self.nodes: dict[Node, None] = {}
        self._pinned = match.nodes[0].pinned if match.nodes else False
        self._inputs = dict(match.inputs)
        self._params = dict(match.params)
        self._made: dict[Expr, Term] = {}
        self._values: dict[Term, Value] = {}
        right = match.form.right
        self._uses = Counter(arg for expr in walk(*right) if isinstance(expr, Apply) for arg in expr.args)
        self._uses.update(right)

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors of the match, for constants."""
        terms = [term for _, term in self.match.inputs if not isinstance(term, Literal)]
        dtypes = [
            term.type.dtype for term in (*terms, *(value for node in self.match.nodes for value in node.outputs()))
        ]
        found = next((dtype for dtype in dtypes if dtype.is_floating_point), None)
        if found is None:
            raise Refused("nothing here says of which dtype its constants are")
        return found

    def emit(self, expr: Expr) -> Term:
        """The term that an expression of the right side becomes."""
        if isinstance(expr, Input):
            if expr.name not in self._inputs:
                raise Refused(f"the rule leaves open what {expr.name} is")
            return self._inputs[expr.name]
        if expr not in self._made:
            self._made[expr] = self._apply(expr)
        return self._made[expr]

    def _apply(self, expr: Apply) -> Term:
        shape = self.match.sizes.shapes.get(expr)
        if shape is None:
            raise Refused(f"the rule leaves the sizes of {expr} open")
        args = tuple(self.emit(arg) for arg in expr.args)
        params = self._resolved(expr)
        once = self._uses[expr] == 1 and expr not in self.match.form.right
        if args and ((expr.op in _FUSED and once) or expr.op in _TURNS):
            return Virtual(expr.op, tuple(params.items()), args, TensorType(shape, args[0].type.dtype))
        made = make(self, expr.op, params, args, shape)
        if made.type.shape != shape:
            raise Refused(f"{expr} has shape {list(made.type.shape)} where {list(shape)} was derived")
        return made

    def _resolved(self, expr: Apply) -> Mapping[str, Any]:
        """Parameters with names replaced by what they stand for."""
        found: dict[str, Any] = {}
        for name, value in {**defaults_of(expr.op), **dict(expr.params)}.items():
            if name == "axis":
                found[name] = self.match.sizes.dims.get(expr)
            elif is_any(name, value):
                found[name] = self._params.get(value)
            else:
                found[name] = value
            if found[name] is None and name != "groups":
                raise Refused(f"the rule leaves {name} of {expr} open: say what it is")
        return found

    def around(self, host: Host, inner: Term) -> Value:
        """The value of a call of which a part has changed."""
        for depth in reversed(range(len(host.path))):
            reading, place = host.path[depth]
            args = (*reading.args[:place], inner, *reading.args[place + 1 :])
            if depth == 0:
                return self.value(make(self, reading.op, dict(reading.params), args, host.value.type.shape))
            outer, at = host.path[depth - 1]
            inner = Virtual(reading.op, reading.params, args, outer.args[at].type)
        raise AssertionError("a virtual output is inside of a call")

    def value(self, term: Term) -> Value:
        """A term as a value."""
        if isinstance(term, Value):
            return term
        if term not in self._values:
            if isinstance(term, Literal):
                self._values[term] = self.call("full", (), in_range(term.factor, self.dtype), self.dtype)
            else:
                made = make(self, term.op, dict(term.params), term.args, term.type.shape)
                self._values[term] = self.value(made)
        return self._values[term]

    def said(self, op: str, attribute: str) -> Any:
        """What the calls that are replaced say of something that rules have no word for, where all say the same."""
        found = {node.call[attribute] for node in self.match.nodes if node.op == op}
        return found.pop() if len(found) == 1 else None

    def call(self, op: str, *args: Any, output: int = 0) -> Value:
        """An output of a call, with types as the declarations say."""
        bound = bind_args(op, args, {})
        node = make_node(op, bound, self._types(op, bound), pinned=self._pinned)
        self.nodes.setdefault(node)
        return Value(node, output)

    def _types(self, op: str, args: Args) -> tuple[TensorType, ...]:
        plain = call_on(op, args, lambda value: value.type.laid_out(()))
        spec = spec_for(plain)
        if spec is None:
            raise Refused(f"{op} does not take {', '.join(map(str, plain.tensors))}")
        try:
            types = output_types(spec, plain)
        except NotationError as error:
            raise Refused(str(error)) from None
        operands = [value.type for _, value in walk_tensors(op, args)]
        if op in PARALLEL_OPS:
            return (types[0].laid_out(Elementary(op, args[1:]).apply(operands[0].layout)),)
        axes = dict.fromkeys(axis for type in operands for axis, _ in type.layout)
        if not axes:
            return types
        rules = {}
        for axis in axes:
            given = tuple(placement_on(type.layout, axis) for type in operands)
            found = [rule for rule in rules_for(plain, len(types)) if rule.operands == given]
            if not found:
                raise Refused(f"{op} cannot take its operands as {', '.join(map(str, given))} on axis {axis}")
            rules[axis] = found[0]
        return tuple(replace(type, layout=layout) for type, layout in zip(types, choose(rules).outputs, strict=True))
