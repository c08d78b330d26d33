"""Where in a graph the left side of a rule stands.

Values are hash-consed, so the same tensor is the same object, and a graph is looked through once: its terms are indexed
by the operator they read as and by their operands. The first output of a rule is tried on every term that reads as its
operator; a further output on those that can be reached from what is bound already. Then the shapes must be sizes that
the rule is about (`sizes.py`).

A value inside of a match that something else reads too stays computed. Nothing forbids that: it costs what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from conjoin.ir import Graph, Node, Value
from conjoin.rules.graphs.binding import Words
from conjoin.rules.graphs.bindings import readings_of
from conjoin.rules.graphs.sizes import Misfit, Sizes, Sizing, named_axes, observed_on, sizing_of
from conjoin.rules.graphs.term_index import Host, Index
from conjoin.rules.graphs.terms import Literal, Reading, Term, Virtual, rank_of, shape_of
from conjoin.rules.operators import BY_NAME
from conjoin.rules.parameters import is_any
from conjoin.rules.pattern_matching import Pairs, matches
from conjoin.rules.patterns import Apply, Expr, Input, Rule, walk


@dataclass(frozen=True, slots=True)
class Match:
    """One place where a rule applies."""

    rule: Rule
    form: Rule
    """The rule as it was proven, with the number of groups it needs."""
    outputs: tuple[Term, ...]
    """What the outputs of the left side are; a virtual one is part of the calls that `hosts` names."""
    inputs: tuple[tuple[str, Term], ...]
    params: tuple[tuple[str, Any], ...]
    """Values of named parameters; dims by name are positions in the tensor they were seen on."""
    nodes: tuple[Node, ...]
    """The calls that are read, in no order."""
    sizes: Sizes = field(compare=False)
    """Of the right side."""
    hosts: tuple[tuple[Virtual, tuple[Host, ...]], ...] = ()

    def __str__(self) -> str:
        return f"{self.rule.name} at {', '.join(sorted(node.op for node in self.nodes))}"


Notes = list[tuple[int, str]]
"""Of every attempt that fails how many operators had fitted, inputs too where all had, and why no more."""


@dataclass(frozen=True, slots=True)
class _State:
    """What is known so far beside what expressions are."""

    params: Mapping[str, Any]
    axes: Mapping[tuple[Expr, str], int]
    nodes: Mapping[Node, None]
    fitted: int = 0
    """How many operators fit."""


_Terms = Mapping[Expr, Term]
_Found = tuple[_Terms, _State]


class Matcher:
    """One rule being looked for in one graph."""

    apart: bool = False
    """Whether outputs must not need each other; otherwise that is found when the match is applied."""

    def __init__(self, index: Index, rule: Rule, sizing: Sizing, given: Mapping[str, Any], notes: Notes | None) -> None:
        self.index, self.sizing, self.given, self.notes = index, sizing, given, notes
        self.original, self.rule = rule, sizing.rule
        self.ways = _ways(sizing.rule)

    def matches(self, start: Term) -> Iterator[Match]:
        """All matches whose first output is a term."""
        for terms, state in self._outputs(0, start, ({}, _State(dict(self.given), {}, {}))):
            match = self._complete(terms, state)
            if match is not None:
                yield match

    def _outputs(self, place: int, term: Term, known: _Found) -> Iterator[_Found]:
        """Bind the output at a place to a term, then all later ones."""
        root = self.rule.left[place]
        taken = [known[0][other] for other in self.rule.left[:place] if other != root]
        if term in taken or (self.apart and not all(self.index.are_apart(term, other) for other in taken)):
            return
        for found in matches(((root, term),), *known, self._open, self._note_two):
            if place + 1 == len(self.rule.left):
                yield found
                continue
            for candidate in self._candidates(place + 1, found[0]):
                yield from self._outputs(place + 1, candidate, found)

    def _candidates(self, place: int, bound: _Terms) -> Iterator[Term]:
        """The terms that an output may be, climbing from what is bound."""
        way = self.ways[place]
        if way is None:
            root = self.rule.left[place]
            yield from self.index.by_op.get(root.op, ()) if isinstance(root, Apply) else ()
            return
        start, steps = way
        terms: dict[Term, None] = {bound[start]: None}
        for op, position in steps:
            above = (self.index.by_operand.get((op, position, term), {}) for term in terms)
            terms = {term: None for found in above for term in found}
        yield from terms

    def _open(self, expr: Expr, term: Term, state: _State) -> Iterator[tuple[Pairs[Expr, Term], _State]]:
        """Every reading of a term as the operator of an expression."""
        if isinstance(expr, Input):
            yield (), state
            return
        found = readings_of(term)
        readings = found.by_op.get(expr.op, ())
        if not readings and self.notes is not None:
            why = found.misses.get(expr.op) or f"stands where the rule has {expr.op}"
            self._note(state, lambda: f"{self._name(term)} {why}")
        nodes = (term.owner,) if isinstance(term, Value) and isinstance(term.owner, Node) else ()
        for reading in readings:
            fitting = self._parameters(expr, term, reading, state)
            if fitting is not None:
                read = {**state.nodes, **dict.fromkeys((*nodes, *reading.also))}
                yield tuple(zip(expr.args, reading.args, strict=True)), _State(*fitting, read, state.fitted + 1)

    def _note_two(self, expr: Expr, one: Term, other: Term, state: _State) -> None:
        self._note(state, lambda: f"{self._name(one)} and {self._name(other)} stand for one {expr}")

    def _parameters(
        self, expr: Apply, term: Term, reading: Reading, state: _State
    ) -> tuple[Mapping[str, Any], Mapping[tuple[Expr, str], int]] | None:
        """Named parameters and dims with those of a call bound; None where it has others than the rule."""
        params, axes = dict(state.params), dict(state.axes)
        asked = {**defaults_of(expr.op), **dict(expr.params)}
        for name, value in reading.params:
            if name == "axis":
                fits = self._axis(expr, rank_of(reading.args[0]), value, axes)
            else:
                fits = _fit(asked[name], value, name, params)
            if not fits and name == "act":  # read with what follows it: another reading, no near miss
                return None
            if not fits and self.notes is not None:
                self._note(state, _other(self._name(term), name, value, params.get(asked[name], asked[name])))
            if not fits:
                return None
        return params, axes

    def _axis(self, expr: Apply, rank: int, dim: int, axes: dict[tuple[Expr, str], int]) -> bool:
        """Whether a dim is the one that a rule means: by number, or any by name."""
        on, asked = observed_on(expr), expr.param("axis")
        if isinstance(asked, int) and asked not in (dim, dim - rank):
            return False
        if str(asked) in self.sizing.ranks[on].names:
            return axes.setdefault((on, str(asked)), dim) == dim
        return isinstance(asked, int)

    def _complete(self, terms: _Terms, state: _State) -> Match | None:
        """The match, when regions, dtypes and sizes fit too."""
        try:
            hosts = self._hosts(terms)
            owners = (host.value.owner for _, each in hosts for host in each)
            nodes = dict.fromkeys((*state.nodes, *(owner for owner in owners if isinstance(owner, Node))))
            _check_regions(nodes)
            _check_dtypes(self.rule, terms)
            _check_meshes(self.rule, state.params)
            axes = {**state.axes, **self._given_axes(state)}
            shapes = {expr: shape_of(term) for expr, term in terms.items()}
            sizes = self.sizing.solve(shapes, state.params, axes)
        except Misfit as misfit:
            if self.notes is not None:  # all operators fit, and so nothing is nearer
                self.notes.append((len(terms), str(misfit)))
            return None
        named = {**sizes.named, **{name: dim for (_, name), dim in axes.items()}}
        inputs = tuple((e.name, term) for e, term in terms.items() if isinstance(e, Input))
        outputs = tuple(terms[root] for root in self.rule.left)
        params = tuple(sorted({**state.params, **named}.items()))
        return Match(self.original, self.rule, outputs, inputs, params, tuple(nodes), sizes, hosts)

    def _hosts(self, terms: _Terms) -> tuple[tuple[Virtual, tuple[Host, ...]], ...]:
        virtual = [t for root in self.rule.left if isinstance(t := terms[root], Virtual)]
        return tuple((term, self.index.hosts(term)) for term in virtual)

    def _given_axes(self, state: _State) -> dict[tuple[Expr, str], int]:
        """Dims by name that only the right side has: a number, or what the caller chose."""
        known = {name for _, name in state.axes}
        found = [(on, name) for on, name in named_axes(self.sizing, self.rule.right) if name not in known]
        chosen = {name: int(name) if name.isdecimal() else self.given.get(name) for _, name in found}
        return {(on, name): dim for on, name in found if (dim := chosen[name]) is not None}

    def _name(self, term: Term) -> str:
        return self.index.name(term)

    def _note(self, state: _State, reason: Callable[[], str]) -> None:
        if self.notes is not None:
            self.notes.append((state.fitted, reason()))


def _fit(asked: Any, value: Any, name: str, params: dict[str, Any]) -> bool:
    """Whether a parameter of a call is what a rule asks for; a name is bound to the first value it meets."""
    values = value if isinstance(value, Words) else (value,)
    if asked == "?" or not is_any(name, asked):
        return asked == "?" or asked in values
    usable = [v for v in values if name == "act" or not isinstance(v, str)]
    return bool(usable) and params.setdefault(asked, usable[0]) in usable


@lru_cache
def defaults_of(op: str) -> Mapping[str, Any]:
    """The parameters of a rule operator that need not be given."""
    return dict(BY_NAME[op].params)


def _other(where: str, name: str, value: Any, wanted: Any) -> Callable[[], str]:
    shown = " or ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return lambda: f"{where} has {name} {shown} and the rule is for {name} {wanted}"


def _check_regions(nodes: Mapping[Node, None]) -> None:
    if len({node.pinned for node in nodes}) > 1:
        raise Misfit("it would reach into a region in which autocast is switched")


@lru_cache(maxsize=4096)
def _mesh_names(rule: Rule) -> tuple[str, ...]:
    parallel = (e for e in walk(*rule.outputs) if isinstance(e, Apply) and BY_NAME[e.op].parallel)
    return tuple(dict.fromkeys(str(expr.param("mesh", "m")) for expr in parallel))


def _check_meshes(rule: Rule, params: Mapping[str, Any]) -> None:
    """Mesh axes of different names are different ones."""
    axes = [axis for name in _mesh_names(rule) for axis in params.get(name, ())]
    if len(set(axes)) < len(axes):
        raise Misfit("two mesh axes of the rule are one axis here")


_MOVES = frozenset(
    {"transpose", "swap", "flatten", "unflatten", "concat", "split", "embedding", "partition", "combine", "replicate"}
)
"""Operators whose results are elements of their first operands as they are, whatever numbers these are."""
_LOOKUPS = frozenset({"embedding", "embedding_bag", "aggregate", "aggregate_weighted", "aggregate_mean"})
_REALS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Dtypes in which torch computes with real numbers, to rounding."""


