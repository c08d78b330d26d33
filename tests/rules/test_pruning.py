"""Pruning keeps the most general rules, and only those that do not follow from the rest."""

from __future__ import annotations

import pytest

from conjoin.rules.definitions.proof import Verdict, prove
from conjoin.rules.generator.candidates import Pair, Reader, distinct_candidates, is_instance, most_general
from conjoin.rules.generator.pruning import Equation, Rewriter, Term, num_operators, rename_inputs
from conjoin.rules.generator.resumed_enumeration import enumerate_graphs
from conjoin.rules.generator.selection import drop_derived, drop_instances, prove_all
from conjoin.rules.generator.trials import float_trials, residue_trial
from conjoin.rules.generator.vocabulary import Typed, Vocabulary, choose
from conjoin.rules.patterns import Rule
from conjoin.rules.text import parse_expressions

X, Y, Z, W = ((-1, place) for place in range(4))
ADD, MUL, RELU, CAT, FIRST, SECOND = range(6)


def rule(text: str) -> Rule:
    left, right = (parse_expressions(side) for side in text.split("=>"))
    return Rule(text, left, right)


def quiet(line: str) -> None:
    """No progress in tests."""


def never(one: Term, other: Term) -> bool:
    return False


def equation(left: Term, right: Term) -> Equation:
    return Equation((left,), (right,))


def reader() -> Reader:
    names = tuple(map(choose, ("add", "mul", "relu")))
    sizes = {"m": 2}
    numbers = Vocabulary("numbers", tuple(Typed(name, "m") for name in "xyz"), names, sizes, {"m": 3})
    return Reader(enumerate_graphs(numbers, 3, progress=quiet))


def test_names_made_equal_are_an_instance() -> None:
    assert is_instance((0, 0, 1), (0, 1, 2)) and is_instance((0, 1, 0), (0, 1, 0))
    assert not is_instance((0, 1, 2), (0, 0, 1))
    assert most_general({(0, 1, 0): "a", (0, 1, 2): "b", (0, 0, 0): "c"}) == ["b"]


def test_counts_fall_with_each_step() -> None:
    counts, left = distinct_candidates(reader())
    assert counts.initial > counts.renamed > counts.without_common == len(left)
    assert "without common subgraphs" in str(counts)


def test_a_common_subgraph_becomes_an_input() -> None:
    found = reader()
    values = found.found.values
    product = next(i for i in range(len(values)) if found.application(i) == (MUL, 0, 1))
    total = next(i for i in range(len(values)) if found.application(i)[0] == ADD and product in found.operands(i))
    (other,) = set(found.operands(total)) - {product}
    pair = Pair(((ADD, product, other),), (total,))
    general = found.generalized(pair)
    assert product in general.cut
    assert num_operators(*found.equation(pair).left) == 2
    assert num_operators(*found.equation(general).left) == 1
    assert found.written(general)[1] in ((0, 1, 0, 1), (0, 1, 1, 0))


def test_a_planted_false_candidate_is_refuted_by_floats() -> None:
    found = reader()
    true = equation((MUL, (-1, 0), (ADD, (-1, 1), (-1, 1))), (MUL, (-1, 1), (ADD, (-1, 0), (-1, 0))))
    false = equation((RELU, (ADD, (-1, 0), (-1, 1))), (ADD, (RELU, (-1, 0)), (RELU, (-1, 1))))
    for trial in (*float_trials(found, {"m": 3})[:1], residue_trial(found)):
        assert trial.holds(true) and not trial.holds(false)
    positive = float_trials(found, {"m": 3})[1]
    assert positive.holds(false)  # why one kind of numbers is not enough


def test_an_instance_and_a_congruent_pair_follow() -> None:
    rewriter = Rewriter(frozenset({ADD, MUL}))
    rewriter.add(equation((ADD, (MUL, X, Y), (MUL, X, Z)), (MUL, X, (ADD, Y, Z))))
    instance = equation((ADD, (MUL, Y, W), (MUL, W, W)), (MUL, W, (ADD, Y, W)))
    assert rewriter.follows(instance, never)
    other = equation((ADD, (MUL, X, Y), (MUL, X, Z)), (MUL, X, (RELU, W)))
    assert not rewriter.follows(other, never)
    assert rewriter.follows(other, lambda one, two: {one, two} == {(ADD, Y, Z), (RELU, W)})
    rewriter.remove(equation((ADD, (MUL, X, Y), (MUL, X, Z)), (MUL, X, (ADD, Y, Z))))
    assert not rewriter.follows(instance, never)


