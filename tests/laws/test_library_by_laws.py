"""The library judged a second time: by the laws that the papers take for granted, and Z3 over them.

Proofs from definitions and proofs from laws share the text of rules and the ranks of tensors, and nothing else. Laws
say less: about functions that TASO has not, dims in another order, parts of sums there is none. What they do prove,
definitions must prove; and most of the library they do.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from conjoin.rules import Library, Rule, load_rules, operators_in, prove
from tests.devices.device_rules import RULES as OVER_DEVICES
from tests.laws.law_proofs import prove_by_laws
from tests.laws.laws import laws

OPERATORS = {op for law in laws() for op in law.operators}
SHARE = 0.5
"""Of the rules about operators that laws are about. It was 269 of 420, and 132 of 158 over devices."""


def covered(rules: list[Rule]) -> list[Rule]:
    return [rule for rule in rules if {expr.op for expr in operators_in(*rule.outputs)} <= OPERATORS]


SHIPPED = covered([entry.rule for entry in Library.shipped().entries])
PARALLEL = covered([written.rule for written in load_rules(OVER_DEVICES).rules])


@pytest.mark.parametrize("rules", [SHIPPED[::18], PARALLEL[::18]], ids=["shipped", "over devices"])
def test_laws_prove_most_of_it(rules: list[Rule]) -> None:
    proven = [rule for rule in rules if prove_by_laws(rule, 3000).proven]
    assert len(proven) > SHARE * len(rules)


def test_what_laws_prove_definitions_prove() -> None:
    """Also of rules that are mostly false: one side of each with the other of the next."""
    mixed = [Rule("mixed", one.left, other.right) for one, other in pairwise(SHIPPED)]
    fitting = covered([rule for rule in mixed if len(rule.left) == len(rule.right)])[::16]
    proven = [rule for rule in fitting if prove_by_laws(rule, 300).proven]
    assert all(prove(rule).proven for rule in proven) and len(proven) < len(fitting) / 2
