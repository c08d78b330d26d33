"""Rules like those that TASO and Unity generate follow from the library, and over devices from `tests/devices`, too.

These are 281 and 221 rules over the operators of the two papers, written for these tests: none is taken from the sets
that TASO and Unity publish with their code (133 and 640 rules), in which some are false: for grouped convolutions those
that rest on TASO's property of concatenated kernels (`test_refutation.py`), and over devices those that take copies for
partial sums.

`conjoin rules test tests/rules/like_taso.toml` judges every rule in full, with trials and with each step of a
derivation proven again; that takes about a minute, so here it is done for a sample.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from conjoin.rules import Deriver, Library, Rule, Standing, judge, load_rules
from conjoin.rules.text import WrittenRule
from tests.devices.device_rules import rules_over_devices

FILES = ("like_taso.toml", "like_unity.toml")
UNDERIVED = ["conv(x, w) => combine[axis=1](conv(partition[axis=1](x), partition[axis=0](w)))"]
"""True and proven; no candidate from which it follows is."""


def rules_of(file: str) -> tuple[WrittenRule, ...]:
    return load_rules(Path(__file__).parent / file).rules


@pytest.fixture(scope="module")
def deriver() -> Deriver:
    return Deriver((*Library.shipped().rules, *rules_over_devices()))


@pytest.mark.parametrize("file", FILES)
def test_all_are_derived(file: str, deriver: Deriver) -> None:
    rules = rules_of(file)
    assert len(rules) >= 200
    derived = {one.rule: deriver.derive(one.rule, when=one.when) for one in rules}
    missing = [str(rule).split(": ", 1)[1] for rule, steps in derived.items() if steps is None]
    assert [text for text in missing if text not in UNDERIVED] == []


def sample_of(file: str) -> list[WrittenRule]:
    """A few, one of which has conditions where some have."""
    rules = rules_of(file)
    return [*rules[::40], *[one for one in rules if one.when][:1]]


@pytest.mark.parametrize("one", [one for file in FILES for one in sample_of(file)], ids=lambda one: one.rule.name)
def test_a_sample_is_judged_derived(one: WrittenRule, deriver: Deriver) -> None:
    assert judge(one.rule, deriver, one.when or None).standing is Standing.DERIVED
    if one.when:
        assert judge(one.rule, deriver).standing is Standing.REFUTED, "its conditions are needed"


def test_what_is_false_is_not_derived(deriver: Deriver) -> None:
    """Sides exchanged between rules of one set give rules that are hardly ever true."""
    rules = [one.rule for one in rules_of("like_taso.toml")[:60]]
    mixed = [Rule("mixed", one.left, other.right) for one, other in pairwise(rules)]
    fitting = [rule for rule in mixed if len(rule.left) == len(rule.right)]
    derived = [rule for rule in fitting if deriver.derive(rule) is not None]
    assert all(judge(rule, deriver).standing is not Standing.REFUTED for rule in derived)
    assert len(derived) < len(fitting) / 4
