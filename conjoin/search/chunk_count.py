"""In how many chunks products go that collectives are next to: as many as the timeline is shortest with.

Of a product of P seconds beside a collective of C seconds, K chunks leave about min(P, C)/K exposed, for K - 1 more
latencies of a collective and what a product loses when it is cut. So it pays where latencies are small against what is
sent, up to some K; the timeline has the seconds of both, of every size, and says up to which.
"""

from __future__ import annotations

from dataclasses import replace

from conjoin.search.contest import Contest
from conjoin.search.variants import as_variant

_COUNTS = (2, 4, 8)
"""More are tried only where fewer were better than none."""


def try_chunks(contest: Contest) -> None:
    """Enter the best plan again with its products in chunks, in more of them as long as that is better."""
    best = contest.best
    if best is None or as_variant(best).entry.chunks > 1:
        return
    start = replace(as_variant(best).entry, plan=None)
    for count in _COUNTS:
        contest.check(f"products in {count} chunks")
        found = contest.enter(replace(start, name=f"{start.name}, {count} chunks", chunks=count))
        if contest.best is not found:
            return
