"""Rules proven from laws, and false ones that are not."""

from __future__ import annotations

import pytest

from conjoin.rules.definitions.proof import prove
from conjoin.rules.text import parse_rule
from tests.laws.law_proofs import prove_by_laws, prove_from, prove_law, proven_lemmas
from tests.laws.laws import laws, lemmas

JOINED = "matmul(x, concat[axis=-1](y, z))"
COUNTED = "matmul(x, concat[axis=1](y, z))"
MERGED = "conv[groups=1, act=relu](x, concat[axis=0](enlarge[kernel=k](y), z))"

TRUE = {
    "associativity": ("matmul(matmul(x, y), z)", "matmul(x, matmul(y, z))", "matmul-associative"),
    "joined": (
        "matmul(x, y); matmul(x, z)",
        f"split[axis=-1, part=0]({JOINED}); split[axis=-1, part=1]({JOINED})",
        "concat-matmul-columns split-first split-second",
    ),
    "joined, dims counted from the beginning": (
        "matmul(x, y); matmul(x, z)",
        f"split[axis=1, part=0]({COUNTED}); split[axis=1, part=1]({COUNTED})",
        "concat-matmul-columns split-first split-second",
    ),
    "transposed": (
        "matmul(x, y)",
        "transpose(matmul(transpose(y), transpose(x)))",
        "matmul-transpose transpose-inverse",
    ),
    "two poolings": (
        "add(avg_pool[kernel=3](x), avg_pool[kernel=3](y))",
        "conv(add(x, y), pool_kernel[kernel=3])",
        "conv-add-images pool-by-conv",
    ),
    "merged convolutions": (
        "relu(conv[groups=1](x, y)); relu(conv[groups=1](x, z))",
        f"split[axis=1, part=0]({MERGED}); split[axis=1, part=1]({MERGED})",
        "concat-conv-features conv-enlarge conv-relu split-first split-second",
    ),
    "rows on devices": (
        "matmul(x, y)",
        "combine[axis=-2](matmul(partition[axis=-2](x), replicate(y)))",
        "combine-partition partition-matmul-rows",
    ),
    "two layers on devices": (
        "linear(relu(linear(x, y)), z)",
        "reduce(linear(relu(linear(replicate(x), partition[axis=0](y))), partition[axis=1](z)))",
        "partition-linear-features partition-unary:relu reduce-linear-inner",
    ),
    "two mesh axes": (
        "partition[axis=a, mesh=m](relu(partition[axis=b, mesh=n](x)))",
        "partition[axis=b, mesh=n](partition[axis=a, mesh=m](relu(x)))",
        "partition-twice partition-unary:relu",
    ),
    "by operators that are on neither side": (
        "matmul(add(x, y), identity)",
        "add(y, x)",
        "add-commutative matmul-identity",
    ),
}

FALSE = {
    "order of a product": ("matmul(x, y)", "matmul(y, x)"),
    "grouped convolutions": ("concat[axis=1](conv(x, y), conv(x, z))", "conv(x, concat[axis=0](y, z))"),
    "relu of a sum over devices": ("relu(reduce(x))", "reduce(relu(x))"),
    "sum of copies": ("reduce(replicate(x))", "x"),
    "linear in spite of relu": ("conv[act=relu](x, add(y, z))", "add(conv[act=relu](x, y), conv[act=relu](x, z))"),
    "one dim is not two": (
        "concat[axis=a](concat[axis=a](x, y), concat[axis=a](z, w))",
        "concat[axis=a](concat[axis=a](x, z), concat[axis=a](y, w))",
    ),
    "softmax along the dim that is split": (
        "softmax[axis=-1](x)",
        "combine[axis=-1](softmax[axis=-1](partition[axis=-1](x)))",
    ),
    "one output of two": ("add(x, y); mul(x, y)", "add(y, x); mul(x, x)"),
}


@pytest.mark.parametrize(("left", "right", "used"), TRUE.values(), ids=TRUE)
def test_true_rules_are_proven_and_name_their_laws(left: str, right: str, used: str) -> None:
    found = prove_by_laws(parse_rule("", left, right), 20_000)
    assert found.proven, found.reason
    assert set(used.split()) <= set(found.laws)


@pytest.mark.parametrize(("left", "right", "used"), TRUE.values(), ids=TRUE)
def test_the_named_laws_are_enough(left: str, right: str, used: str) -> None:
    found = prove_by_laws(parse_rule("", left, right), 20_000)
    behind = [law for law in laws() if law.name in found.laws]
    lemmas_used = [law for law in lemmas() if law.name in found.laws]
    assert prove_from(parse_rule("", left, right), [*behind, *lemmas_used], 20_000).proven


@pytest.mark.parametrize(("left", "right", "used"), TRUE.values(), ids=TRUE)
def test_definitions_say_the_same(left: str, right: str, used: str) -> None:
    assert prove(parse_rule("", left, right)).proven


@pytest.mark.parametrize(("left", "right"), FALSE.values(), ids=FALSE)
def test_false_rules_are_not_proven(left: str, right: str) -> None:
    found = prove_by_laws(parse_rule("", left, right), 500)
    assert not found.proven
    assert "did not become one" in found.reason
    assert found.laws == ()


def test_tensors_that_differ_between_devices_meet_no_others() -> None:
    found = prove_by_laws(parse_rule("", "matmul(x, y)", "combine[axis=-2](matmul(partition[axis=-2](x), y))"))
    assert not found.proven
    assert "devices" in found.reason


def test_without_a_law_its_rule_is_not_proven() -> None:
    rule = parse_rule("", *TRUE["associativity"][:2])
    others = [law for law in laws() if law.name != "matmul-associative"]
    assert not prove_from(rule, others, 500).proven


def test_what_laws_need_is_told() -> None:
    rule = parse_rule("", "matmul(concat[axis=-1](x, z), concat[axis=-2](y, w))", "add(matmul(z, w), matmul(x, y))")
    assert "concat-matmul-inner: x.-1 = y.-2" in prove_by_laws(rule).needs


def test_every_lemma_follows_from_the_laws() -> None:
    assert proven_lemmas() == lemmas()


@pytest.mark.parametrize("name", ["matmul-add-left", "matmul-scale-left"])
def test_linearity_in_the_left_operand_is_a_lemma(name: str) -> None:
    (lemma,) = (lemma for lemma in lemmas() if lemma.name == name)
    found = prove_law(lemma, laws(), 20_000)
    assert {"matmul-transpose", "transpose-inverse"} <= set(found.laws)


def test_laws_behind_lemmas_are_named() -> None:
    found = prove_by_laws(parse_rule("", "add(matmul(x, y), matmul(z, y))", "matmul(add(x, z), y)"))
    assert {"matmul-add-left", "matmul-add", "matmul-transpose"} <= set(found.laws)


def test_a_law_is_proven_for_names_that_mean_the_same_dim() -> None:
    """In a rule two names are two dims; in a law only where it says so."""
    (law,) = (law for law in laws() if law.name == "concat-geometry")
    assert prove_from(law.rule, laws()).proven
    assert prove_law(law, laws()).proven
    unsaid = type(law)(law.rule, law.source, law.comment)
    assert not prove_law(unsaid, laws(), 500).proven


def test_the_time_limit_is_kept() -> None:
    terms = " ".join(f"add(x{i}," for i in range(9)) + " y" + ")" * 9
    found = prove_by_laws(parse_rule("", f"mul({terms}, {terms})", f"mul({terms}, y)"), 300)
    assert not found.proven
    assert found.seconds < 30
