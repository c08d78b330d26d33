"""What is to be thought of a stranger's rule: refuted, derivable from the library, proven, or unknown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from conjoin.rules.definitions.dims import IllFormed
from conjoin.rules.definitions.proving import Verdict, prove
from conjoin.rules.deriving import Derivation, Deriver, Step
from conjoin.rules.patterns import Rule
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


def derive_checked(rule: Rule, deriver: Deriver) -> Derivation | None:
    """A derivation each of whose steps, with the whole expressions before and after it, is proven again."""
    found = deriver.derive(rule)
    return found if found is not None and _holds(rule, found) else None


def _holds(goal: Rule, derivation: tuple[Step, ...]) -> bool:
    """Whether every step is proven: a rule of the library may have conditions that cannot hold here."""
    before = goal.left
    for step in derivation:
        if not prove(Rule(step.rule, before, step.result)).proven:
            return False
        before = step.result
    return True
