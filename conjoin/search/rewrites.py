"""Variants by substitutions: a rule of the library applied wherever it matches, one rule after another.

The order is that of TASO (section 2.7): a queue by cost, and what costs more than `ALPHA` times the best is given up.
The cost of a variant is not that of its graph on one device, but the least sum over all layouts on the units at hand: a
rewrite that pays only because of how its operators are then split is found, one that hinders a split is not.

Before a variant is judged its rewrite is rehearsed: what was taken away against what was put there, on small tensors. A
substitution that gives something else anywhere is dropped, which the notes say, and the search goes on without it.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from conjoin.ir import Graph, Node, Substitution
from conjoin.rules import (
    Entry,
    Expr,
    Index,
    Library,
    Match,
    OwnRules,
    Rule,
    apply_all,
    find_matches,
    inputs_of,
    of_each_function,
    operators_in,
    rehearse,
    replacement_of,
)
from conjoin.search.entries import Variant, make_variant, name_of, seconds_alone
from conjoin.search.fold import fold
from conjoin.sim import Prices

_log = logging.getLogger(__name__)
ALPHA = 1.05
"""TASO, section 2.7, and Unity's threshold (section 6)."""
PATIENCE = 24
"""Variants in a row that may be met without one that is better than all before."""
_SCANNING = 0.3
"""Of the time left is kept for the sums when variants are looked for; what was not looked at by then is left out."""
_MAX_MATCHES = 512


@dataclass(frozen=True, slots=True)
class RuleWay:
    """A rule in one direction, and why it is right."""

    rule: Rule
    proof: str
    operators: frozenset[str]

    @staticmethod
    def of(rule: Rule, proof: str) -> RuleWay:
        return RuleWay(rule, proof, frozenset(part.op for part in operators_in(*rule.left)))

    def may_match(self, index: Index) -> bool:
        """Whether a graph has the operators of the rule; most have not."""
        return self.operators <= index.by_op.keys()


def ways_of(library: Library, own: OwnRules | None = None) -> tuple[RuleWay, ...]:
    """The rules that rewrite a model's graph, in both directions: a user's own first, then those of a library."""
    found: dict[tuple[Expr, ...], RuleWay] = {}
    if own is not None:
        _add_ways(found, own.library, own.proof_of)
    _add_ways(found, library, lambda entry: f"{entry.method}:{entry.stamp}")
    return tuple(found.values())


