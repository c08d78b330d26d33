"""How to train a model on a machine: the named strategies, and the searches that choose."""

from conjoin.search.alternatives import Alternative, Why, find_alternatives
from conjoin.search.another_pipeline import pipeline_alike
from conjoin.search.another_shape import Alike, plan_alike
from conjoin.search.baselines import baseline_names, baselines
from conjoin.search.batch import split_batch, split_sequences
from conjoin.search.best_plan import find_plan
from conjoin.search.branch_places import confine, place_branches
from conjoin.search.certificate import Certificate
from conjoin.search.comparison import Row, compare_plans
from conjoin.search.contest import Contest, Improvement, Progress, Stopped
from conjoin.search.drafts import Draft
from conjoin.search.exact.branch_and_bound import branch_and_bound
from conjoin.search.exact.choices import OperatorSeconds
from conjoin.search.exact.counted.named_layouts import name_axes
from conjoin.search.exact.counted.problem import CountedProblem
from conjoin.search.exact.counted.space import CountedSpace
from conjoin.search.exact.problem import Problem
from conjoin.search.exact.reshard_seconds import ReshardSeconds
from conjoin.search.exact.space import Objective, Space
from conjoin.search.exact.tables import Table, Tables
from conjoin.search.exact.units import canonical, cuts
from conjoin.search.facts import Facts, NodeFacts
from conjoin.search.groups import Group, make_groups
from conjoin.search.largest_batch import Fit, FitQuestion, largest_batches, least_machines
from conjoin.search.layer_places import layer_depths
from conjoin.search.named_pipelines import make_pipeline
from conjoin.search.named_plans import make_plan, strategy_names
from conjoin.search.notes import Notes
from conjoin.search.pipeline_bound import PipelineBound
from conjoin.search.propagation import Flow, follow, propagate
from conjoin.search.refusals import TooSlow
from conjoin.search.remembered_plans import Remembered, is_answer
from conjoin.search.request import Request
from conjoin.search.searches import open_contest, search_names
from conjoin.search.stages.contest_entry import num_beside_loss
from conjoin.search.strategies import PIPELINE, read_request, register_strategy
from conjoin.search.wishes import DEFAULT_BUDGET, OBJECTIVES, SearchResult, Wish, check_wish

__all__ = [
    "DEFAULT_BUDGET", "OBJECTIVES", "PIPELINE", "Alike", "Alternative", "Certificate", "Contest", "CountedProblem",
    "CountedSpace", "Draft", "Facts", "Fit", "FitQuestion", "Flow", "Group", "Improvement", "NodeFacts", "Notes",
    "Objective", "OperatorSeconds", "PipelineBound", "Problem", "Progress", "Remembered", "Request", "ReshardSeconds",
    "Row", "SearchResult", "Space", "Stopped", "Table", "Tables", "TooSlow", "Why", "Wish", "baseline_names",
    "baselines", "branch_and_bound", "canonical", "check_wish", "compare_plans", "confine", "cuts", "find_alternatives",
    "find_plan", "follow", "is_answer", "largest_batches", "layer_depths", "least_machines", "make_groups",
    "make_pipeline", "make_plan", "name_axes", "num_beside_loss", "open_contest", "pipeline_alike", "place_branches",
    "plan_alike", "propagate", "read_request", "register_strategy", "search_names", "split_batch", "split_sequences",
    "strategy_names",
]  # fmt: skip
