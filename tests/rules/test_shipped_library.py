"""The library that ships: rules are proven again, and survive trials.

`conjoin rules prove` proves all of them again; making the library tries each out a hundred times.
"""

from __future__ import annotations

import pytest

from conjoin.rules import Entry, Library, Rule, apply_all, find_matches, prove, try_out
from conjoin.search.rewrites import ways_of
from tests.cases import each_of
from tests.rules.left_sides import draw_left_side

ENTRIES = Library.shipped().entries


@each_of(ENTRIES[::4], lambda entry: entry.name)
def test_it_is_proven_with_its_conditions(entry: Entry) -> None:
    found = prove(entry.rule)
    assert found.proven and found.conditions == entry.conditions


IDLE = (
    "relu-conv-to-conv-1", "relu-conv-to-conv-2", "conv-identity_kernel-to-itself", "matmul-identity-to-itself-1",
    "matmul-identity-to-itself-2", "mul-ones-to-itself", "transpose-identity-to-identity",
)  # fmt: skip
"""What others are derived from: that a convolution and its function, two calls in graphs, are one operator in rules;
and what constants are, which rules write and graphs do not have."""


@pytest.mark.parametrize("part", range(6))
def test_each_rewrites_some_graph(part: int) -> None:
    ways: dict[str, list[Rule]] = {}
    for way in ways_of(Library.shipped()):
        ways.setdefault(way.proof, []).append(way.rule)
    some = [entry for entry in ENTRIES[part::6] if entry.name not in IDLE]
    idle = [entry.name for entry in some if not any(map(rewrites, ways[f"{entry.method}:{entry.stamp}"]))]
    assert idle == []


def rewrites(rule: Rule, seeds: int = 40) -> bool:
    for seed in range(seeds):
        graph = draw_left_side(rule, seed, disguised=False)
        if graph is not None and apply_all(graph, rule, find_matches(graph, rule, apart=True))[1]:
            return True
    return False


@pytest.mark.parametrize("entry", ENTRIES[::14], ids=lambda entry: entry.name)
def test_it_survives_trials(entry: Entry) -> None:
    trials = try_out(entry.rule, 20, when=entry.conditions)
    assert trials.num_run >= 20 and trials.counterexample is None