def _add_ways(found: dict[tuple[Expr, ...], RuleWay], library: Library, proof_of: Callable[[Entry], str]) -> None:
    proofs = {rule.name: proof_of(entry) for entry in library.entries for rule in of_each_function(entry)}
    for rule in library.rules:
        proof = proofs[rule.name]
        one = RuleWay.of(rule, proof)
        found.setdefault((*rule.left, *rule.right), one)  # a rule for any function may be one for relu
        if not set(inputs_of(*rule.left)) - set(inputs_of(*rule.right)):  # else nothing tells what they are
            back = Rule(f"{rule.name}-back", rule.right, rule.left)
            found.setdefault((*rule.right, *rule.left), RuleWay.of(back, proof))


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A variant, and what was done to the one before it."""

    variant: Variant
    way: RuleWay
    matches: tuple[Match, ...]

    def fault(self) -> str:
        """Why the variant does not compute what the one before it does; empty where it does."""
        found = (rehearse(replacement_of(match)) for match in self.matches)
        return next((reason for reason in found if reason), "")


def rewritten(variant: Variant, way: RuleWay, index: Index) -> Rewrite | None:
    """The variant with a rule applied wherever it matches; None where it does nowhere."""
    return _applied(variant, way, index, _matches(way, index))


def gaining(graph: Graph, rules: Sequence[RuleWay], prices: Prices) -> tuple[str, ...]:
    """Rules by which a graph takes less on one device, wherever they match; those first by which it takes the least."""
    index, variant = Index(graph), make_variant(graph)
    found = [(seconds_alone(variant, prices), "")]
    for way in rules:
        changed = rewritten(variant, way, index)
        found += [(seconds_alone(changed.variant, prices), way.rule.name)] if changed is not None else []
    return tuple(name for seconds, name in sorted(found) if seconds < found[0][0])


def rewritten_alike(variant: Variant, way: RuleWay, index: Index, laid_out: Mapping[Node, Hashable]) -> list[Rewrite]:
    """The variants with a rule applied to some matches only: to those whose operators are laid out alike."""
    groups: dict[Hashable, list[Match]] = {}
    for match in _matches(way, index):
        groups.setdefault(tuple(laid_out.get(node) for node in match.nodes), []).append(match)
    if len(groups) < 2:
        return []
    found = (_applied(variant, way, index, matches) for matches in groups.values())
    return [changed for changed in found if changed is not None]


def _matches(way: RuleWay, index: Index) -> tuple[Match, ...]:
    return find_matches(index, way.rule, apart=True)[:_MAX_MATCHES] if way.may_match(index) else ()


def _applied(variant: Variant, way: RuleWay, index: Index, matches: Sequence[Match]) -> Rewrite | None:
    ordered = sorted(matches, key=lambda m: -max(index.places[node] for node in m.nodes))  # what comes before stays
    graph, places = apply_all(variant.graph, way.rule, ordered)
    if not places:
        return None
    where = str(places[0]) if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
    substitutions = (*variant.substitutions, Substitution(way.rule.name, where, way.proof))
    return Rewrite(make_variant(graph, substitutions, variant.accumulation), way, places)


@dataclass
class Backtracking:
    """A search over variants under way: the cheapest is expanded first.

    What substitutions make of it is met in the order of `rank`, a cost that is known sooner. A substitution that does
    not pay wherever it matches may pay where operators are laid out in one way and not where they are in another, so
    it is then tried on matches that are laid out alike.
    """

    seconds: Callable[[Variant], float]
    """The least sum over layouts."""
    ways: tuple[RuleWay, ...]
    left: Callable[[], float] = lambda: 1.0
    """The part of the time for this that is left."""
    rank: Callable[[Variant], float] | None = None
    laid_out: Callable[[Variant], Mapping[Node, Hashable]] | None = None
    """How the operators of a variant are laid out where its sum is least."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Substitutions that are not used, by name, and why: something else came of them in a rehearsal."""
    best: float = float("inf")
    is_cut_short: bool = False
    """Whether something was left out because the time for this was over."""
    _seen: set[str] = field(default_factory=set)
    _queue: list[tuple[float, int, Variant]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _patience: int = PATIENCE

    def start(self, variant: Variant) -> None:
        """Begin with a variant."""
        self._meet(variant, None)

    def run(self) -> Iterator[tuple[Variant, float]]:
        """Every variant that is worth to go on with, with its sum, as they are found."""
        while self._queue:
            total, _, variant = heapq.heappop(self._queue)
            if total > ALPHA * self.best:
                return
            for changed in self._changed(variant):
                best = self.best
                found = self._meet(changed.variant, changed)
                if found is not None:
                    self._patience = PATIENCE if found < best else self._patience - 1
                    yield changed.variant, found
                if self._patience == 0 or self.left() <= 0:
                    self.is_cut_short |= self._patience > 0
                    return

    def _changed(self, variant: Variant) -> Iterator[Rewrite]:
        """What substitutions make of a variant: each wherever it matches, then those that did not pay in parts."""
        index, best = Index(variant.graph), self.best
        found = self._everywhere(variant, index)
        if self.rank is None:
            yield from found
            return
        ranked = sorted((self.rank(changed.variant), i, changed) for i, changed in enumerate(found))
        yield from (changed for _, _, changed in ranked)
        if self.laid_out is not None and self.best >= best:
            laid_out = self.laid_out(variant)
            for _, _, changed in ranked:
                yield from rewritten_alike(variant, changed.way, index, laid_out)

    def _everywhere(self, variant: Variant, index: Index) -> Iterator[Rewrite]:
        """Each substitution wherever it matches; where all are looked for first, as long as there is time for it."""
        enough = _SCANNING * self.left() if self.rank is not None else 0.0
        folded = fold(variant.graph)
        short = None if folded is None else Index(folded.short)  # where blocks repeat, what matches does so there
        for way in self.ways:
            may_match = way.may_match(index) if short is None else bool(_matches(way, short))
            if way.rule.name in self.dropped or not may_match:
                continue
            changed = rewritten(variant, way, index)
            if changed is not None:
                yield changed
            if self.left() < enough:
                self.is_cut_short = True
                return

    def _meet(self, variant: Variant, changed: Rewrite | None) -> float | None:
        """The sum of a variant that was not met before, is right, and is not hopeless."""
        name = name_of(variant.graph)
        if name in self._seen or (changed is not None and not self._is_right(changed)):
            return None
        self._seen.add(name)
        total = self.seconds(variant)
        self.best = min(self.best, total)
        if total > ALPHA * self.best:
            return None
        heapq.heappush(self._queue, (total, next(self._numbers), variant))
        return total

    def _is_right(self, changed: Rewrite) -> bool:
        """Whether a rewrite computes what was computed before; if not, its substitution is dropped."""
        name = changed.way.rule.name
        reason = self.dropped.get(name) or changed.fault()
        if reason and name not in self.dropped:
            _log.warning("the substitution %s is not used: %s", name, reason)
            self.dropped[name] = reason
        return not reason
