"""From candidates to a library: proofs, from general rules down, and then only what does not follow from the rest."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from conjoin.rules.definitions.proving import Verdict
from conjoin.rules.deriving import Binding, Deriver, match
from conjoin.rules.generator.enumeration import Progress
from conjoin.rules.generator.generating import variants
from conjoin.rules.operators import BY_NAME
from conjoin.rules.patterns import Apply, Expr, Input, Rule, inputs_of, operators_in, walk

Prove = Callable[[Rule], Verdict]


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


def prove_all(rules: Sequence[Rule], prove: Prove, progress: Progress = print) -> Proven:
    """Prove candidates, from the small and general ones on; those that are instances of proven rules are dropped."""
    start = time.process_time()
    library = _Library()
    unproven: list[tuple[Rule, str]] = []
    instances = 0
    ordered = sorted(dict.fromkeys(rules), key=_by_size_and_numbers)
    for done, rule in enumerate(ordered, 1):
        if done % 100 == 0:
            progress(f"{done:,} of {len(ordered):,} candidates, {len(library.rules):,} proven")
        if library.has_instance(rule):
            instances += 1
            continue
        reason = ""
        for variant in variants(rule):
            verdict = prove(variant)
            if verdict.proven:
                library.add(variant)
                break
            reason = verdict.reason
        else:
            unproven.append((rule, reason))
    return Proven(library.rules, instances, tuple(unproven), time.process_time() - start)


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


def drop_derived(rules: Sequence[Rule], most: int, progress: Progress = print) -> tuple[Rule, ...]:
    """Without rules that follow from the rest, the largest first; `most` bounds the expressions looked at for each.

    A rule with several outputs has to follow without steps that forget an input: read the other way such a step makes
    one up, which no search would do. Nor has a rule to follow by way of constants that it is not about.
    """
    kept = sorted(rules, key=_by_size_and_numbers)
    for done, rule in enumerate(reversed(list(kept)), 1):
        rest = [other for other in kept if other is not rule and _may_explain(other, rule)]
        if Deriver(rest).derive(rule, most) is not None:
            kept.remove(rule)
        if done % 100 == 0:
            progress(f"{done:,} of {len(rules):,} rules, {len(kept):,} left")
    return tuple(kept)


def _may_explain(known: Rule, rule: Rule) -> bool:
    constants = {expr.op for expr in operators_in(*known.outputs) if not expr.args}
    allowed = {expr.op for expr in operators_in(*rule.outputs) if not expr.args}
    return constants <= allowed and (len(rule.left) == 1 or _keeps_inputs(known))


def _keeps_inputs(rule: Rule) -> bool:
    starts_anywhere = any(isinstance(output, Input) for output in rule.left)
    return set(inputs_of(*rule.left)) == set(inputs_of(*rule.right)) and not (len(rule.left) > 1 and starts_anywhere)


def _by_size_and_numbers(rule: Rule) -> tuple[int, int, int, str]:
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
    return tuple(sorted(expr.op for expr in operators_in(*outputs)))


def _is_instance(rule: Rule, general: Rule) -> bool:
    """Whether a rule is a more general one with some inputs or parameters made equal or known."""
    if len(rule.left) != len(general.left):
        return False
    binding: Binding | None = Binding({}, {})
    for pattern, expr in zip(_filled(general.outputs), _filled(rule.outputs), strict=True):
        if binding is not None:
            binding = match(pattern, expr, binding)
    return binding is not None


def _filled(outputs: Sequence[Expr]) -> tuple[Expr, ...]:
    """With all parameters said."""

    def fill(expr: Expr) -> Expr:
        if isinstance(expr, Input):
            return expr
        said = dict(expr.params)
        params = tuple((name, said.get(name, default)) for name, default in BY_NAME[expr.op].params)
        return Apply(expr.op, params, tuple(map(fill, expr.args)))

    return tuple(map(fill, outputs))
