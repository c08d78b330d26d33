"""What a step in given layouts takes at least: its operators, and what these wait for, one after the other.

A device computes in the order of the program, and an operator whose operand lies otherwise waits until that was sent,
which begins when what is before it is computed. So these times add up, whatever else goes on beside them. What is left
out only adds to that: parameters and their gradients, the update, what is run again, hosts that are slow to launch. It
takes a small part of what making the program and timing it does, since equal operators are looked at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf

import numpy as np

from conjoin.comm import leaves_early
from conjoin.ir import Choice
from conjoin.sim.engine import COMPUTE, Fragment, to_seconds
from conjoin.sim.fragments import Drafts, Supply
from conjoin.sim.program import task_numbers
from conjoin.sim.skeleton import Layouts, Skeleton

_NOT_SUPPLIED = Supply((), False, False, False)


def least_step(skeleton: Skeleton, layouts: Layouts, drafts: Drafts, enough: float = inf) -> float:
    """Seconds that no timeline of a step takes less than; in micro-batches, of one of them. Not more is worked out than
    is enough."""
    supplies = [[_NOT_SUPPLIED] * len(operator.reads) for operator in skeleton.operators]
    for root, made in enumerate(skeleton.roots):
        if made.maker >= 0:
            _supply(skeleton, layouts.choices, root, supplies)
    cast = {skeleton.roots[root].maker for root in skeleton.casts}  # parameters may be cast on their way
    numbers, counts = task_numbers(skeleton, drafts), Counter[tuple[int, Choice, tuple[Supply, ...]]]()
    for place, number in enumerate(numbers):
        if place not in cast:
            counts[number, layouts.choices[place], tuple(supplies[place])] += 1
    found = 0.0
    for key, count in counts.most_common():
        found += to_seconds(count * sum(map(_least_ticks, drafts.fragments(*key))))
        if found > enough:
            break
    return found


def _supply(skeleton: Skeleton, choices: Sequence[Choice], root: int, supplies: list[list[Supply]]) -> None:
    """Note how what an operator makes comes to those who read it in another layout."""
    readers, backs = skeleton.readers[root], skeleton.backs[root]
    own = choices[skeleton.roots[root].maker].outputs[skeleton.outputs[root]]
    wanted = [choices[place].operands[operand] for place, operand in readers]
    seen = {own}
    for (place, operand), layout in zip(readers, wanted, strict=True):
        if layout not in seen and not leaves_early(own, layout):
            back = any(b and w == layout for b, w in zip(backs, wanted, strict=True))
            supplies[place][operand] = Supply(own, True, back, False)
        seen.add(layout)


def _least_ticks(fragment: Fragment) -> int:
    """What every device takes for a fragment: computing, and what is sent while it waits; streams send side by side."""
    total, sent = 0, dict[int, int]()
    for instruction in fragment:
        ticks = int(np.min(instruction.ticks)) if instruction.where is None else 0
        if instruction.stream != COMPUTE:
            if COMPUTE in instruction.waits:
                sent[instruction.stream] = sent.get(instruction.stream, 0) + ticks
            continue
        waits = instruction.where is None and sent.keys() <= {*instruction.waits}
        total += ticks + (max(sent.values(), default=0) if waits else 0)
        sent = {}
    return total
