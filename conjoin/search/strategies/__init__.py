"""The named strategies: one table row each."""

from __future__ import annotations

from conjoin.search.strategies.megatron import STORED
from conjoin.search.strategies.registered import known_strategies, read_request, register_strategy
from conjoin.search.strategies.table import ALIASES, PIPELINE, STRATEGIES, Strategy

__all__ = [
    "ALIASES", "PIPELINE", "STORED", "STRATEGIES", "Strategy", "known_strategies", "read_request", "register_strategy",
]  # fmt: skip
