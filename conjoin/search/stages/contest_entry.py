"""Pipelines in a contest: looked for in a part of its time, and judged beside plans of one stage."""

from __future__ import annotations

from math import inf

from conjoin.cost import CostModel
from conjoin.ir import Graph, Pipeline
from conjoin.search.contest import Contest
from conjoin.search.pipeline_bound import PipelineBound
from conjoin.search.rewrites import RuleWay
from conjoin.search.stages.plans import Judged, Model
from conjoin.search.stages.search import Over, StageSearch
from conjoin.sim import predict_pipeline

_PART = 0.35
"""Of the time that is left, for pipelines."""
_MOST = 0.65
"""The same where memory decides over what one stage can do, or pipelines were found that are faster than that."""
_PRICED_PER_STEP = 1
"""Rows of cells that may be simulated for every step that is left for pipelines."""


def enter_pipeline(contest: Contest, pipeline: Pipeline, costs: CostModel) -> None:
    """Judge a pipeline that was found before."""
    contest.enter_pipeline(predict_pipeline(pipeline, contest.machine, costs, contest.optimizer))


def search_stages(
    contest: Contest, costs: CostModel, rules: tuple[RuleWay, ...] = (), stages: int | None = None
) -> None:
    """Look for pipelines, all of one number of stages where it is given; the best becomes that of the contest."""
    if contest.machine.num_devices == 1 or contest.constraints or not _is_trained_by_loss(contest.captured):
        return
    trial = "stages" if stages is None else f"{stages} stages"
    if not contest.is_new(trial):
        return
    part = 1.0 if stages is not None else _MOST if contest.best is None or contest.memory_decides else _PART
    left, longer, most = contest.share(part), contest.share(max(part, _MOST)), inf
    if contest.steps_left is not None:
        most = part * contest.steps_left * _PRICED_PER_STEP
    model = Model(contest.captured, contest.machine, costs, contest.optimizer, contest.capacity, rules=rules)
    asked = 0

    def check(doing: str) -> None:
        nonlocal asked
        asked += 1
        contest.tell(doing)
        if (longer() if contest.pipeline_leads else left()) <= 0 or asked > most:
            raise Over

    def found(judged: Judged) -> None:
        contest.enter_pipeline(judged.prediction)

    goal = lambda: inf if stages is not None or contest.best is None else contest.best.seconds
    search = StageSearch(model, goal, check, stages, found=found)
    is_done = search.run()
    if search.least:
        looked_at = len(search.least), search.num_trials
        contest.bound = PipelineBound(inf, search.least_seconds, *looked_at, search.ideal)
    if is_done:
        contest.note(trial, contest.pipeline.seconds if contest.pipeline is not None else inf)
    else:
        contest.cut_short = True


def num_beside_loss(graph: Graph) -> int:
    """What a model that is trained gives beside its loss: a pipeline gives the loss alone."""
    return len(graph.outputs) - 1 if graph.training and graph.loss is not None else 0


def _is_trained_by_loss(graph: Graph) -> bool:
    return graph.training and graph.loss is not None and not num_beside_loss(graph)
