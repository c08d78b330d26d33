"""The named strategies: one table row each."""

from __future__ import annotations

from conjoin.search.strategies.table import STRATEGIES, Strategy

__all__ = ["STRATEGIES", "Strategy"]
