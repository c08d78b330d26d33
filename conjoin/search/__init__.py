"""How to train a model on a machine: the named strategies, and the searches that choose."""

from conjoin.search.baselines import baseline_names, baselines
from conjoin.search.comparing import Row, compare_plans
from conjoin.search.contest import Contest, Improvement, Progress, Stopped
from conjoin.search.exact.choices import OperatorSeconds
from conjoin.search.exact.counted.naming import name_axes
from conjoin.search.exact.counted.problem import CountedProblem
from conjoin.search.exact.counted.space import CountedSpace
from conjoin.search.exact.problem import Objective, Problem, Space
from conjoin.search.exact.reshard_seconds import ReshardSeconds
from conjoin.search.exact.units import canonical, cuts
from conjoin.search.planning import make_plan, strategy_names
from conjoin.search.remembering import Remembered
from conjoin.search.searching import DEFAULT_BUDGET, SearchResult, Wish, find_plan, search_names

__all__ = [
    "DEFAULT_BUDGET", "Contest", "CountedProblem", "CountedSpace", "Improvement", "Objective", "OperatorSeconds",
    "Problem", "Progress", "Remembered", "ReshardSeconds", "Row", "SearchResult", "Space", "Stopped", "Wish",
    "baseline_names", "baselines", "canonical", "compare_plans", "cuts", "find_plan", "make_plan", "name_axes",
    "search_names", "strategy_names",
]  # fmt: skip
