"""Every strategy by name, with the degrees and flags it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conjoin.machine import Mesh
from conjoin.search.drafting import Draft
from conjoin.search.facts import Facts
from conjoin.search.request import Keys, Request
from conjoin.search.strategies.data_parallel import draft_data_parallel, draft_fsdp, draft_single, draft_zero1


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named way to make a plan."""

    name: str
    keys: Keys
    draft: Callable[[Facts, Mesh, Request], Draft]


_TABLE = (
    Strategy("single", Keys(()), draft_single),
    Strategy("data-parallel", Keys(("dp",)), draft_data_parallel),
    Strategy("zero1", Keys(("dp",)), draft_zero1),
    Strategy("fsdp", Keys(("dp",)), draft_fsdp),
)

STRATEGIES = {strategy.name: strategy for strategy in _TABLE}
