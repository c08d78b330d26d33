"""Layers at places of the machine, one after the other: what pays where layers are unrolled into many steps.

A layer that is applied step by step has its parameters at one place, and while it takes a step the next layer takes the
one before: devices work at the same time on different depths (FlexFlow's experts for RNNs, thesis section 3.7.2). No
fork shows that. It can only pay where the longest way through the model is much shorter than all of its work:
`longest_way`. Depths are dealt out in a row so that the most that a place has to do is least: `deal_depths`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from conjoin.sim import Skeleton


def layer_depths(skeleton: Skeleton) -> list[int]:
    """How many layers with parameters every operator has before it, on the way along first operands.

    Steps of a layer are at the same depth, and so are layers of an encoder and of a decoder.
    """
    found = list[int]()
    parameters = frozenset(skeleton.parameters)
    for operator in skeleton.operators:
        inner = [maker for root in operator.reads if (maker := skeleton.roots[root].maker) >= 0]
        has_parameters = bool(inner) and not parameters.isdisjoint(operator.reads)
        found.append(found[inner[0]] + has_parameters if inner else 0)
    return found


def longest_way(skeleton: Skeleton, seconds: Sequence[float]) -> float:
    """The most seconds of operators that wait for each other."""
    longest = list[float]()
    for operator, own in zip(skeleton.operators, seconds, strict=True):
        before = (longest[maker] for root in operator.reads if (maker := skeleton.roots[root].maker) >= 0)
        longest.append(own + max(before, default=0.0))
    return max(longest, default=0.0)


def deal_depths(seconds: Sequence[float], places: int) -> list[int]:
    """The place of every depth, in a row, such that the most seconds of a place are least."""
    sums = [0.0, *accumulate(seconds)]
    least = list(sums)
    """Of the first so many depths, on the places so far."""
    starts = list[list[int]]()
    for _ in range(places - 1):
        ways = [
            min((max(least[start], sums[end] - sums[start]), start) for start in range(end + 1))
            for end in range(len(sums))
        ]
        least = [most for most, _ in ways]
        starts.append([start for _, start in ways])
    found, end = [0] * len(seconds), len(seconds)
    for place in range(places - 1, 0, -1):
        start = starts[place - 1][end]
        found[start:end] = [place] * (end - start)
        end = start
    return found
