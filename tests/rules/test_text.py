"""The text form of rules: what is written is read back, and what is malformed is told in three sentences."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conjoin.errors import UsageError
from conjoin.rules.operators import BY_NAME, OPS, RuleOp
from conjoin.rules.parser import MAX_DEPTH, MAX_SIZE
from conjoin.rules.patterns import Apply, Expr, Input, Parameter, Rule, inputs_of
from conjoin.rules.text import (
    MAX_BYTES,
    MAX_RULES,
    RuleFile,
    WrittenRule,
    load_rules,
    parse_expressions,
    parse_rule,
    parse_rules,
    print_expressions,
    save_rules,
)

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True).filter(lambda name: name not in BY_NAME)
VALUES: dict[str, st.SearchStrategy[Parameter]] = {
    "axis": st.integers(-4, 4) | NAMES,
    "part": st.integers(0, 1),
    "stride": st.integers(1, 9) | NAMES,
    "pad": st.integers(0, 9) | st.sampled_from(["same", "valid"]) | NAMES,
    "act": st.sampled_from(["none", "relu"]) | NAMES,
    "groups": st.integers(1, 9) | st.just("?") | NAMES,
    "kernel": st.integers(1, 9) | NAMES,
    "mesh": NAMES,
    "parts": st.integers(1, 9) | NAMES,
    "vertices": st.integers(1, 9) | NAMES,
}


@st.composite
def applications(draw: st.DrawFn, args: st.SearchStrategy[Expr]) -> Expr:
    op: RuleOp = draw(st.sampled_from(OPS))
    given_ = {name: draw(VALUES[name]) for name, default in op.params if default == "" or draw(st.booleans())}
    params = tuple((name, given_[name]) for name, default in op.params if given_.get(name, default) != default)
    return Apply(op.name, params, tuple(draw(args) for _ in range(op.num_args)))


EXPRESSIONS: st.SearchStrategy[Expr] = st.recursive(NAMES.map(Input), applications, max_leaves=8)
WORDS = st.text(st.characters(exclude_categories=("C", "Zl", "Zp")), min_size=1, max_size=20).filter(str.isprintable)


@given(st.lists(EXPRESSIONS, min_size=1, max_size=3).map(tuple))
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_expressions_are_read_back(exprs: tuple[Expr, ...]) -> None:
    assert parse_expressions(print_expressions(exprs)) == exprs


@given(st.lists(st.tuples(WORDS, EXPRESSIONS, st.lists(WORDS, max_size=2), WORDS), unique_by=lambda one: one[0]), WORDS)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_files_are_read_back(parts: list[tuple[str, Expr, list[str], str]], operators: str) -> None:
    rules = tuple(WrittenRule(Rule(name, (x,), (x,)), tuple(when), proof) for name, x, when, proof in parts)
    file = RuleFile(rules, operators)
    assert parse_rules(str(file)) == file


def test_the_form_of_a_file() -> None:
    rule = parse_rule("pool-by-conv", "avg_pool[kernel=k](x)", "conv(x, pool_kernel[kernel=k])")
    assert str(RuleFile((WrittenRule(rule, ("k is odd",), "definitions:0123"),), "7")) == (
        'operators = "7"\n\n'
        "[[rule]]\n"
        'name = "pool-by-conv"\n'
        'left = "avg_pool[kernel=k](x)"\n'
        'right = "conv(x, pool_kernel[kernel=k])"\n'
        'when = ["k is odd"]\n'
        'proof = "definitions:0123"\n'
    )


def test_several_outputs_and_constants() -> None:
    rule = parse_rule("r", "matmul(a, b) ; a", " matmul ( matmul(a , identity), b);a ")
    assert len(rule.left) == 2
    assert inputs_of(*rule.right) == ("a", "b")
    assert Apply("identity", (), ()) in rule.right[0].args[0].args  # type: ignore[union-attr]


def test_parameters_have_one_order_and_no_defaults() -> None:
    (one,) = parse_expressions("conv[groups=?, pad=valid, stride=1](x, y)")
    (other,) = parse_expressions("conv[pad=valid](x, y)")
    assert one == other
    (both,) = parse_expressions("conv[act=relu, stride=2](x, y)")
    assert str(both) == "conv[stride=2, act=relu](x, y)"


def test_a_file_is_written_aside_and_loaded(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    file = RuleFile((WrittenRule(parse_rule("r", "add(a, b)", "add(b, a)")),))
    save_rules(path, file)
    save_rules(path, file)
    assert load_rules(path) == file
    assert [found.name for found in tmp_path.iterdir()] == ["rules.toml"]


MALFORMED = {
    "": "an operator or input is missing",
    "matmol(a, b)": "no operator is called 'matmol'; the nearest name is 'matmul'",
    "matmul(a)": "matmul has 1 operands and takes 2",
    "matmul": "matmul has 0 operands and takes 2",
    "identity(a)": "identity has 1 operands and takes 0",
    "concat(a, b)": "concat lacks its parameter 'axis'",
    "concat[axes=1](a, b)": "the parameter 'axes' is none of concat, which has axis; the nearest name is 'axis'",
    "concat[axis=1, axis=2](a, b)": "the parameter 'axis' is given twice",
    "concat[axis=](a, b)": "axis=] is not possible",
    "split[axis=0, part=2](a)": "part=2 is not possible",
    "conv[stride=0](a, b)": "stride=0 is not possible",
    "conv[pad=-1](a, b)": "pad=-1 is not possible",
    "conv[stride=?](a, b)": r"stride=? is not possible",
    "conv[stride=99999999999999](a, b)": "is not possible",
    "replicate[mesh=1](a)": "mesh=1 is not possible",
    "add(a, b": "')' is missing before 'the end'",
    "add(a, b))": "there is ')' where it should end",
    "add(a, , b)": "an operator or input is missing before ','",
    "add(a; b)": "')' is missing before ';'",
    "add(a, $)": "the sign '$' has no meaning",
    "add(a, é)": "the sign 'é' has no meaning",
    "add[](a, b)": "a parameter is missing before ']'",
    "__import__('os')": "no operator is called '__import__'",
    "relu(" * (MAX_DEPTH + 2) + "x" + ")" * (MAX_DEPTH + 2): f"more than {MAX_DEPTH} operators are nested",
    ";".join(["x"] * (MAX_SIZE + 1)): f"more than {MAX_SIZE} names",
}


@pytest.mark.parametrize(("text", "why"), MALFORMED.items(), ids=lambda value: value[:30])
def test_malformed_expressions_say_where_and_why(text: str, why: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_rule("bad", "add(a, b)", text)
    assert why in str(error.value)
    assert str(error.value).startswith("The right side of rule 'bad' cannot be read at column ")
    assert_three_sentences(error.value)


def assert_three_sentences(error: UsageError) -> None:
    assert len(re.findall(r"\.(?: |$)", str(error))) == 3, error
    assert len(str(error)) < 1000


RULE = '[[rule]]\nname = "r"\nleft = "add(a, b)"\nright = "add(b, a)"\n'
BAD_FILES = {
    "[[rule": "is not TOML",
    "rule = 3": "'rule' as no list",
    "rule = [3]": "Rule 1 of the file is no table",
    "operators = 3": "'operators' as something else",
    'operatons = "x"': "the key 'operatons'",
    RULE + RULE: "Rule 2 of the file is named 'r'",
    '[[rule]]\nleft = "a"\nright = "a"': "Rule 1 of the file has no proper name",
    '[[rule]]\nname = "a\\nb"\nleft = "a"\nright = "a"': "has no proper name",
    '[[rule]]\nname = "r"\nright = "a"': "Rule 'r' has 'no text' as 'left'",
    '[[rule]]\nname = "r"\nleft = 3\nright = "a"': "Rule 'r' has '3' as 'left'",
    RULE + "when = 'x'": "Conditions are a list",
    RULE + "whem = []": "the key 'whem'. A rule has name, left, right, when, proof, shortcut. Remove it; the nearest",
    RULE + "proof = 1": "as 'proof'",
    RULE.replace("add(b, a)", "add(c, a)"): "uses the input 'c'",
    RULE.replace("add(b, a)", "add(b, a); a"): "1 outputs on its left side and 2 on its right side",
    "a" + ".a" * 5000 + " = 1": "dots outside of strings",
    "x = " + "[" * 5000: "is not TOML",
    "#" * (MAX_BYTES + 1): "more than 4,194,304 bytes",
    "[[rule]]\n" * (MAX_RULES + 1): "20,001 rules",
}


@pytest.mark.parametrize(("text", "why"), BAD_FILES.items(), ids=[*map(str, range(len(BAD_FILES)))])
def test_malformed_files_say_where_and_why(text: str, why: str, tmp_path: Path) -> None:
    begun = time.process_time()
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(why)) as error:
        load_rules(path)
    assert_three_sentences(error.value)
    assert time.process_time() - begun < 5


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing.toml", tmp_path, tmp_path / "binary"):
        with pytest.raises(UsageError, match="could not be read") as error:
            load_rules(path)
        assert "Nothing was loaded" in str(error.value)


@given(st.text(alphabet="ab[](),;=?-1 matmulconcataxis", max_size=40))
@settings(deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        exprs = parse_expressions(text)
    except UsageError:
        return
    assert parse_expressions(print_expressions(exprs)) == exprs
