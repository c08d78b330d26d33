"""A library is refused when a rule was edited or the operators changed since it was proven."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from conjoin.errors import UsageError
from conjoin.rules import library as room
from conjoin.rules.definitions.calls import Call, Tensor
from conjoin.rules.definitions.proof import prove
from conjoin.rules.definitions.sums import Function, of
from conjoin.rules.library import Library, find_operators_version, make_entry, method_of, operators_version
from conjoin.rules.operators import BY_NAME, FUNCTIONS, RuleOp
from conjoin.rules.text import parse_rule


@pytest.fixture
def library() -> Library:
    return Library((
        make_entry(parse_rule("add-commutes", "add(a, b)", "add(b, a)"), (), "definitions"),
        make_entry(parse_rule("transposes-cancel", "transpose(transpose(x))", "x"), (), "definitions"),
        make_entry(parse_rule("pool-by-conv", "avg_pool[kernel=k](x)", "conv(x, pool_kernel[kernel=k])"),
                   ("k is odd",), "laws"),
        make_entry(parse_rule("add-again", "add(a, a)", "add(a, a)"), (), "definitions"),
        make_entry(parse_rule("split", "x", "concat[axis=a](split[axis=a, part=0](x), split[axis=a, part=1](x))"),
                   (), "definitions"),
    ))  # fmt: skip


def test_a_library_is_read_back(library: Library, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    library.save(path)
    assert Library.load(path) == library
    assert path.read_text().startswith(f'operators = "{operators_version()}"\n')
    Library(()).save(path)
    assert Library.load(path) == Library(())


def test_rules_are_found_by_name_and_by_root(library: Library) -> None:
    assert library.by_name["pool-by-conv"].conditions == ("k is odd",)
    roots = {root: [entry.name for entry in entries] for root, entries in library.by_root.items()}
    assert roots == {
        "add": ["add-commutes", "add-again"],
        "transpose": ["transposes-cancel"],
        "avg_pool": ["pool-by-conv"],
        "": ["split"],
    }


EDITS = {
    "right": ('right = "x"', 'right = "transpose(x)"', "transposes-cancel"),
    "parameter": ("pool_kernel[kernel=k]", "pool_kernel[kernel=3]", "pool-by-conv"),
    "name": ('"transposes-cancel"', '"transposes-vanish"', "transposes-vanish"),
    "conditions": ('when = ["k is odd"]\n', "", "pool-by-conv"),
    "method": ('"laws:', '"definitions:', "pool-by-conv"),
    "proof": ('proof = "laws:', 'proof = "laws ', "pool-by-conv"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_rule_is_refused(edit: str, library: Library, tmp_path: Path) -> None:
    old, new, name = EDITS[edit]
    path = tmp_path / "rules.toml"
    library.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UsageError) as error:
        Library.load(path)
    assert f"Rule {name!r} of the library {path}" in str(error.value)
    assert_three_sentences(str(error.value))


def test_a_missing_proof_is_refused(library: Library, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    library.save(path)
    path.write_text(re.sub(r"proof = .*\n", "", path.read_text()))
    with pytest.raises(UsageError, match="no rule is used without one"):
        Library.load(path)


def test_layout_and_order_of_the_text_do_not_matter(library: Library, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    library.save(path)
    path.write_text("# ours\n" + path.read_text().replace("add(a, b)", "add( a,b )").replace("name =", "name   ="))
    assert Library.load(path) == library


def test_a_library_from_other_operators_is_refused(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rules.toml"
    library.save(path)
    monkeypatch.setattr(room, "operators_version", lambda: "0123456789abcdef")
    with pytest.raises(UsageError) as error:
        Library.load(path)
    assert "at version 0123456789abcdef now" in str(error.value)
    assert "'add-commutes'" in str(error.value)
    assert_three_sentences(str(error.value))


def assert_three_sentences(message: str) -> None:
    assert len(re.findall(r"\.(?: |$)", message)) == 3, message
    assert "`conjoin rules prove`" in message


def _twice(call: Call) -> Tensor:
    (x,) = call.args
    return Tensor(x.dims, lambda index, devices: x.at(index, devices).scaled(-1).scaled(2))


def _renamed(call: Call) -> Tensor:
    """What relu is, written in another way."""
    made = call.args[0]
    dims = made.dims
    return Tensor(dims, lambda place, where: of(Function("relu", (made.at(place, where),))))


CHANGES = [
    ("neg", {"define": _twice}),
    ("relu", {"define": BY_NAME["gelu"].define}),
    ("max_pool", {"define": BY_NAME["avg_pool"].define}),
    ("partition", {"define": BY_NAME["replicate"].define}),
    ("conv", {"params": (("stride", 2), *BY_NAME["conv"].params[1:])}),
    ("relu", {"kind": "matrix"}),
]


@pytest.mark.parametrize(("name", "change"), CHANGES)
def test_the_version_changes_with_an_operator(
    name: str, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = find_operators_version()
    changed: RuleOp = replace(BY_NAME[name], **change)  # type: ignore[arg-type]
    monkeypatch.setitem(BY_NAME, name, changed)
    assert find_operators_version() != before


def test_the_version_changes_with_a_new_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_operators_version()
    monkeypatch.delitem(BY_NAME, "gelu")
    assert find_operators_version() != before


def test_the_version_does_not_change_with_how_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    before = find_operators_version()
    monkeypatch.setitem(BY_NAME, "relu", replace(BY_NAME["relu"], define=_renamed, words="other words"))
    assert find_operators_version() == before


def test_what_is_known_of_a_function_is_not_said_of_others() -> None:
    twice = parse_rule("twice", "relu(relu(x))", "relu(x)")
    moved = parse_rule("moved", "relu(concat[axis=a](x, y))", "concat[axis=a](relu(x), relu(y))")
    odd = parse_rule("odd", "square(neg(x))", "square(x)")
    assert [method_of(rule) for rule in (twice, moved, odd)] == ["functions", "definitions", "functions"]
    made = Library(tuple(make_entry(rule, (), method_of(rule)) for rule in (twice, moved, odd)))
    names = {rule.name for rule in made.rules}
    assert names == {"twice", "odd", "moved", *(f"moved:{name}" for name in FUNCTIONS if name != "relu")}
    assert all(prove(rule).proven for rule in made.rules)
