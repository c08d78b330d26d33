"""Plans in micro-batches, where memory is short: the named strategies for parts of the batch, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from conjoin.errors import StrategyError
from conjoin.ir import cut_in_micro_batches
from conjoin.search.baselines import baselines
from conjoin.search.contest import Contest, Outcome, Variant, make_variant
from conjoin.search.named_relief import relieve_by_name

MAX_STEPS = 64
"""Micro-batches of a step that are tried at most."""


def micro_variants(contest: Contest) -> Iterator[Variant]:
    """The model in 2, 4, 8 ... micro-batches, as far as its batch has that many parts."""
    steps = 2
    while steps <= MAX_STEPS:
        try:
            graph, accumulation = cut_in_micro_batches(contest.captured, steps)
        except StrategyError:
            return
        yield make_variant(graph, (), accumulation)
        steps *= 2


def enter_strategies(contest: Contest, variant: Variant) -> list[Outcome]:
    """The named strategies for micro-batches, judged; those that do not fit also relieved."""
    found = []
    for _, entry in baselines(variant.graph, contest.machine):
        if entry is None:
            continue
        name, made = f"{entry.name}+micro={variant.steps}", replace(entry.variant, accumulation=variant.accumulation)
        contest.check(name)
        found.append(contest.enter(replace(entry, name=name, variant=made)))
    relieve_by_name(contest, found)
    return found
