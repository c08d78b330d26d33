"""What is to be thought of a stranger's rule: refuted, derivable from the library, proven, or unknown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from conjoin.rules.definitions.dims import IllFormed
from conjoin.rules.definitions.proving import Verdict, prove
from conjoin.rules.deriving import MOST_EXPRESSIONS, Derivation, Deriver, Step
from conjoin.rules.patterns import Apply, Expr, Input, Rule
from conjoin.rules.trials.instances import NoInstance
from conjoin.rules.trials.refuting import Counterexample, try_out

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


def judge(rule: Rule, deriver: Deriver) -> Judgement:
    """Look for a counterexample first, then for a derivation and a proof.

    A rule that is false for some sizes is refuted even if it holds for others; its proof, if there is one, then says
    under which conditions it holds.
    """
    verdict = prove(rule)
    try:
        trials = try_out(rule, NUM_TRIALS, under_conditions=verdict.proven)
    except (NoInstance, IllFormed) as error:
        return Judgement(rule, Standing.UNKNOWN, verdict, reason=str(error))
    if trials.counterexample is not None:
        return Judgement(rule, Standing.REFUTED, verdict, trials.num_run, trials.counterexample)
    derivation = derive_checked(rule, deriver)
    if derivation is not None:
        return Judgement(rule, Standing.DERIVED, verdict, trials.num_run, derivation=derivation)
    standing = Standing.PROVEN if verdict.proven else Standing.UNKNOWN
    return Judgement(rule, standing, verdict, trials.num_run, reason=verdict.reason)


def derive_checked(rule: Rule, deriver: Deriver, most: int = MOST_EXPRESSIONS) -> Derivation | None:
    """A derivation each of whose steps is proven again, with the operands that it has there."""
    found = deriver.derive(rule, most)
    return found if found is not None and _holds(rule, found) else None


def _holds(goal: Rule, derivation: tuple[Step, ...]) -> bool:
    """Whether every step is proven: a rule of the library may have conditions that cannot hold here."""
    before = goal.left
    for step in derivation:
        if not _is_proven(Rule(step.rule, before, step.result)):
            return False
        before = step.result
    return True


def _is_proven(step: Rule) -> bool:
    """From what changes alone, or else from the whole expressions: what is around it may tell more of the sizes.

    A convolution that says its number of groups is one of any number of groups.
    """
    changed = [pair for pair in zip(step.left, step.right, strict=True) if pair[0] != pair[1]]
    inner = [_innermost(one, other) for one, other in changed]
    local = Rule(step.name, tuple(one for one, _ in inner), tuple(other for _, other in inner))
    open_groups = Rule(step.name, *(tuple(map(_without_groups, side)) for side in (local.left, local.right)))
    return any(prove(rule).proven for rule in dict.fromkeys((local, step, open_groups)))


def _innermost(one: Expr, other: Expr) -> tuple[Expr, Expr]:
    """The smallest parts of two expressions outside of which they are the same."""
    while isinstance(one, Apply) and isinstance(other, Apply) and (one.op, one.params) == (other.op, other.params):
        different = [pair for pair in zip(one.args, other.args, strict=True) if pair[0] != pair[1]]
        if len(different) != 1:
            break
        one, other = different[0]
    return one, other


def _without_groups(expr: Expr) -> Expr:
    if isinstance(expr, Input):
        return expr
    params = tuple((name, value) for name, value in expr.params if name != "groups")
    return Apply(expr.op, params, tuple(map(_without_groups, expr.args)))
