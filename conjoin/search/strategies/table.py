"""Every strategy by name, with the degrees and flags it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conjoin.machine import Mesh
from conjoin.search.drafts import Draft
from conjoin.search.facts import Facts
from conjoin.search.request import Keys, Request
from conjoin.search.strategies.data_parallel import (
    draft_data_parallel,
    draft_fsdp,
    draft_hsdp,
    draft_single,
    draft_zero1,
)
from conjoin.search.strategies.megatron import STORED, draft_megatron
from conjoin.search.strategies.one_weird_trick import draft_one_weird_trick
from conjoin.search.strategies.reduction import draft_reduction
from conjoin.search.strategies.sbp3d import draft_sbp3d
from conjoin.search.strategies.spatial import draft_spatial
from conjoin.search.strategies.table_parallel import draft_table_parallel
from conjoin.search.strategies.vertex_parallel import draft_vertex_parallel


@dataclass(frozen=True, slots=True)
class Strategy:
    """A named way to make a plan."""

    name: str
    keys: Keys
    draft: Callable[[Facts, Mesh, Request], Draft]


_JOINS = {"data-parallel": frozenset[str](), **{name: frozenset({name}) for name in STORED}}
_MEGATRON = Keys(
    ("tp", "dp", "shard", "replicate", "cp", "ep"),
    ("sp", "heads", "ring", "vocab", "expert", *STORED),
    joins={**_JOINS, "context": frozenset(), "expert": frozenset({"expert"})},
)
_CONTEXT = Keys(("cp", "dp", "shard", "replicate"), ("heads", "ring", *STORED), joins=_JOINS)
_EXPERT = Keys(
    ("ep", "dp", "shard", "replicate", "cp"), ("heads", "ring", *STORED), joins={**_JOINS, "context": frozenset()}
)

_TABLE = (
    Strategy("single", Keys(()), draft_single),
    Strategy("data-parallel", Keys(("dp",)), draft_data_parallel),
    Strategy("zero1", Keys(("dp",)), draft_zero1),
    Strategy("fsdp", Keys(("dp",)), draft_fsdp),
    Strategy("hsdp", Keys(("shard", "replicate")), draft_hsdp),
    Strategy("megatron", _MEGATRON, draft_megatron),
    Strategy("context", _CONTEXT, draft_megatron),
    Strategy("expert", _EXPERT, draft_megatron),
    Strategy("one-weird-trick", Keys(("dp",)), draft_one_weird_trick),
    Strategy("table-parallel", Keys(("dp",)), draft_table_parallel),
    Strategy("spatial", Keys(("h", "w", "dp")), draft_spatial),
    Strategy("reduction", Keys(("k",)), draft_reduction),
    Strategy("vertex-parallel", Keys(("parts",), ("once",)), draft_vertex_parallel),
    Strategy("sbp3d", Keys(("m", "n", "k")), draft_sbp3d),
)

PIPELINE, PIPELINE_KEYS = "pipeline", Keys(("pp", "dp", "tp", "v"), ("sp", *STORED))
"""A pipeline is no draft of one graph: its stages are drafted one by one."""
STRATEGIES = {strategy.name: strategy for strategy in _TABLE}
ALIASES = {"ddp": "data-parallel", "zero2": "zero1", "zero3": "fsdp"}
"""Other names that people know them by; plans say the first."""
