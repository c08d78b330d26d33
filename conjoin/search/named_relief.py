"""Named strategies that do not fit, relieved as people write it: `recompute=`, and on a GPU `offload=`.

They are candidates beside what searches choose for every segment (`relief.py`, `memory_chain.py`), so that no plan
is found that is slower than one that somebody would name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from conjoin.search.baselines import with_blocks_again
from conjoin.search.contest import Contest
from conjoin.search.entries import Entry, Outcome
from conjoin.sim import Offloads, kept_tensors

_STRATEGIES = 3
"""How many are tried, the fastest first."""
_MODES = ("full", "every-2", "selective")
"""The one that keeps the least first: where it does not fit, neither do the others."""
_FOR_OTHERS = 0.3
"""The part of the time that is left to other ways to fit, where none of these do."""


def relieve_by_name(contest: Contest, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Enter those that do not fit again, with blocks run again and with tensors on the host; what came of the first.

    Several devices have less of a step each: there nothing lies on the host where something fits without, unless only
    micro-batches do whose blocks are run again.
    """
    found, smallest = list[Outcome](), contest.smallest
    heavy = [outcome for outcome in outcomes if (outcome.peak_bytes or 0) > contest.capacity]
    for outcome in sorted(heavy, key=lambda outcome: outcome.seconds)[:_STRATEGIES]:
        again = _with_blocks_again(contest, outcome)
        found += again
        for relieved in (outcome, *again) if _may_lie_on_host(contest) else ():
            for entry in _with_offloads(contest, relieved) if _may_win(contest, relieved) else ():
                if _may_win(contest, relieved):
                    contest.enter(entry)
    contest.smallest = smallest  # what is relieved otherwise are the strategies themselves
    return found


def _with_blocks_again(contest: Contest, outcome: Outcome) -> list[Outcome]:
    found: list[Outcome] = []
    for mode in _MODES:
        entry = with_blocks_again(outcome.entry, mode)
        if entry is not None and _may_win(contest, outcome):
            if entry.name not in contest.named:
                contest.named[entry.name] = contest.enter(entry)
            found.append(contest.named[entry.name])
            if mode == _MODES[0] and (found[0].peak_bytes or 0) > contest.capacity and len(entry.segments) > 1:
                break
    return found


def _may_win(contest: Contest, outcome: Outcome) -> bool:
    """Whether a plan that is slower than another may be the best, and there is time to see."""
    if contest.best is None:
        return contest.time_left_of_given > _FOR_OTHERS
    return outcome.seconds < contest.best.seconds and contest.time_left > 0


def _may_lie_on_host(contest: Contest) -> bool:
    """Whether nothing fits a step of so few devices, or so well, that what lies on the host would not be faster."""
    best = contest.best
    return contest.mesh.size == 1 or best is None or bool(best.entry.variant.steps > 1 and best.entry.segments)


def _with_offloads(contest: Contest, outcome: Outcome) -> Iterator[Entry]:
    """An entry with what autograd keeps, what the optimizer remembers, or both on the host; none where even that does
    not fit."""
    entry, kind = outcome.entry, contest.machine.device
    if kind != "cuda":  # the host's memory is the device's
        return
    if outcome.simulation.relieved_bytes(contest.optimizer, kind) > contest.capacity:
        return
    tensors = tuple(sorted(tensor.made for tensor in kept_tensors(outcome.simulation.program, kind)))
    states = frozenset(leaf.name for leaf in entry.variant.skeleton.graph.leaves if leaf.is_trained)
    for name, offloads in (
        ("activations", Offloads(tensors, frozenset())),
        ("optimizer", Offloads((), states)),
        ("both", Offloads(tensors, states)),
    ):
        yield replace(entry, name=f"{entry.name}+offload={name}", offloads=offloads)