@lru_cache(maxsize=4096)
def _computes(rule: Rule) -> bool:
    """Whether a rule does more than move elements: it was then proven for real numbers."""
    return any(isinstance(expr, Apply) and expr.op not in _MOVES for expr in walk(*rule.outputs))


@lru_cache(maxsize=4096)
def _addresses(rule: Rule) -> frozenset[Expr]:
    """The expressions that say which rows of a table, or of a result, are meant."""
    lookups = (expr for expr in walk(*rule.outputs) if isinstance(expr, Apply) and expr.op in _LOOKUPS)
    return frozenset(walk(*(arg for expr in lookups for arg in expr.args[1:3])))


def _check_dtypes(rule: Rule, terms: Mapping[Expr, Term]) -> None:
    """A rule that computes holds for real numbers of one dtype: sums of bools are others, and integers wrap."""
    rows, dtypes = set[torch.dtype](), set[torch.dtype]()
    for expr, term in terms.items():
        if not isinstance(term, Literal):
            (rows if expr in _addresses(rule) else dtypes).add(term.type.dtype)
    for found in (dtypes, rows):
        if len(found) > 1:
            raise Misfit(f"it mixes {_shown(found)}, and another order of operations would round or wrap elsewhere")
    if _computes(rule) and not dtypes <= _REALS:
        raise Misfit(f"it computes with {_shown(dtypes)}, and the rule was proven for real numbers")


