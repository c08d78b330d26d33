"""Check the laws against the operators' definitions, and against each other (TASO, section 2.4).

1. `check_law`: by proof for all sizes (`proof.py`), which also tells what the law needs of shapes.
2. `find_counterexample`: by symbolic execution at all sizes up to a bound (`law_sizes.py`); TASO's was 4 in every dim.
3. `find_contradiction`: nothing false follows from the laws within a time limit.
4. `find_redundant`: laws that follow from the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from conjoin.rules.definitions.proof import prove
from conjoin.rules.operators import OPS
from conjoin.rules.parameters import is_any, names_in
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, inputs_of, with_inputs
from tests.laws.law_proofs import LawVerdict, prove_from, prove_law
from tests.laws.law_sizes import Shapes, SmallSizes
from tests.laws.laws import Law

LARGEST = 4
"""TASO's bound for every size and parameter."""
REDUNDANCY_MILLISECONDS = 10_000
"""TASO's time for one question."""
_WIDER: Mapping[str, tuple[Parameter, ...]] = {"pad": ("same", "valid"), "act": ("none", "relu")}
"""Words that a name for a parameter stands for besides numbers: a law of any padding is also one of padding `same`."""
_CONSTANTS = tuple(op.name for op in OPS if not op.num_args)


@dataclass(frozen=True, slots=True)
class LawCheck:
    """What proofs from the definitions say of a law."""

    proven: bool
    needs: tuple[str, ...] = ()
    """What one side needs of shapes where the other has a meaning without it."""
    reason: str = ""
    """Which form of it was not proven, and why."""


@dataclass(frozen=True, slots=True)
class SizesCheck:
    """What comparisons at small sizes say of a law."""

    obligations: int
    """How many sizes and values of parameters were compared."""
    counterexample: tuple[Rule, Shapes] | None = None


def forms_of(law: Law, numbers: bool = True) -> Iterator[Rule]:
    """A law for every word that a name for a parameter stands for; with `numbers`, for numbers by name too.

    A name for a dim stands for the last ones too, and for the same as another name, unless the law says it does not.

    >>> from conjoin.rules.text import parse_rule
    >>> rule = parse_rule("", "max_pool[kernel=k, pad=p](relu(x))", "relu(max_pool[kernel=k, pad=p](x))")
    >>> for form in forms_of(Law(rule, "", "")):
    ...     print(form.left[0])
    max_pool[kernel=k, pad=same](relu(x))
    max_pool[kernel=k, pad=valid](relu(x))
    max_pool[kernel=k, pad=p](relu(x))
    """
    names = names_in(*law.rule.outputs)
    apart = {pair for one, other in law.apart for pair in ((one, other), (other, one))}
    choices: dict[str, tuple[Parameter, ...]] = {}
    for name, kind in names.items():
        if kind in _WIDER:
            choices[name] = (*_WIDER[kind], *((name,) if numbers else ()))
        elif kind in ("axis", "mesh"):
            ends = (-1, -2) if kind == "axis" else ()
            same = (other for other, its in names.items() if its == kind and other != name)
            choices[name] = (name, *(value for value in (*ends, *same) if (name, value) not in apart))
    for values in product(*choices.values()):
        chosen = dict(zip(choices, values, strict=True))
        if any(chosen.get(str(one), one) == chosen.get(str(other), other) for one, other in apart):
            continue
        sides = [tuple(_with_values(expr, chosen) for expr in side) for side in (law.rule.left, law.rule.right)]
        yield replace(law.rule, left=sides[0], right=sides[1])


def _with_values(expr: Expr, chosen: Mapping[str, Parameter]) -> Expr:
    if isinstance(expr, Input):
        return expr
    params = tuple((key, chosen.get(str(value), value) if is_any(key, value) else value) for key, value in expr.params)
    return Apply(expr.op, params, tuple(_with_values(arg, chosen) for arg in expr.args))


def check_law(law: Law) -> LawCheck:
    """Prove a law from the definitions of its operators, in every form and both ways."""
    needs: dict[str, None] = {}
    for form in forms_of(law):
        forth = prove(form)
        if not forth.proven:
            return LawCheck(False, reason=f"{form}: {forth.reason}")
        if _axes_of(form) != _axes_of(law.rule):
            continue  # the same needs, of a dim with another name
        needs.update(dict.fromkeys(forth.conditions))
        if set(inputs_of(*form.left)) == set(inputs_of(*form.right)):
            needs.update(dict.fromkeys(prove(form.reversed()).conditions))
    return LawCheck(True, tuple(words for words in needs if not _goes_without_saying(words)))


def _axes_of(rule: Rule) -> set[str]:
    return {name for name, kind in names_in(*rule.outputs).items() if kind in ("axis", "mesh")}


def _goes_without_saying(words: str) -> bool:
    """A constant has the shape that it is needed in; kernels padded to keep sizes are odd on both sides."""
    return words.endswith(" is odd") or any(f"{name}{sign}" in words for name in _CONSTANTS for sign in ".[")


def find_counterexample(law: Law, largest: int = LARGEST, every: int = 1) -> SizesCheck:
    """Compare both sides of a law at all sizes up to a bound, or at one in `every`, the smallest sizes first."""
    compared = 0
    for form in forms_of(law, numbers=False):
        small = SmallSizes(form)
        cases = {name: values[::every] for name, values in small.all(largest).items()}
        found = small.different(cases)
        if found is not None:
            return SizesCheck(compared + found + 1, (form, small.shapes(cases, found)))
        compared += len(cases[""])
    return SizesCheck(compared)


def find_contradiction(known: Sequence[Law], milliseconds: int) -> LawVerdict:
    """Try to prove that any two tensors are equal; a proof would be a contradiction.

    Terms to look at are both sides of all laws, of the two tensors.
    """
    one, other = Input("one"), Input("other")
    hints: list[Expr] = []
    for law in known:
        names = inputs_of(*law.rule.outputs)
        values = {name: (one, other)[i % 2] for i, name in enumerate(names)}
        hints += [with_inputs(side, values) for side in (law.left, law.right)]
    return prove_from(Rule("contradiction", (one,), (other,)), known, milliseconds, hints)


def find_redundant(
    known: Sequence[Law], milliseconds: int = REDUNDANCY_MILLISECONDS
) -> Iterable[tuple[Law, LawVerdict]]:
    """The laws that follow from the others, each with the proof."""
    for law in known:
        others = [other for other in known if other.name != law.name]
        verdict = prove_law(law, others, milliseconds)
        if verdict.proven:
            yield law, verdict