def test_operands_that_commute_are_tried_both_ways() -> None:
    known = equation((MUL, (RELU, X), Y), (RELU, (MUL, X, Y)))
    goal = equation((MUL, Z, (RELU, W)), (RELU, (MUL, W, Z)))
    for commutes, follows in ((frozenset({MUL}), True), (frozenset[int](), False)):
        rewriter = Rewriter(commutes)
        rewriter.add(known)
        plain = Equation(*(tuple(map(rewriter.normal, side)) for side in (goal.left, goal.right)))
        assert rewriter.follows(plain, never) is follows


def test_merging_two_tensors_is_kept_for_each_operator() -> None:
    rewriter = Rewriter()
    for part in (FIRST, SECOND):
        rewriter.add(equation((part, (RELU, X)), (RELU, (part, X))))
    whole = (CAT, X, Y)
    equal = lambda one, two: True
    merged = Equation(((RELU, X), (RELU, Y)), ((FIRST, (RELU, whole)), (SECOND, (RELU, whole))))
    assert not rewriter.follows(merged, equal)
    inner = (MUL, Z, whole)
    twice = Equation(((RELU, (MUL, Z, X)), (RELU, (MUL, Z, Y))), ((FIRST, (RELU, inner)), (SECOND, (RELU, inner))))
    assert rewriter.follows(twice, equal)


def test_inputs_are_named_in_order() -> None:
    assert rename_inputs(equation((ADD, Z, X), (ADD, X, Z))) == equation((ADD, X, Y), (ADD, Y, X))


ASSOCIATIVE = rule("matmul(matmul(x, y), z) => matmul(x, matmul(y, z))")


def test_instances_of_proven_rules_are_dropped() -> None:
    strided = rule("relu(conv[stride=s](x, y)) => conv[stride=s, act=relu](x, y)")
    plain = rule("relu(conv(x, y)) => conv[act=relu](x, y)")
    same = rule("matmul(matmul(x, y), x) => matmul(x, matmul(y, x))")
    assert drop_instances([plain, same, strided, ASSOCIATIVE]) == (strided, ASSOCIATIVE)
    for workers in (1, 2):
        made = prove_all([plain, strided, same, ASSOCIATIVE], prove, quiet, workers)
        assert made.instances == 2 and len(made.rules) == 2 and not made.unproven


def test_what_is_not_proven_is_reported_with_reasons() -> None:
    false = rule("matmul(x, y) => matmul(y, x)")
    made = prove_all([false, ASSOCIATIVE], prove, quiet)
    assert [each for each, _ in made.unproven] == [false]
    assert made.reasons() == {"not found equal": 1}
    none = prove_all([ASSOCIATIVE], lambda rule: Verdict(False, "no"), quiet)
    assert none.rules == () and none.reasons() == {"no": 1}


def test_the_most_general_form_that_is_proven_is_kept() -> None:
    found = prove_all([rule("relu(concat[axis=-1](x, y)) => concat[axis=-1](relu(x), relu(y))")], prove, quiet)
    assert str(found.rules[0].left[0]) == "relu(concat[axis=a](x, y))"
    unnamed = lambda rule: Verdict("axis=a" not in str(rule))
    found = prove_all([rule("relu(concat[axis=-1](x, y)) => concat[axis=-1](relu(x), relu(y))")], unnamed, quiet)
    assert str(found.rules[0].left[0]) == "relu(concat[axis=-1](x, y))"


@pytest.mark.parametrize("most", [0, 100])
def test_rules_that_follow_from_the_rest_are_dropped(most: int) -> None:
    long = rule("matmul(matmul(matmul(x, y), z), w) => matmul(x, matmul(y, matmul(z, w)))")
    kept = drop_derived([long, ASSOCIATIVE], most, quiet)
    assert kept == ((ASSOCIATIVE,) if most else (ASSOCIATIVE, long))