def _shown(dtypes: Iterable[torch.dtype]) -> str:
    return " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


@lru_cache(maxsize=4096)
def _ways(rule: Rule) -> tuple[tuple[Expr, tuple[tuple[str, int], ...]] | None, ...]:
    """For every output a shortest way up to it from something that earlier outputs have bound."""
    found: list[tuple[Expr, tuple[tuple[str, int], ...]] | None] = []
    bound: set[Expr] = set()
    for root in rule.left:
        ways = sorted(_climbs(root, bound), key=lambda way: len(way[1]))
        found.append(ways[0] if ways else None)
        bound.update(walk(root))
    return tuple(found)


def _climbs(expr: Expr, bound: set[Expr]) -> Iterator[tuple[Expr, tuple[tuple[str, int], ...]]]:
    if expr in bound:
        yield expr, ()
    elif isinstance(expr, Apply):
        for place, arg in enumerate(expr.args):
            for start, steps in _climbs(arg, bound):
                yield start, (*steps, (expr.op, place))


@lru_cache(maxsize=4096)
def _mirrored(rule: Rule) -> bool:
    """Whether the left side is two outputs that are one and the same but for the names of inputs."""
    if len(rule.left) != 2:
        return False
    names: dict[str, str] = {}
    return _alike(*rule.left, names) and all(names.get(names[name], name) == name for name in names)


