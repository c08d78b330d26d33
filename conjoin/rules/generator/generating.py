"""Generate rules: enumerate, pair by fingerprint, test, prune, generalize, prove (TASO, chapter 2; Unity, section 4).

    enumerate_graphs      graphs of equal fingerprint                        Algorithm 1
    distinct_candidates   pruning by renaming and by common subgraphs        section 2.5
    select                the second test; pruning by rewriting with smaller rules
    variants              concrete parameters become names where they may

What is left are candidates: nothing here decides what is true (`selecting.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from pathlib import Path

from conjoin.rules.generator.candidates import Counts, Pair, Reader, distinct_candidates
from conjoin.rules.generator.enumeration import Progress
from conjoin.rules.generator.pruning import Equation, Rewriter, inputs_in, num_operators
from conjoin.rules.generator.resuming import enumerate_graphs
from conjoin.rules.generator.trials import Trial, float_trials, residue_trial
from conjoin.rules.generator.vocabulary import Vocabulary
from conjoin.rules.operators import BY_NAME
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, operators_in

_INPUT_NAMES = ["x", "y", "z", "w", "u", "v", "t", "r", "q", "p"]
_AXIS_NAMES = ["a", "b", "c", "d"]


@dataclass(frozen=True, slots=True)
class Selection:
    """The candidates of one vocabulary that are left to prove."""

    vocabulary: str
    num_graphs: int
    counts: Counts
    refuted: int
    """Candidates that the second test dropped."""
    derived: int
    """Candidates that follow from smaller ones."""
    rules: tuple[Rule, ...]
    seconds: float
    """Of the process."""


def generate(
    vocabulary: Vocabulary,
    most_ops: int,
    *,
    directory: Path | None = None,
    workers: int = 1,
    progress: Progress = print,
) -> Selection:
    """Candidates over a vocabulary, of at most so many operators on each side, tested and pruned."""
    start = time.process_time()
    found = enumerate_graphs(vocabulary, most_ops, directory=directory, workers=workers, progress=progress)
    reader = Reader(found)
    counts, pairs = distinct_candidates(reader)
    progress(f"{vocabulary.name}: {counts}")
    chosen = _Chooser(reader, progress).select(pairs)
    rules = tuple(_rules_of(reader, chosen.accepted))
    seconds = time.process_time() - start
    return Selection(vocabulary.name, found.num_graphs, counts, chosen.refuted, chosen.derived, rules, seconds)


class _Chooser:
    """Takes candidates from the smallest on."""

    def __init__(self, reader: Reader, progress: Progress) -> None:
        self._reader, self._progress = reader, progress
        self._residues = residue_trial(reader)
        self._floats = float_trials(reader, reader.found.vocabulary.other_sizes)
        self._rewriter = Rewriter(reader.found.commutes)
        self.accepted: list[Equation] = []
        self.refuted = self.derived = 0

    def select(self, pairs: Sequence[Pair]) -> _Chooser:
        queue = [(self._reader.equation(pair).size, place) for place, pair in enumerate(pairs)]
        heapify(queue)
        waiting = list(pairs)
        done = 0
        while queue:
            _, place = heappop(queue)
            again = self._take(waiting[place])
            if again is not None:
                heappush(queue, (self._reader.equation(again).size, len(waiting)))
                waiting.append(again)
            done += 1
            if done % 5000 == 0:
                name = self._reader.found.vocabulary.name
                self._progress(f"{name}: {done:,} candidates looked at, {len(self.accepted):,} accepted")
        self._drop_instances()
        return self

    def _drop_instances(self) -> None:
        """Once more, now that larger and more general ones are known too."""
        kept = []
        for equation in self.accepted:
            plain = self._plain(equation)
            if plain.left == plain.right:
                kept.append(equation)
                continue
            self._rewriter.remove(plain)
            if not self._rewriter.follows(plain, self._residues.agree):
                kept.append(equation)
                self._rewriter.add(plain)
        self.derived += len(self.accepted) - len(kept)
        self.accepted = kept

    def _plain(self, equation: Equation) -> Equation:
        return Equation(*(tuple(map(self._rewriter.normal, side)) for side in (equation.left, equation.right)))

    def _take(self, pair: Pair) -> Pair | None:
        """Accept a candidate or not; returns what to look at instead where it was made too general."""
        equation = _oriented(self._reader.equation(pair))
        if equation is None:
            return None
        plain = self._plain(equation)
        swaps = plain.left == plain.right
        if (swaps and equation.size > (1, 2)) or (not swaps and self._rewriter.follows(plain, self._residues.agree)):
            self.derived += 1
            return None
        if not all(trial.holds(equation) for trial in self._floats):
            if pair.cut:
                return replace(pair, cut=frozenset())
            self.refuted += 1
            return None
        self.accepted.append(equation)
        if not swaps:
            self._rewriter.add(plain)
        return None


def _oriented(equation: Equation) -> Equation | None:
    """The larger side first, unless the other has inputs that it has not; several outputs: the separate ones first."""
    left, right = (inputs_in(*side) for side in (equation.left, equation.right))
    if len(equation.left) > 1:
        return Equation(equation.right, equation.left)
    if right < left or (right == left and num_operators(*equation.left) >= num_operators(*equation.right)):
        return equation
    return Equation(equation.right, equation.left) if left <= right else None


# Rules.


def _rules_of(reader: Reader, equations: Sequence[Equation]) -> Iterator[Rule]:
    vocabulary = reader.found.vocabulary
    grouped = float_trials(reader, vocabulary.grouped_sizes) if vocabulary.grouped_sizes else ()
    base = residue_trial(reader)
    for equation in equations:
        places = list(dict.fromkeys(_inputs_in_order(*equation.left, *equation.right)))
        names = {place: _input_name(i) for i, place in enumerate(places)}
        one_group = bool(grouped) and not all(trial.holds(equation) for trial in grouped)

        def expr(term: tuple[int, ...], names: dict[int, str] = names, one_group: bool = one_group) -> Expr:
            return _written(reader, term, names, base if one_group else None)

        yield Rule("", tuple(map(expr, equation.left)), tuple(map(expr, equation.right)))


def _inputs_in_order(*terms: tuple) -> Iterator[int]:  # type: ignore[type-arg]
    for term in terms:
        if term[0] == -1:
            yield term[1]
        else:
            yield from _inputs_in_order(*term[1:])


def _input_name(place: int) -> str:
    return _INPUT_NAMES[place] if place < len(_INPUT_NAMES) else f"x{place}"


def _written(reader: Reader, term: tuple, names: dict[int, str], base: Trial | None) -> Expr:  # type: ignore[type-arg]
    """The expression of a term; with a trial given, convolutions that have one group there say so."""
    if term[0] < 0:
        return reader.expr(term, names)
    made = reader.found.vocabulary.choices[term[0]]
    args = tuple(_written(reader, arg, names, base) for arg in term[1:])
    params = _without_defaults(made.op, made.params)
    if made.op == "conv" and base is not None:
        x, weight = (base.type_of(arg) for arg in term[1:])
        if x is not None and weight is not None and x.shape[1] == weight.shape[1]:
            params = (*params, ("groups", 1))
    return Apply(made.op, params, args)


def _without_defaults(op: str, params: tuple[tuple[str, Parameter], ...]) -> tuple[tuple[str, Parameter], ...]:
    defaults = dict(BY_NAME[op].params)
    return tuple((name, value) for name, value in params if defaults[name] != value)


def variants(rule: Rule) -> tuple[Rule, ...]:
    """The rule with more general parameters, the most general first and itself last."""
    found = [rule]
    kinds = {BY_NAME[expr.op].kind for expr in operators_in(*rule.outputs)}
    if kinds <= {"same", "scale", "constant"}:
        axes = dict.fromkeys(v for e in operators_in(*rule.outputs) for k, v in e.params if k == "axis")
        if axes:
            found.append(_with_params(rule, "axis", dict(zip(axes, _AXIS_NAMES, strict=False))))
    if any(("act", "relu") in expr.params for expr in operators_in(*rule.outputs)):
        found.append(_with_params(rule, "act", {"relu": "f"}))
    return tuple(reversed(found))


def _with_params(rule: Rule, name: str, named: dict[Parameter, str]) -> Rule:
    def change(expr: Expr) -> Expr:
        if isinstance(expr, Input):
            return expr
        params = tuple((k, named.get(v, v) if k == name else v) for k, v in expr.params)
        return Apply(expr.op, params, tuple(map(change, expr.args)))

    return Rule(rule.name, tuple(map(change, rule.left)), tuple(map(change, rule.right)))
