"""Plans that do not fit a GPU, with as little as is enough on the host: optimizer states, tensors kept for backward.

States go to the host and back when a step ends, tensors while others are computed. Which is cheaper depends on the
plan, so each is tried first, the largest of a kind before the others, and the other kind where the first is not
enough. What is copied makes nothing faster, so only plans are relieved that are faster than the best that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from conjoin.ir import Leaf, Made
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Variant
from conjoin.sim import Offloads, Program, kept_tensors

_Item = str | Made
"""A parameter whose state, or a tensor that lies on the host."""


def relieve_by_host(contest: Contest, entry: Entry, program: Program, left: Callable[[], float]) -> None:
    """Enter a plan that does not fit again, with the fewest states and tensors on the host with which it fits."""
    kind = contest.machine.device
    if kind != "cuda":  # the host's memory is the device's
        return
    trained = _trained(entry.variant)
    states: list[_Item] = [leaf.name for leaf in sorted(trained, key=lambda leaf: -leaf.type.bytes)]
    kept = sorted(kept_tensors(program, kind), key=lambda tensor: -tensor.num_bytes)
    tensors: list[_Item] = [tensor.made for tensor in kept]
    every = _with(entry, [*states, *tensors])
    found = contest.judge(every, contest.simulate(every))
    if found.peak_bytes is not None and found.peak_bytes > contest.capacity:
        return
    for items in ([*states, *tensors], [*tensors, *states]) if tensors else (states,):
        _enter_fewest(contest, entry, items, left)


def states_on_host(variant: Variant) -> Offloads:
    """All that the optimizer remembers on the host."""
    return Offloads((), frozenset(leaf.name for leaf in _trained(variant)))


def _trained(variant: Variant) -> list[Leaf]:
    return [leaf for leaf in variant.skeleton.graph.leaves if leaf.is_trained]


def _enter_fewest(contest: Contest, entry: Entry, items: Sequence[_Item], left: Callable[[], float]) -> None:
    """Enter an entry with the fewest of some items on the host, in their order, with which it fits, as it does with all
    of them; fewer are tried where it is slower than the best anyway."""
    too_few, enough = 0, len(items)
    while enough - too_few > 1 and left() > 0:
        tried = (too_few + enough) // 2
        made = _with(entry, items[:tried])
        contest.tell(made.name)
        found = contest.judge(made, contest.simulate(made))
        if found.peak_bytes is not None and found.peak_bytes > contest.capacity:
            too_few = tried
        else:
            enough = tried


def _with(entry: Entry, items: Sequence[_Item]) -> Entry:
    states = frozenset(item for item in items if isinstance(item, str))
    tensors = tuple(sorted(item for item in items if not isinstance(item, str)))
    told = [f"{len(states)} states"] * bool(states) + [f"{len(tensors)} tensors"] * bool(tensors)
    name = f"{entry.name}, {' and '.join(told)} on the host"
    return replace(entry, name=name, offloads=replace(entry.offloads, tensors=tensors, states=states))