def _alike(one: Expr, other: Expr, names: dict[str, str]) -> bool:
    if isinstance(one, Input) and isinstance(other, Input):
        return names.setdefault(one.name, other.name) == other.name
    if not isinstance(one, Apply) or not isinstance(other, Apply):
        return False
    if (one.op, one.params, len(one.args)) != (other.op, other.params, len(other.args)):
        return False
    return all(_alike(a, b, names) for a, b in zip(one.args, other.args, strict=True))


def find_matches(
    graph: Graph | Index,
    rule: Rule,
    given: Mapping[str, Any] | None = None,
    at: Term | None = None,
    *,
    apart: bool = False,
) -> tuple[Match, ...]:
    """Every place where a rule applies.

    `given` says what the left side leaves open: dims and mesh axes that only the right side names. A rule whose left
    side is a bare input applies everywhere; it is looked for `at` one value only, as any rule may be. An `Index` of
    the graph may be given instead: many rules are then looked for in one. With `apart` matches are left out that have
    an output which is needed for another: a rule that makes one tensor of both cannot be applied there.

    >>> from conjoin.ir import parse_graph
    >>> from conjoin.rules.text import parse_rule
    >>> takes, gives = "input:x f32[2,2]\\ntakes [input:x] in null", "returns [%1] in null"
    >>> calls = "%0: f32[2,2] = t(input:x)\\n%1: f32[2,2] = t(%0)"
    >>> graph = parse_graph(f'graph "g" train\\n{takes}\\n{calls}\\n{gives}\\n')
    >>> (match,) = find_matches(graph, parse_rule("transposes-cancel", "transpose(transpose(x))", "x"))
    >>> print(match)
    transposes-cancel at t, t
    """
    sizing = sizing_of(rule)
    index = graph if isinstance(graph, Index) else Index(graph)
    root = rule.left[0]
    if isinstance(sizing, str):
        return ()
    if at is not None:
        starts: Any = (at,)
    else:
        starts = index.by_op.get(root.op, ()) if isinstance(root, Apply) else ()
    matcher = Matcher(index, rule, sizing, given or {}, None)
    matcher.apart = apart
    matches = dict.fromkeys(match for start in starts for match in matcher.matches(start))
    return tuple(_without_mirrors(matches)) if _mirrored(sizing.rule) else tuple(matches)


def _without_mirrors(matches: Iterable[Match]) -> Iterator[Match]:
    """Of two matches that differ in which output is which, the first."""
    seen = set()
    for match in matches:
        key = frozenset(match.outputs), frozenset(term for _, term in match.inputs)
        if key not in seen:
            seen.add(key)
            yield match
