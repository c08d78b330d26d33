"""From candidates to a library: proofs, from general rules down, and then only what does not follow from the rest."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from conjoin.rules.definitions.proof import Verdict, prove
from conjoin.rules.derivation import Derivation, Deriver
from conjoin.rules.generalization import generalize
from conjoin.rules.generator.enumeration import Progress
from conjoin.rules.generator.forks import compute_alone, forked
from conjoin.rules.parameters import parameters
from conjoin.rules.pattern_matching import Pairs, match_parameters, matches
from conjoin.rules.patterns import Apply, Expr, Input, Rule, inputs_of, operators_in, walk
from conjoin.rules.trials.refutation import find_beyond
from conjoin.rules.verdict import derive_checked

Prove = Callable[[Rule], Verdict]
Outcome = tuple[Rule, Verdict]
"""The most general form of a candidate that is proven, if any is."""
_AT_ONCE = 8
"""Candidates that each process proves between two looks at which are instances of others."""
_AHEAD = 32
"""Rules of which it is seen together whether they follow from those before; and one more for so many."""
_TOLD_EACH = 96
"""Candidates between two lines of progress."""


@dataclass(frozen=True, slots=True)
class Proven:
    """What became of all candidates."""

    rules: tuple[Rule, ...]
    instances: int
    """Candidates that are a proven rule at some parameters or inputs."""
    unproven: tuple[tuple[Rule, str], ...]
    """With the prover's reason."""
    seconds: float

    def reasons(self) -> Counter[str]:
        """How often each reason was given, outputs left out of it."""
        unequal = "not found equal"
        return Counter(unequal if reason.endswith(unequal) else reason for _, reason in self.unproven)


def prove_all(rules: Sequence[Rule], prove: Prove, progress: Progress = print, workers: int = 1) -> Proven:
    """Prove candidates, from the small and general ones on; those that are instances of proven rules are dropped.

    Processes prove a few candidates ahead of time; what is kept does not depend on how many there are.
    """
    start = time.process_time()
    library = _Library()
    unproven: list[tuple[Rule, str]] = []
    ordered = sorted(dict.fromkeys(rules), key=by_size_and_numbers)
    step = 1 if workers == 1 else _AT_ONCE * workers
    with _processes(workers, prove) as proven_of:
        for done in range(0, len(ordered), step):
            if done % _TOLD_EACH < step:
                progress(f"{done:,} of {len(ordered):,} candidates, {len(library.rules):,} proven")
            new = [rule for rule in ordered[done : done + step] if not library.has_instance(rule)]
            for rule, (general, verdict) in zip(new, proven_of(new), strict=True):
                if library.has_instance(rule) or (verdict.proven and library.has_instance(general)):
                    continue
                if verdict.proven:
                    library.add(general)
                else:
                    unproven.append((rule, verdict.reason))
    instances = len(ordered) - len(library.rules) - len(unproven)
    return Proven(library.rules, instances, tuple(unproven), time.process_time() - start)


@contextmanager
def _processes(workers: int, prove: Prove) -> Iterator[Callable[[list[Rule]], Iterable[Outcome]]]:
    """Proves lists of candidates, in order."""
    if workers == 1:
        yield lambda rules: (generalize(rule, prove) for rule in rules)
        return
    with multiprocessing.get_context("fork").Pool(workers, _set_prover, (prove,)) as pool:
        yield lambda rules: pool.map(_prove_here, rules, chunksize=1)


_provers: list[Prove] = []
"""Of this process, where it is one of several."""


def _set_prover(prove: Prove) -> None:
    compute_alone()
    _provers[:] = [prove]


def _prove_here(rule: Rule) -> Outcome:
    general, verdict = generalize(rule, _provers[0])
    return general, replace(verdict, frame=None)  # which stays in its process


