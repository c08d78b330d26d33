"""Rules read one way, and the places of an e-graph where they apply."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from conjoin.rules.derivations.equalities import Node
from conjoin.rules.derivations.worlds import CountedDim
from conjoin.rules.parameters import is_any, parameters
from conjoin.rules.pattern_matching import Pairs, match_parameters, matches, named
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, inputs_of, operators_in


@dataclass(frozen=True, slots=True)
class BoundClasses:
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

    def matches(self, rewrites: Iterable[Rewrite]) -> Iterator[tuple[Rewrite, tuple[int, ...], BoundClasses]]:
        """Rewrites with the classes whose expressions they rewrite."""
        present = self._roots.keys()
        for rewrite in rewrites:
            if rewrite.ops <= present:
                for numbers, (bound, params) in self._match_roots(rewrite.sources, ({}, {})):
                    inputs = {pattern.name: number for pattern, number in bound.items() if isinstance(pattern, Input)}
                    yield rewrite, numbers, BoundClasses(inputs, params)

    def _match_roots(self, patterns: Sequence[Apply], known: _Known) -> Iterator[tuple[tuple[int, ...], _Known]]:
        if not patterns:
            yield (), known
            return
        root = patterns[0]
        for number, node in self._roots[root.op]:
            for pairs, params in _opened(root, node, known[1]):
                for found in matches(pairs, known[0], params, self._open):
                    for numbers, full in self._match_roots(patterns[1:], found):
                        yield (number, *numbers), full

    def _open(self, pattern: Expr, number: int, params: _Params) -> Iterator[tuple[Pairs[Expr, int], _Params]]:
        if isinstance(pattern, Input):
            yield (), params
            return
        for node in self._by_op[number].get(pattern.op, ()):
            yield from _opened(pattern, node, params)


_Params = Mapping[str, object]
_Known = tuple[Mapping[Expr, int], _Params]


def _opened(pattern: Apply, node: Node, known: _Params) -> Iterator[tuple[Pairs[Expr, int], _Params]]:
    params = match_parameters(pattern, node.key[1:], known, _is)
    if params is not None:
        yield tuple(zip(pattern.args, node.args, strict=True)), params


def _is(name: str, wanted: Parameter, value: object) -> bool:
    """Whether a parameter is what a pattern says."""
    if isinstance(value, CountedDim):
        return value.is_at(wanted)
    return wanted == value or (name == "pad" and wanted == "valid" and value == 0)
