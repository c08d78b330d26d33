"""Rules read one way, and the places of an e-graph where they apply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from conjoin.rules.derivations.equalities import Node
from conjoin.rules.derivations.worlds import Place
from conjoin.rules.operators import BY_NAME
from conjoin.rules.parameters import is_any, parameters
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, inputs_of, operators_in

_DISTINCT = ("axis", "mesh")
"""Two names of dims are two dims, and two names of mesh axes two axes."""


def named(name: str, value: Parameter) -> str:
    """Names of dims, of mesh axes and of numbers are kept apart."""
    return f"{name if name in _DISTINCT else ''}:{value}"


@dataclass(frozen=True, slots=True)
class Binding:
    """What inputs of a rule stand for, as classes, and its named parameters."""

    inputs: Mapping[str, int]
    params: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Some outputs of a rule, read one way."""

    rule: str
    backwards: bool
    sources: tuple[Apply, ...]
    targets: tuple[Expr, ...]
    ops: frozenset[str]
    """All operators of the sources."""


def rewrites_of(rule: Rule, each_output: bool = True) -> Iterator[Rewrite]:
    """Both ways of a rule, but for those that would make up inputs or parameters out of nothing.

    A rule of several outputs holds for each of them; read so it may forget inputs that only the others have.
    """
    ways = [(False, rule.left, rule.right), (True, rule.right, rule.left)]
    if len(rule.left) > 1 and each_output:
        pairs = list(zip(rule.left, rule.right, strict=True))
        ways += [(False, (one,), (other,)) for one, other in pairs]
        ways += [(True, (other,), (one,)) for one, other in pairs]
    for backwards, sources, targets in ways:
        known = set(inputs_of(*sources)) >= set(inputs_of(*targets)) and _names(*sources) >= _names(*targets)
        applied = tuple(source for source in sources if isinstance(source, Apply))
        if known and len(applied) == len(sources):
            ops = frozenset(expr.op for expr in operators_in(*sources))
            yield Rewrite(rule.name, backwards, applied, targets, ops)


def _names(*roots: Expr) -> set[str]:
    params = ((name, value) for expr in operators_in(*roots) for name, value in parameters(expr))
    return {named(name, value) for name, value in params if name != "groups" and is_any(name, value)}


class Matcher:
    """Finds where rewrites apply among the classes of an e-graph, as they are now."""

    def __init__(self, classes: Mapping[int, Sequence[Node]]) -> None:
        self._by_op: dict[int, dict[str, list[Node]]] = {}
        self._roots: dict[str, list[tuple[int, Node]]] = {}
        for number, nodes in classes.items():
            own = self._by_op.setdefault(number, {})
            for node in nodes:
                op = str(node.key[0])
                own.setdefault(op, []).append(node)
                self._roots.setdefault(op, []).append((number, node))

    def matches(self, rewrites: Iterable[Rewrite]) -> Iterator[tuple[Rewrite, tuple[int, ...], Binding]]:
        """Rewrites with the classes whose expressions they rewrite."""
        present = self._roots.keys()
        for rewrite in rewrites:
            if rewrite.ops <= present:
                for numbers, binding in self._match_roots(rewrite.sources, Binding({}, {})):
                    yield rewrite, numbers, binding

    def _match_roots(self, patterns: Sequence[Apply], binding: Binding) -> Iterator[tuple[tuple[int, ...], Binding]]:
        if not patterns:
            yield (), binding
            return
        for number, node in self._roots[patterns[0].op]:
            for found in self._match_node(patterns[0], node, binding):
                for numbers, full in self._match_roots(patterns[1:], found):
                    yield (number, *numbers), full

    def _match_node(self, pattern: Apply, node: Node, binding: Binding) -> Iterator[Binding]:
        params = _match_params(pattern, node, binding.params)
        if params is not None:
            yield from self._match_args(pattern.args, node.args, Binding(binding.inputs, params))

    def _match_args(self, patterns: Sequence[Expr], args: Sequence[int], binding: Binding) -> Iterator[Binding]:
        if not patterns:
            yield binding
            return
        for found in self._match(patterns[0], args[0], binding):
            yield from self._match_args(patterns[1:], args[1:], found)

    def _match(self, pattern: Expr, number: int, binding: Binding) -> Iterator[Binding]:
        if isinstance(pattern, Input):
            known = binding.inputs.get(pattern.name)
            if known is None:
                yield Binding({**binding.inputs, pattern.name: number}, binding.params)
            elif known == number:
                yield binding
            return
        for node in self._by_op[number].get(pattern.op, ()):
            yield from self._match_node(pattern, node, binding)


def _match_params(pattern: Apply, node: Node, known: Mapping[str, object]) -> Mapping[str, object] | None:
    declared = BY_NAME[pattern.op].params
    if not declared:
        return known
    params = dict(known)
    for (name, wanted), value in zip(parameters(pattern), node.key[1:], strict=False):
        if name == "groups" and not isinstance(wanted, int):
            continue  # whatever fits
        if is_any(name, wanted):
            if (name, value) == ("pad", "same"):
                return None  # as much as the kernel asks for, in each dim: no number
            if params.setdefault(named(name, wanted), value) != value:
                return None
        elif not _is(name, wanted, value):
            return None
    return params if _are_apart(params) else None


def _is(name: str, wanted: Parameter, value: object) -> bool:
    """Whether a parameter is what a pattern says."""
    if isinstance(value, Place):
        return value.is_at(wanted)
    return wanted == value or (name == "pad" and wanted == "valid" and value == 0)


def _are_apart(params: Mapping[str, object]) -> bool:
    for kind in _DISTINCT:
        values = [value for name, value in params.items() if name.startswith(f"{kind}:")]
        if len(set(values)) < len(values):
            return False
    return True
