"""What is to be thought of a stranger's rule: refuted, derivable from the library, proven, or unknown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from conjoin.rules.conditions import ONE_GROUP
from conjoin.rules.definitions.proof import Verdict, prove
from conjoin.rules.derivation import MOST_EXPRESSIONS, Derivation, Deriver
from conjoin.rules.patterns import Apply, Expr, Input, Rule, operators_in
from conjoin.rules.trials.instances import NoInstance
from conjoin.rules.trials.refutation import Counterexample, Trials, find_beyond, try_out

NUM_TRIALS = 100


class Standing(Enum):
    """The four answers."""

    DERIVED = "derived"
    PROVEN = "proven"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Judgement:
    """An answer and what it rests on."""

    rule: Rule
    standing: Standing
    verdict: Verdict
    """Of the proof from definitions."""
    num_trials: int = 0
    """Random instances on which both sides ran."""
    counterexample: Counterexample | None = None
    derivation: Derivation | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Checked:
    """A derivation each of whose steps is proven."""

    steps: Derivation
    conditions: tuple[str, ...]
    """Of all steps."""


def judge(rule: Rule, deriver: Deriver, when: Sequence[str] | None = None) -> Judgement:
    """Look for a counterexample first, then for a derivation and a proof.

    A rule is about all shapes at which both its sides run, or about those at which its left side runs and the
    conditions hold that it states (`when`). One that is false for some of them is refuted even if it holds for others;
    its proof, if there is one, then says under which conditions it holds.
    """
    verdict = prove(rule)
    try:
        trials = _tried(rule, verdict, when)
    except NoInstance as error:
        return Judgement(rule, Standing.UNKNOWN, verdict, reason=str(error))
    if trials.counterexample is not None:
        return Judgement(rule, Standing.REFUTED, verdict, trials.num_run, trials.counterexample)
    derived = derive_checked(rule, deriver, when=when or ())
    if derived is not None and _is_enough(rule, derived.conditions, when):
        return Judgement(rule, Standing.DERIVED, verdict, trials.num_run, derivation=derived.steps)
    for found in (verdict, prove(_with_shared(rule))):
        if found.proven and _is_enough(rule, found.conditions, when):
            return Judgement(rule, Standing.PROVEN, found, trials.num_run)
    narrow = f"it is proven only where {', '.join(verdict.conditions)}" if verdict.proven else verdict.reason
    return Judgement(rule, Standing.UNKNOWN, verdict, trials.num_run, reason=narrow)


def _tried(rule: Rule, verdict: Verdict, when: Sequence[str] | None) -> Trials:
    """The rule on random instances: as it is proven, which should not be contradicted, and as it is stated."""
    if verdict.proven:
        proven = try_out(rule, NUM_TRIALS // 2, when=verdict.conditions)
        if proven.counterexample is not None:
            return proven
    return try_out(rule, NUM_TRIALS, when=when, any_shapes=verdict.proven)


def _is_enough(rule: Rule, conditions: Sequence[str], when: Sequence[str] | None) -> bool:
    """Whether what is known under conditions is known at all shapes that the rule is about."""
    return find_beyond(rule, [one for one in conditions if one not in (when or ())], when or ()) is None


def derive_checked(
    rule: Rule, deriver: Deriver, most: int = MOST_EXPRESSIONS, when: Sequence[str] = ()
) -> Checked | None:
    """A derivation each of whose steps is proven again, with the operands that it has there."""
    found = deriver.derive(rule, most, when)
    if found is None:
        return None
    before, conditions = rule.left, dict[str, None]()
    for step in found:
        needs = _proof(Rule(step.rule, before, step.result))
        if needs is None:  # a rule of the library may have conditions that cannot hold here
            return None
        conditions |= dict.fromkeys(needs)
        before = step.result
    return Checked(found, tuple(conditions))


def _proof(step: Rule) -> tuple[str, ...] | None:
    """The fewest conditions under which a step is proven, or None where it is not."""
    found: list[tuple[str, ...]] = []
    for rule in dict.fromkeys(_forms(step)):
        verdict = prove(rule)
        if verdict.proven:
            found.append(_without_one_group(rule, verdict.conditions))
        if () in found:
            break
    return min(found, key=len, default=None)


def _forms(step: Rule) -> Iterator[Rule]:
    """A step as a rule: of what changes alone, and with more and more of what is around it.

    What is around it may tell more of the sizes, or make up for what changes. A convolution that says its number of
    groups is one of any number of groups.
    """
    changed = [pair for pair in zip(step.left, step.right, strict=True) if pair[0] != pair[1]]
    levels = [list(_levels(one, other)) for one, other in changed]
    for depth in range(max(map(len, levels))):
        pairs = [level[min(depth, len(level) - 1)] for level in levels]
        local = Rule(step.name, tuple(one for one, _ in pairs), tuple(other for _, other in pairs))
        yield _with_shared(local)
        yield local
        yield Rule(step.name, *(tuple(map(_without_groups, side)) for side in (local.left, local.right)))


def _without_one_group(rule: Rule, conditions: Sequence[str]) -> tuple[str, ...]:
    """With a condition on the convolutions of this rule in place of that on all convolutions."""
    convs = (e for e in operators_in(*rule.left) if e.op == "conv" and e.param("groups", "?") == "?")
    single = [f"{image}.1 = {kernel}.1" for image, kernel in (conv.args for conv in convs)]
    others = (one for one in conditions if one != ONE_GROUP)
    return (*single, *others) if ONE_GROUP in conditions else tuple(others)


def _with_shared(rule: Rule) -> Rule:
    """The rule for any tensors in place of the largest expressions that both its sides have."""
    shared = {e for e in operators_in(*rule.left) if e.args} & {e for e in operators_in(*rule.right) if e.args}

    def changed(expr: Expr) -> Expr:
        if isinstance(expr, Input):
            return expr
        return Input(str(expr)) if expr in shared else replace(expr, args=tuple(map(changed, expr.args)))

    return Rule(rule.name, tuple(map(changed, rule.left)), tuple(map(changed, rule.right)))


def _levels(one: Expr, other: Expr) -> Iterator[tuple[Expr, Expr]]:
    """Parts of two expressions outside of which they are the same, the smallest first."""
    if isinstance(one, Apply) and isinstance(other, Apply) and (one.op, one.params) == (other.op, other.params):
        different = [pair for pair in zip(one.args, other.args, strict=True) if pair[0] != pair[1]]
        if len(different) == 1:
            yield from _levels(*different[0])
    yield one, other


def _without_groups(expr: Expr) -> Expr:
    if isinstance(expr, Input):
        return expr
    params = tuple((name, value) for name, value in expr.params if name != "groups")
    return Apply(expr.op, params, tuple(map(_without_groups, expr.args)))
