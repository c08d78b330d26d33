"""How to train a model on a machine: the named strategies, and the searches that choose."""

from conjoin.search.baselines import baseline_names, baselines
from conjoin.search.comparing import Row, compare_plans
from conjoin.search.contest import Contest, Improvement, Progress, Stopped
from conjoin.search.exact.choices import OperatorSeconds
from conjoin.search.exact.problem import Objective, Problem, Space
from conjoin.search.exact.reshard_seconds import ReshardSeconds
from conjoin.search.exact.units import canonical, cuts
from conjoin.search.placing_branches import place_branches
from conjoin.search.planning import make_plan, strategy_names
from conjoin.search.remembering import Remembered
from conjoin.search.searching import DEFAULT_BUDGET, SearchResult, Wish, find_plan, open_contest, search_names

__all__ = [
    "DEFAULT_BUDGET", "Contest", "Improvement", "Objective", "OperatorSeconds", "Problem", "Progress", "Remembered",
    "ReshardSeconds", "Row", "SearchResult", "Space", "Stopped", "Wish", "baseline_names", "baselines", "canonical",
    "compare_plans", "cuts", "find_plan", "make_plan", "open_contest", "place_branches", "search_names",
    "strategy_names",
]  # fmt: skip