def drop_instances(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Without rules that are another one at some parameters or inputs."""
    by_operators: dict[tuple[str, ...], list[Rule]] = defaultdict(list)
    for rule in rules:
        by_operators[_operators(rule.outputs)].append(rule)
    kept = list(rules)
    for group in by_operators.values():
        for rule in list(group):
            others = [other for other in group if other is not rule]
            if any(_is_instance(way, other) for way in (rule, rule.reversed()) for other in others):
                group.remove(rule)
                kept.remove(rule)
    return tuple(kept)


def drop_derived(rules: Sequence[Rule], most: int, progress: Progress = print, workers: int = 1) -> tuple[Rule, ...]:
    """Without rules that follow from smaller ones; `most` bounds the expressions met for each.

    A rule with several outputs has to follow without steps that forget an input: read the other way such a step makes
    one up, which no search would do. Nor has a rule to follow by way of constants that it is not about.
    """
    kept: list[Rule] = []
    ordered = sorted(rules, key=by_size_and_numbers)

    def follows(rule: Rule) -> bool:
        deriver = Deriver((other for other in kept if _may_explain(other, rule)), each_output=len(rule.left) == 1)
        return derive_everywhere(rule, deriver, most, prove(rule).conditions) is not None

    done = 0
    while done < len(ordered):
        # How far is looked ahead does not depend on how many processes do it, so that neither does what is kept.
        some = ordered[done : done + _AHEAD + done // _AHEAD]
        open_still = [rule for rule, known in zip(some, forked(follows, some, workers), strict=True) if not known]
        before = len(kept)
        for rule in open_still:
            if len(kept) == before or not follows(rule):
                kept.append(rule)
        done += len(some)
        progress(f"{done:,} of {len(rules):,} rules, {len(kept):,} kept")
    return tuple(kept)


def derive_everywhere(rule: Rule, deriver: Deriver, most: int, when: Sequence[str]) -> Derivation | None:
    """A derivation whose steps are proven wherever the rule holds, that is under its conditions."""
    found = derive_checked(rule, deriver, most)
    if found is None or find_beyond(rule, [one for one in found.conditions if one not in when], when) is not None:
        return None
    return found.steps


def _may_explain(known: Rule, rule: Rule) -> bool:
    constants = {expr.op for expr in operators_in(*known.outputs) if not expr.args}
    allowed = {expr.op for expr in operators_in(*rule.outputs) if not expr.args}
    return constants <= allowed and (len(rule.left) == 1 or _keeps_inputs(known))


def _keeps_inputs(rule: Rule) -> bool:
    starts_anywhere = any(isinstance(output, Input) for output in rule.left)
    return set(inputs_of(*rule.left)) == set(inputs_of(*rule.right)) and not (len(rule.left) > 1 and starts_anywhere)


def by_size_and_numbers(rule: Rule) -> tuple[int, int, int, str]:
    """Small rules first, among them those with few concrete parameters and many inputs."""
    applied = operators_in(*rule.outputs)
    numbers = sum(isinstance(v, int) or v == "none" for expr in applied for _, v in expr.params)
    strides = sum(expr.op in ("conv", "avg_pool", "max_pool") and "stride" not in dict(expr.params) for expr in applied)
    return len(applied), numbers + strides, -len(inputs_of(*rule.outputs)), str(rule)


class _Library:
    """Proven rules, found by their operators."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, ...], list[Rule]] = defaultdict(list)
        self._names: Counter[str] = Counter()

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(rule for group in self._rules.values() for rule in group)

    def add(self, rule: Rule) -> None:
        applied = [e for e in walk(*rule.left) if isinstance(e, Apply)]
        stem = "-".join(expr.op for expr in reversed(applied)).replace("_", "-") or "input"
        self._names[stem] += 1
        number = self._names[stem]
        named = replace(rule, name=stem if number == 1 else f"{stem}-{number}")
        self._rules[_operators(rule.outputs)].append(named)

    def has_instance(self, rule: Rule) -> bool:
        known = self._rules.get(_operators(rule.outputs), ())
        return any(_is_instance(rule, general) or _is_instance(rule.reversed(), general) for general in known)


def _operators(outputs: Sequence[Expr]) -> tuple[str, ...]:
    """The operators at all places of the written expressions: the same for a rule and its instances."""

    def written(expr: Expr) -> list[str]:
        return [] if isinstance(expr, Input) else [expr.op, *(op for arg in expr.args for op in written(arg))]

    return tuple(sorted(op for output in outputs for op in written(output)))


def _is_instance(rule: Rule, general: Rule) -> bool:
    """Whether a rule is a more general one with some inputs or parameters made equal or known."""
    if len(rule.left) != len(general.left):
        return False
    pairs = tuple(zip(general.outputs, rule.outputs, strict=True))
    nothing: Mapping[str, object] = {}
    return any(True for _ in matches(pairs, {}, nothing, _opened))


def _opened(
    pattern: Expr, expr: Expr, known: Mapping[str, object]
) -> Iterator[tuple[Pairs[Expr, Expr], Mapping[str, object]]]:
    if isinstance(pattern, Input):
        yield (), known
    elif isinstance(expr, Apply) and expr.op == pattern.op:
        params = match_parameters(pattern, (value for _, value in parameters(expr)), known)
        if params is not None:
            yield tuple(zip(pattern.args, expr.args, strict=True)), params
