"""How to train a model on a machine: the named strategies."""

from conjoin.search.planning import make_plan, strategy_names

__all__ = ["make_plan", "strategy_names"]
