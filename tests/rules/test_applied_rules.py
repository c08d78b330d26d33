"""Every shipped rule wherever it matches, in graphs that are not made from what proofs say, judged by running torch.

A graph is the left side of a rule on tensors of any ranks and dims (`left_sides.py`), with sizes that all differ, are
all the same, or something between; or a random program that knows of no rule (`random_programs.py`). Operands are
permuted, expanded, of other dtypes. The graph after every rewrite must give what it gave before: values and gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache, lru_cache

import pytest
import torch

from conjoin.ir import Graph, verify
from conjoin.rules import Index, Library, Refused, Rule, apply, find_matches, operators_in, rehearse, replacement_of
from conjoin.rules.text import parse_rule
from conjoin.search.rewrites import ways_of
from tests.rules.left_sides import OVER_EDGES, draw_left_side
from tests.rules.plain_runs import Plain, draw_leaves
from tests.rules.random_programs import random_program

MOST_ROUNDINGS = 64
"""Errors of another order of operations, in errors of the first: a hundredth of what double precision could tell."""
SAMPLE, PARTS = 4, 6


@cache
def rules() -> tuple[Rule, ...]:
    return tuple(way.rule for way in ways_of(Library.shipped()))


def faults(graph: Graph, rule: Rule, seed: int, index: Index | None = None) -> Iterable[str]:
    """Empty for every rewrite that keeps values and gradients; what it does where one does not."""
    for match in find_matches(index or graph, rule, apart=True)[:2]:
        try:
            after = verify(apply(graph, rule, match))
        except Refused:
            continue
        if after is graph:
            continue
        plain = plain_run(graph, seed, _has_roots(rule) or seed % 2 == 1)
        apart = plain.difference(after) if plain is not None else 0.0
        yield "" if apart <= MOST_ROUNDINGS else f"{apart:.3g} roundings apart by {rule}\n{graph}\n{after}"


def _has_roots(rule: Rule) -> bool:
    """Whether a rule has functions that not all numbers have a value of."""
    return bool({"sqrt", "rsqrt", "div"} & {part.op for part in operators_in(*rule.outputs)})


@lru_cache(maxsize=2)
def plain_run(graph: Graph, seed: int, positive: bool) -> Plain | None:
    """The graph before any rewrite; None where torch has no gradients of all calls in these dtypes."""
    try:
        return Plain.of(graph, draw_leaves(graph, seed, positive=positive))
    except RuntimeError:
        return None


@lru_cache(maxsize=256)
def drawn(rule: Rule, seed: int, dtype: torch.dtype, odd_one: torch.dtype | None = None) -> Graph | None:
    return draw_left_side(rule, seed, dtype, odd_one)


def sweep(some: Iterable[Rule], seeds: Iterable[int], dtype: torch.dtype, odd_one: torch.dtype | None = None) -> int:
    """Draw left sides and rewrite them; how many rules were applied."""
    applied = 0
    for rule in some:
        found: list[str] = []
        for seed in seeds:
            graph = drawn(rule, seed, dtype, odd_one)
            found += faults(graph, rule, seed) if graph is not None else ()
        assert not any(found), next(filter(None, found))
        applied += bool(found)
    return applied


@pytest.mark.parametrize("part", range(PARTS))
def test_rules_keep_values_and_gradients(part: int) -> None:
    """Of a sample; those that match rarely are drawn more often."""
    some = rules()[part :: PARTS * SAMPLE]
    applied = sweep(some, (part, part + 1), torch.float64)
    assert applied > 0.6 * len(some)


def test_rules_keep_what_vertices_make_of_their_neighbours() -> None:
    """All of them, also on graphs without edges, of one vertex, with loops and edges that are there twice."""
    over = [rule for rule in rules() if any(part.op in OVER_EDGES for part in operators_in(*rule.outputs))]
    assert len(over) > 30 and sweep(over, range(3), torch.float64) > 0.9 * len(over)
    graphs = [drawn(rule, seed, torch.float64) for rule in over for seed in range(3)]
    assert any(0 in leaf.type.shape for graph in graphs if graph is not None for leaf in graph.leaves)


DTYPES = {
    "bool among reals": (torch.float64, torch.bool),
    "integers among reals": (torch.float32, torch.int64),
    "half among single precision": (torch.float32, torch.bfloat16),
    "half precision": (torch.float16, None),
    "bfloat16": (torch.bfloat16, None),
    "bools": (torch.bool, None),
    "integers": (torch.int32, None),
    "complex numbers": (torch.complex64, None),
}


@pytest.mark.parametrize("name", DTYPES)
def test_rules_keep_values_in_other_dtypes(name: str) -> None:
    place = list(DTYPES).index(name)
    assert sweep(rules()[place * 5 :: 40], (place, place + 1), *DTYPES[name]) > 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8])
def test_elements_are_moved_whatever_they_are(dtype: torch.dtype) -> None:
    moves = {"transpose", "swap", "flatten", "unflatten", "concat", "split"}
    some = [rule for rule in rules() if {part.op for part in operators_in(*rule.outputs)} <= moves][::3]
    assert sweep(some, (0, 1), dtype) > 0.5 * len(some) > 3


@pytest.mark.parametrize("seeds", [range(3), range(3, 6)])
def test_rules_keep_what_random_programs_give(seeds: Iterable[int]) -> None:
    assert sum(map(_rewrites_of_program, seeds)) > 20


def _rewrites_of_program(seed: int) -> int:
    graph = random_program(seed)
    index = Index(graph)
    here = [rule for rule in rules() if all(part.op in index.by_op for part in operators_in(*rule.left))]
    found = [fault for rule in here for fault in faults(graph, rule, seed, index)]
    assert not any(found), next(filter(None, found))
    return len(found)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("part", range(60))
def test_all_rules_keep_values_and_gradients(part: int) -> None:
    """Some can never be applied: what they need is not in any graph, or they say nothing of a dim."""
    some = rules()[part::60]
    applied = sweep(some, range(12), torch.float64)
    for dtype, odd_one in DTYPES.values():
        sweep(some, range(3), dtype, odd_one)
    for seed in range(part * 5, part * 5 + 5):
        _rewrites_of_program(seed)
    assert applied > 0.6 * len(some)


# The judges.


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("mean[axis=-1](linear(x, y))", "linear(mean[axis=-2](x), y)"),
        ("softmax[axis=-1](transpose(x))", "transpose(softmax[axis=-1](x))"),
        ("mul(x, add(y, z))", "add(mul(x, y), z)"),
        ("relu(neg(x))", "neg(relu(x))"),
        ("split[axis=a, part=0](concat[axis=a](x, y))", "split[axis=a, part=0](concat[axis=a](y, x))"),
        ("scale(x, y)", "scale(x, mul(y, y))"),
        ("conv(x, y)", "conv(x, neg(y))"),
    ],
)
def test_a_false_rule_is_found_out_and_not_passed_by_a_rehearsal(left: str, right: str) -> None:
    rule, counts = parse_rule("false", left, right), Counter[str]()
    for seed in range(9):
        graph = draw_left_side(rule, seed)
        for match in find_matches(graph, rule) if graph is not None else ():
            try:
                after = apply(graph, rule, match)
            except Refused:
                continue
            counts["differ"] += Plain.of(graph, draw_leaves(graph, seed)).difference(after) > MOST_ROUNDINGS
            counts["rehearsed"] += bool(rehearse(replacement_of(match)))
    assert counts["differ"] and counts["rehearsed"] >= counts["differ"]


@pytest.mark.parametrize("part", range(3))
def test_rules_that_are_right_are_not_dropped(part: int) -> None:
    """But for roots and quotients that would be taken of more than before."""
    alarms = []
    for number, rule in enumerate(rules()[part::24]):
        graph = draw_left_side(rule, part, (torch.float32, torch.bfloat16, torch.float64)[number % 3])
        for match in find_matches(graph, rule, apart=True)[:1] if graph is not None else ():
            try:
                reason = rehearse(replacement_of(match))
            except Refused:
                continue
            if reason and not _has_roots(rule):
                alarms.append(f"{rule}: {reason}")
    assert alarms == []
