"""Definitions come from the declarations of `conjoin.ops`; what is said besides is only what these leave open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from conjoin.errors import UsageError
from conjoin.ops import COMBINE, PARTITION, REDUCE, REPLICATE, Indexed, OpSpec, find_spec
from conjoin.ops import Call as OpCall
from conjoin.rules.definitions import declarations
from conjoin.rules.definitions.declarations import MARKS, Declared, NotSaid
from conjoin.rules.definitions.proof import Frame
from conjoin.rules.definitions.reading import derived
from conjoin.rules.library import Library, _definitions, find_operators_version, make_entry, operators_version
from conjoin.rules.operators import BY_NAME, DECLARED, LEFT_OPEN, OPS, UNDECLARED
from conjoin.rules.patterns import Rule
from conjoin.rules.text import parse_rule
from conjoin.rules.trials.instances import NoInstance
from tests.rules.test_operators import applications, check_operator


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    """What was asked of other declarations is asked again."""
    yield
    declarations._ask.cache_clear()
    operators_version.cache_clear()


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Callable[[OpSpec], None]:
    """Declare an operator differently."""

    def change(spec: OpSpec) -> None:
        monkeypatch.setattr(declarations, "find_spec", lambda name: spec if name == spec.name else find_spec(name))
        declarations._ask.cache_clear()
        operators_version.cache_clear()

    return change


def spec_of(name: str) -> OpSpec:
    found = find_spec(name)
    assert found is not None
    return found


def build(name: str, declared: Declared, monkeypatch: pytest.MonkeyPatch) -> int:
    """Define an operator as another declaration says, and nothing besides; in how many applications."""
    monkeypatch.setitem(BY_NAME, name, replace(BY_NAME[name], define=derived(declared)))
    found = list(applications(BY_NAME[name]))
    for expr in found:
        Frame(Rule("", (expr,), (expr,))).build()  # NotSaid where something is left open
    return len(found)


def test_every_operator_is_declared_or_in_the_table_of_those_that_are_not() -> None:
    assert not set(DECLARED) & set(UNDECLARED)
    assert {op.name for op in OPS} == {*DECLARED, *UNDECLARED}
    assert set(LEFT_OPEN) < set(DECLARED)
    assert all(find_spec(declared.name) is not None for declared in DECLARED.values())


@pytest.mark.parametrize("name", [name for name in DECLARED if name not in LEFT_OPEN])
def test_what_is_declared_is_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(name, DECLARED[name], monkeypatch) > 0


@pytest.mark.parametrize("name", LEFT_OPEN)
def test_nothing_is_said_besides_that_follows_from_a_declaration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotSaid, match=r"leaves? open"):
        build(name, DECLARED[name], monkeypatch)


def test_what_is_undeclared_cannot_be_declared_by_notation() -> None:
    """Constants have no operand; the notation of ones and zeros is one, so is that of all changes of layout."""
    assert {name for name in UNDECLARED if BY_NAME[name].num_args} == {op.name for op in OPS if op.parallel}
    assert find_spec("ones") is find_spec("zeros")
    assert {spec_of(name).index for name in (PARTITION, COMBINE, REPLICATE, REDUCE)} == {"... -> ..."}


@pytest.mark.parametrize(
    ("rule_op", "name", "reason"),
    [
        ("add", "frobnicate", "nobody declared frobnicate"),
        ("matmul", "mm", r"mm on operands of ranks \(3, 3\) is not declared"),
        ("sum", "cumsum", "leaves open what is done along its dims"),
        ("transpose", "tril", "treats elements differently by their position"),
        ("conv", "conv_transpose2d.input", "windows that are inverted"),
    ],
)
def test_what_is_not_said_is_not_guessed(rule_op: str, name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotSaid, match=reason):
        build(rule_op, Declared(name, DECLARED[rule_op].takes), monkeypatch)


def test_a_sum_that_is_declared_to_average_is_noticed(
    declare: Callable[[OpSpec], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(replace(spec_of("sum.dim_IntList"), index=spec_of("mean.dim").index))
    with pytest.raises(NotSaid, match="neither sums nor averages"):
        build("sum", DECLARED["sum"], monkeypatch)


def test_numbers_that_stand_for_parameters_could_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> list[str]:
        return [text.partition(" | ")[2] for op in OPS if "image" in op.kind for text in _definitions(op)]

    before = found()
    for name, number in {"stride": 31, "pad": 23, "groups": 7, "kernel": 19}.items():
        monkeypatch.setitem(MARKS, name, number)
    declarations._ask.cache_clear()
    assert found() == before


def swapped_windows(call: OpCall) -> Indexed:
    index = spec_of("conv2d").index
    assert callable(index)
    said = index(call)
    assert isinstance(said, Indexed)
    return Indexed(said.text.replace("(g o) c r q,", "(g o) c q r,"), said.sizes)


def more_windows(call: OpCall) -> Indexed:
    index = spec_of("avg_pool2d").index
    assert callable(index)
    said = index(call)
    assert isinstance(said, Indexed)
    return Indexed(said.text, tuple((name, n + 1 if name in "yx" else n) for name, n in said.sizes))


WRONG = {
    "a weight that is not transposed": ("linear", replace(spec_of("linear"), index="... k, k n, n -> ... n")),
    "rows and columns exchanged": ("matmul", replace(spec_of("matmul"), index="... k m, ... k n -> ... m n")),
    "a kernel on its side": ("conv", replace(spec_of("conv2d"), index=swapped_windows)),
    "addition is no sum": ("add", replace(spec_of("add.Tensor"), terms="self other")),
    "rows that are not looked up": ("embedding", replace(spec_of("embedding"), index="v d, ... -> ... d")),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_declaration_makes_a_wrong_definition(case: str, declare: Callable[[OpSpec], None]) -> None:
    name, spec = WRONG[case]
    declare(spec)
    with pytest.raises((AssertionError, NoInstance, NotSaid)):
        check_operator(BY_NAME[name])


CHANGED = {
    **{case: spec for case, (_, spec) in WRONG.items()},
    "a dim that must be whole": replace(spec_of("linear"), index="... k!, n k!, n -> ... n"),
    "a function that is linear": replace(spec_of("relu"), terms="self"),
    "parts that are not passed on": replace(spec_of("cat"), index=spec_of("stack").index),
    "windows counted otherwise": replace(spec_of("avg_pool2d"), index=more_windows),
}
UNCHANGED = {
    "other names of indices": replace(spec_of("linear"), index="... in, out in, out -> ... out"),
    "an operator that no rule has": replace(spec_of("bmm"), index="b m k, b n k -> b m n"),
    "what it costs": replace(spec_of("matmul"), flops=7),
    "how it is tried out": replace(spec_of("conv2d"), domain=(0.5, 1.0)),
}


@pytest.mark.parametrize("case", CHANGED)
def test_the_version_changes_with_a_declaration(case: str, declare: Callable[[OpSpec], None]) -> None:
    before = find_operators_version()
    declare(CHANGED[case])
    assert find_operators_version() != before


@pytest.mark.parametrize("case", UNCHANGED)
def test_the_version_does_not_change_with_anything_else(case: str, declare: Callable[[OpSpec], None]) -> None:
    before = find_operators_version()
    declare(UNCHANGED[case])
    assert find_operators_version() == before


def test_a_library_proven_for_other_declarations_is_refused(declare: Callable[[OpSpec], None], tmp_path: Path) -> None:
    path, before = tmp_path / "rules.toml", operators_version()
    rule = parse_rule("sums-of-layers", "linear(x, add(y, z))", "add(linear(x, y), linear(x, z))")
    Library((make_entry(rule, (), "definitions"),)).save(path)
    assert Library.load(path).rules
    declare(CHANGED["a dim that must be whole"])
    with pytest.raises(UsageError) as error:
        Library.load(path)
    assert str(error.value) == (
        f"The library {path} was proven for version {before} of the operators. "
        f"They are at version {operators_version()} now, so that the proof of 'sums-of-layers' and of all other "
        f"rules may not hold. Run `conjoin rules prove` to prove them again."
    )
    declare(UNCHANGED["other names of indices"])
    assert Library.load(path).rules
