"""In how many chunks products go that collectives are next to: as many as the timeline is shortest with.

Of a product of P seconds beside a collective of C seconds, K chunks leave about min(P, C)/K exposed, for K - 1 more
latencies of a collective and what a product loses when it is cut. So it pays where latencies are small against what is
sent, up to some K; the timeline has the seconds of both, of every size, and says up to which.
"""

from __future__ import annotations

from dataclasses import replace

from conjoin.search.contest import Contest
from conjoin.search.relief import relieve
from conjoin.search.variants import without_plan

COUNTS = (2, 4, 8)
"""More are tried only where fewer were better than none."""
_NEAR = 1.1
"""How much slower than the best a plan may be to be tried in chunks."""
_FOR_FITTING = 0.3
"""The part of the time left in which one of them is made to fit."""


def try_chunks(contest: Contest) -> None:
    """Enter the best plan, and those near it, again with their products in chunks, in more of them as long as that is
    better: another plan may win by more. What is faster so but does not fit is relieved."""
    best = contest.best
    if best is None:
        return
    near = [entry for seconds, entry in contest.fastest if best.seconds <= seconds < _NEAR * best.seconds]
    for entry in (best.entry, *near):
        start = without_plan(entry)
        for count in COUNTS if start.chunks == 1 else ():
            contest.check(f"products in {count} chunks")
            before = contest.best
            found = contest.enter(replace(start, name=f"{start.name}, {count} chunks", chunks=count))
            if (found.peak_bytes or 0) > contest.capacity:
                relieve(contest, found, contest.share(_FOR_FITTING))
            if contest.best is before:
                break
