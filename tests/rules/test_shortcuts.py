"""What others take the place of is dropped; what spares a long way, or one through larger graphs, is a shortcut."""

from __future__ import annotations

from functools import reduce

from conjoin.rules import Entry, parse_rule
from conjoin.rules.library_build import certify
from conjoin.rules.shortcuts import drop_replaceable


def entry(name: str, left: str, right: str) -> Entry:
    made = certify(parse_rule(name, left, right))
    assert isinstance(made, Entry), made
    return made


def kept(*entries: Entry) -> dict[str, str]:
    return {one.name: one.shortcut for one in drop_replaceable(entries, lambda line: None)}


COMMUTES = entry("commutes", "add(x, y)", "add(y, x)")
ASSOCIATES = entry("associates", "add(x, add(y, z))", "add(add(x, y), z)")


def test_what_two_rewrites_give_is_dropped() -> None:
    turned = entry("turned", "add(x, add(y, z))", "add(z, add(x, y))")
    assert kept(COMMUTES, ASSOCIATES, turned) == {"commutes": "", "associates": ""}


def test_of_two_that_give_each_other_one_stays() -> None:
    other = entry("associates-too", "add(add(x, y), z)", "add(x, add(y, z))")
    assert len(kept(ASSOCIATES, other)) == 1


def test_a_long_way_is_spared() -> None:
    eight = [f"x{i}" for i in range(8)]
    nested = reduce(lambda inner, name: f"matmul({name}, {inner})", reversed(eight))
    turned = reduce(lambda inner, name: f"matmul({inner}, {name})", eight)
    moved = entry("moved", nested, turned)
    product = entry("product", "matmul(x, matmul(y, z))", "matmul(matmul(x, y), z)")
    found = kept(product, moved)
    assert found.keys() == {"product", "moved"} and int(found["moved"].split()[0]) > 3


def test_a_way_through_a_larger_graph_is_spared() -> None:
    """Two products as parts of one, and the parts joined again."""
    joined = "matmul(x, concat[axis=-1](y, z))"
    parts = f"split[axis=-1, part=0]({joined}); split[axis=-1, part=1]({joined})"
    pair = entry("pair", "matmul(x, y); matmul(x, z)", parts)
    whole = entry("whole", "concat[axis=a](split[axis=a, part=0](x), split[axis=a, part=1](x))", "x")
    last = entry("last", "concat[axis=-1](split[axis=-1, part=0](x), split[axis=-1, part=1](x))", "x")
    at_once = entry("at-once", "concat[axis=-1](matmul(x, y), matmul(x, z))", joined)
    assert kept(pair, whole, last, at_once)["at-once"] == "3 rewrites over 5 operators"


def test_a_rule_for_every_function_stands_for_one_about_another() -> None:
    relu = entry("relu", "concat[axis=a](relu(x), relu(y))", "relu(concat[axis=a](x, y))")
    gelu = entry("gelu", "concat[axis=a](gelu(x), gelu(y))", "gelu(concat[axis=a](x, y))")
    assert len(kept(relu, gelu)) == 1


def test_what_is_known_of_one_function_is_no_reason_to_drop_what_holds_for_all() -> None:
    twice = entry("twice", "relu(relu(x))", "relu(x)")
    inside = entry("inside", "relu(transpose(relu(x)))", "transpose(relu(relu(x)))")
    moved = entry("moved", "relu(transpose(x))", "transpose(relu(x))")
    assert "moved" in kept(twice, inside, moved)


def test_a_step_from_a_constant_is_none_that_a_search_can_take() -> None:
    written = entry("written", "matmul(x, identity)", "x")
    added = entry("added", "add(x, matmul(x, y))", "matmul(x, add(y, identity))")
    apart = entry("apart", "matmul(x, add(y, z))", "add(matmul(x, y), matmul(x, z))")
    assert "added" in kept(written, added, apart, COMMUTES)
