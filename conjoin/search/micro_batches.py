"""Plans in micro-batches, where memory is short: the named strategies for parts of the batch, one after the other.

Where nothing was found that fits and the time is over, parameters in pieces, the smallest micro-batches and all blocks
run again are the least that a named strategy takes: `enter_smallest`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from conjoin.errors import StrategyError
from conjoin.ir import cut_in_micro_batches
from conjoin.search.baselines import baselines, with_blocks_again
from conjoin.search.contest import Contest
from conjoin.search.entries import Outcome, Variant, make_variant
from conjoin.search.named_relief import relieve_by_name
from conjoin.search.strategies import read_request

MAX_STEPS = 64
"""Micro-batches of a step that are tried at most."""
_IN_PIECES = "fsdp"
"""How strategies end that keep parameters in pieces."""


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


def enter_smallest(contest: Contest, left: Callable[[], float]) -> None:
    """Parameters in pieces in as many micro-batches as leave every device samples, with blocks run again: by data
    parallelism, then with layers split more and more ways while there is time left, until something fits."""
    for variant in reversed(tuple(micro_variants(contest))):
        named = baselines(variant.graph, contest.machine, lambda name: not name.endswith(_IN_PIECES), _layers_split)
        entries = ((name, entry) for name, entry in named if name.endswith(_IN_PIECES))
        for name, entry in entries:
            if name == _IN_PIECES and entry is None:
                break
            if entry is not None:
                made = replace(entry.variant, accumulation=variant.accumulation)
                smaller = replace(entry, name=f"{entry.name}+micro={variant.steps}", variant=made)
                again = with_blocks_again(smaller, "full") or smaller
                contest.judge(again, contest.simulate(again))  # not entered: there may be no step left to count
            if contest.best is not None or left() <= 0:
                return


def _layers_split(name: str) -> float:
    """In how many ways a strategy splits layers: data parallelism comes first."""
    return max((degree for _, degree in read_request(name).degrees.items()), default=0)
