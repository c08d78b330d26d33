"""Of how many blocks parameters stay gathered between the passes: of as many of the last ones as memory is enough for.

A gather less is under way in the backward pass, and its bytes are held in the meantime; the timeline says whether that
is faster, memory how many blocks may. More of them seldom take fewer bytes, so their number is looked for by halving.
"""

from __future__ import annotations

from dataclasses import replace

from conjoin.search.blocks import block_segments
from conjoin.search.contest import Contest
from conjoin.search.kept_parameters import kept_gathered
from conjoin.search.variants import as_variant


def try_keeping(contest: Contest) -> None:
    """Enter the best plan again with parameters of its last blocks kept, of as many as memory is enough for."""
    best = contest.best
    start = None if best is None else replace(as_variant(best).entry, plan=None)
    if start is None or not start.regathered:
        return
    graph = start.variant.graph
    enough, too_many = 0, len(block_segments(graph)) + 1
    tried = too_many - 1
    while too_many - enough > 1:
        contest.check(f"parameters of {tried} blocks kept")
        again = start.regathered - kept_gathered(str(tried), graph)
        name = f"{start.name}, parameters of the last {tried} blocks kept"
        found = contest.enter(replace(start, name=name, regathered=again))
        enough, too_many = (tried, too_many) if contest.best is found else (enough, tried)
        tried = (enough + too_many) // 2
