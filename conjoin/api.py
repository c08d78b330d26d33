"""The surface for Python programs: everything a user imports from `conjoin`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from conjoin.cost import CostModel, MeasurementStore
from conjoin.environment import costs_path, installed_version, machines_directory
from conjoin.errors import (
    CaptureError,
    CheckpointError,
    ConjoinError,
    DeclarationError,
    GraphError,
    PlanError,
    RankError,
    StrategyError,
    UsageError,
)
from conjoin.frontends import Batch, Precision, not_understood, resize, run_plainly
from conjoin.frontends import capture as capture_graph
from conjoin.ir import (
    Graph,
    Pipeline,
    Plan,
    fingerprint,
    load_graph,
    load_plan,
    parse_graph,
    plain_model,
    save_graph,
    verify,
)
from conjoin.machine import Machine, parse_machine, register_machine
from conjoin.ops import register_operator
from conjoin.report import (
    Explanation,
    Inspection,
    PipelineExplanation,
    PlanDiff,
    explain_pipeline,
    explanation_text,
    inspect,
)
from conjoin.report import diff_plans as _diff_plans
from conjoin.report import explain as _explain
from conjoin.rules import OwnRules, prove_rules
from conjoin.runtime import (
    CapturedModule,
    Case,
    Loader,
    ParallelModule,
    PlainModel,
    Planner,
    Session,
    Verdict,
    Weights,
    check_capture,
    check_init,
    copied_for_check,
    full_state_dict,
    load_checkpoint,
    load_optimizer_state_dict,
    optimizer_state_dict,
    save_checkpoint,
    save_weights,
    to_module,
    verify_in_process,
)
from conjoin.runtime import load as _load
from conjoin.search import (
    PIPELINE,
    Progress,
    Row,
    SearchResult,
    Wish,
    compare_plans,
    find_plan,
    make_pipeline,
    make_plan,
    pipeline_alike,
    plan_alike,
    read_request,
    register_strategy,
    strategy_names,
)
from conjoin.sim import PipelinePrediction, Prediction, predict, predict_pipeline

__all__ = [
    "CaptureError", "CapturedModule", "CheckpointError", "ConjoinError", "DeclarationError", "Explanation", "Graph",
    "GraphError", "Inspection", "Loader", "Machine", "ParallelModule", "Pipeline", "PipelinePrediction", "Plan",
    "PlanError", "Prediction", "RankError", "SearchResult", "StrategyError", "UsageError", "Verdict", "Weights", "Wish",
    "__version__", "capture", "compare", "diff_plans", "explain", "explanation_text", "fingerprint", "full_state_dict",
    "inspect", "load", "load_checkpoint", "load_graph", "load_optimizer_state_dict", "load_plan", "not_understood",
    "optimizer_state_dict", "parse_graph", "plan", "prove_rules", "register_machine", "register_operator",
    "register_strategy", "save_checkpoint", "save_graph", "save_weights", "search_plan", "simulate_plan",
    "strategy_names", "to_module", "verify", "verify_plan",
]  # fmt: skip

__version__ = installed_version()
_log = logging.getLogger("conjoin")


def capture(
    model: nn.Module,
    batch: Batch,
    loss: Callable[..., Any] | None = None,
    *,
    check: bool = True,
    precision: Precision | str | None = None,
) -> Graph:
    """Turn a model into a graph, in the mode (train or eval) it is in.

    `batch` is a tensor, a tuple of positional inputs or a dict of keyword inputs. With a `loss`, inputs that the
    model's forward does not take are given to the loss after the model's output, and the graph returns the loss.
    What is kept but not understood is told in one report on the logger `conjoin`. With `check` the graph is compared
    with the model itself, on other values than those of the batch, where the model has values and a step is small;
    the report says whether it was. The model is computed as it is, in the autocast that the caller is in, unless a
    `precision` is named: "bf16-mixed", or "bf16-mixed@cuda" for what a GPU would do; "bf16-mixed,reduce=bf16".

    >>> import torch
    >>> graph = capture(nn.Linear(4, 2), torch.zeros(3, 4))
    >>> [node.op for node in graph.nodes]
    ['linear']
    >>> [node.op for node in capture(nn.Linear(4, 2), torch.zeros(3, 4), precision="bf16-mixed").nodes]
    ['_to_copy', '_to_copy', '_to_copy', 'linear']
    """
    asked, regions = _precision(precision), None
    if asked is not None and isinstance(model, nn.Module):
        model, batch = asked.converted(plain_model(model, CaptureError), batch)
        regions = asked.autocast
    if not check or not isinstance(model, nn.Module):
        return _applied(asked, capture_graph(model, batch, loss, autocast=regions))
    run = run_plainly if asked is None else asked.running(run_plainly)
    plain = PlainModel(plain_model(model, CaptureError), loss, run)
    own = copied_for_check(plain, batch)
    if regions and not any(x.device.type == device for x in model.parameters() for device, _ in regions):
        own = f"not checked against the model: it is not on the kind of device that {asked} is for"

    def compare(graph: Graph) -> str:
        return own if isinstance(own, str) else check_capture(graph, own, batch)

    return _applied(asked, capture_graph(model, batch, loss, compare, regions))


def _applied(asked: Precision | None, graph: Graph) -> Graph:
    return graph if asked is None else asked.applied(graph)


def plan(  # noqa: PLR0913 – what may be said of a plan
    model: nn.Module,
    batch: Batch,
    machine: Machine | str | PathLike[str],
    *,
    loss: Any = None,
    strategy: str | None = None,
    wish: Wish | None = None,
    precision: str | None = None,
    rules: str | PathLike[str] | OwnRules | None = None,
) -> Plan | Pipeline:
    """A plan for training a model on a machine: the best that a search finds, or that of a named strategy.

    The strategy `pipeline` makes a pipeline of several stages, which is saved, loaded, explained and predicted alike.

    What the search may take, and what it has to keep to, stands in `wish`. Ctrl-C keeps the best plan so far. Without a
    `precision` (as "bf16-mixed") the model is trained as it is, in the autocast that the caller is in. `rules` are a
    file of substitutions of your own, which are proven first.

    >>> import torch
    >>> model, batch = nn.Linear(4, 4), (torch.ones(8, 4), torch.ones(8, 4))
    >>> print(plan(model, batch, "local:2", loss=nn.functional.mse_loss, strategy="data-parallel"))
    data-parallel:dp=2 plan of Linear for 2 ranks (d0:2)
    >>> found = plan(model, batch, "dgx-h100", loss=nn.functional.mse_loss, wish=Wish(budget=5))
    >>> dict(found.predictions)["seconds_per_step"] > 0
    True
    """
    chosen = _machine(machine)
    _check_wish(wish)
    if strategy is not None:
        _check_strategy(strategy, wish)
    if rules is not None:
        if strategy is not None:
            raise UsageError(
                f"The strategy {strategy[:40]!r} was asked for together with rules for a search. A strategy applies no "
                f"substitutions of anybody's. Leave one of them out."
            )
        wish = replace(wish or Wish(), rules=rules if isinstance(rules, OwnRules) else prove_rules(rules))
    asked = precision_on(chosen, precision)
    if isinstance(model, nn.Module):
        _tell_of_init(model)
    graph = capture(model, batch, loss, precision=asked)
    made = make_named(graph, chosen, strategy) if strategy is not None else search_plan(graph, chosen, wish).plan
    return made if asked is None else replace(made, precision=str(asked))


def _check_strategy(strategy: Any, wish: Wish | None) -> None:
    if not isinstance(strategy, str):
        raise UsageError(
            f"A {type(strategy).__name__} was given as the strategy. A strategy is a text, as 'fsdp' or "
            f"'megatron:tp=2+recompute=full'. Pass one, or leave it out to search."
        )
    if wish is not None:
        raise UsageError(
            f"The strategy {strategy[:40]!r} was asked for together with a wish. A strategy decides all by itself, and "
            f"what is wished of a search would have no effect. Leave one of them out."
        )
    read_request(strategy)


def make_named(graph: Graph, machine: Machine, strategy: str) -> Plan | Pipeline:
    """The plan that a named strategy makes, of one stage or several."""
    if read_request(strategy).name == PIPELINE:
        return make_pipeline(graph, machine, strategy, known_costs())
    return make_plan(graph, machine, strategy)


def _tell_of_init(model: nn.Module) -> None:
    """Say of a model on the meta device what will be missing when the plan is loaded, before it is looked for."""
    try:
        check_init(model)
    except UsageError as error:
        _log.warning("The plan can be made, but not loaded without init= or weights=. %s", error)


def precision_on(machine: Machine, precision: Precision | str | None) -> Precision | None:
    """A precision on the devices of a machine; refused where one of them does not have it."""
    if precision is None:
        return None
    asked = _precision(precision, machine.device)
    assert asked is not None
    if asked.name == "tf32" and machine.device != "cuda":
        raise UsageError(
            f"The precision tf32 was asked for on {machine.name}, whose {machine.num_devices} devices are CPUs. TF32 "
            f"is how tensor cores of GPUs compute products of float32. Choose float32, or a machine of such GPUs."
        )
    gpus = [device for device in machine.device_types if device.kind == "cuda"]
    lacking = [gpu for gpu in gpus if asked.rate not in dict(gpu.peak_flops)]
    if not lacking:
        return asked
    has = ", ".join(f"{dtype} ({flops / 1e12:g} TFLOP/s)" for dtype, flops in lacking[0].peak_flops)
    raise UsageError(
        f"The precision {asked.title} was asked for on {machine.name}. {lacking[0].name} has no rate for {asked.rate}, "
        f"only for {has}. Choose another precision, or add the rate to the machine's file."
    )


def _precision(precision: Precision | str | None, device: str = "cpu") -> Precision | None:
    if precision is None or isinstance(precision, Precision):
        return precision
    if not isinstance(precision, str):
        raise UsageError(
            f"A {type(precision).__name__} was given instead of a precision. A precision has a name. "
            f"Write precision='bf16-mixed'."
        )
    return Precision.parse(precision, device)


def search_plan(
    graph: Graph,
    machine: Machine | str | PathLike[str],
    wish: Wish | None = None,
    *,
    start: Sequence[Plan | Pipeline] | SearchResult = (),
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The best plan that a search finds for a captured model, with what it is compared with and how the search went.

    It is not worse than plans to start from. From an earlier result it goes on where that ended.
    """
    chosen = _machine(machine)
    _check_wish(wish)
    return find_plan(graph, chosen, known_costs(), wish, start=start, progress=progress)


def compare(
    graph: Graph,
    machine: Machine | str | PathLike[str],
    wish: Wish | None = None,
    *,
    searches: Sequence[str] = ("joint",),
    strategies: Sequence[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> list[Row]:
    """Named strategies, some or all, and some searches side by side: predicted step, where it goes, memory, search
    seconds."""
    chosen = _machine(machine)
    _check_wish(wish)
    asked = wish or Wish()
    return compare_plans(graph, chosen, known_costs(), asked, searches, strategies=strategies, progress=progress)


def load(  # noqa: PLR0913 – what may be chosen of a module
    plan: Plan | Pipeline | str | PathLike[str],
    model: nn.Module,
    *,
    loss: Any = None,
    session: Session | None = None,
    device: torch.device | str | None = None,
    init: Callable[[nn.Module], None] | None = None,
    seed: int = 0,
    exact_seed: int | None = None,
    weights: Weights | str | PathLike[str] | None = None,
) -> ParallelModule:
    """This rank's part of a plan, as a module that trains and evaluates like the model does on one device.

    Every rank calls it with the same plan and model; nothing is sent before plan, model and number of ranks are known
    to agree. A batch of another shape, and the other mode (`step.eval()`), are planned after the plan when they first
    come, over the same weights; where the plan was made with a `loss` that has to be given. Modules share a session
    unless one is given, and lie on its device unless another is. A model on the meta device is never built as a whole:
    `init` (or the model's own `_init_weights`, or each module's `reset_parameters`) fills one module at a time, from
    `seed`. With `weights`, files of pretrained weights, every rank reads its pieces out of them. `exact_seed` makes
    every rank draw the random numbers one device so seeded would draw, for comparisons.

    >>> import torch
    >>> model, batch = nn.Linear(4, 4), (torch.ones(8, 4), torch.zeros(8, 4))
    >>> made = plan(model, batch, "local:1", loss=nn.functional.mse_loss, strategy="single")
    >>> step = load(made, model, loss=nn.functional.mse_loss, device="cpu")
    >>> bool(step(*batch).isclose(step.eval()(torch.ones(3, 4), torch.zeros(3, 4))))
    True
    """
    chosen: Plan | Pipeline | Path = plan if isinstance(plan, Plan | Pipeline) else _path(plan)
    return _load(
        chosen, model, session=session, device=device, init=init, seed=seed, exact_seed=exact_seed,
        weights=weights, loss=loss, planner=Planner(_capture_again, _decide_alike),
    )  # fmt: skip


def _capture_again(
    plan: Plan | Pipeline, model: nn.Module, batch: Batch, loss: Any, graphs: Sequence[Graph]
) -> Graph:
    """A model in another shape or mode, in the precision of a plan; whatever autocast the caller is in.

    A graph of it for another shape is taken over where nothing but sizes differs, which is found out much sooner.
    """
    asked = _precision(plan.precision or None)
    regions = () if asked is None else asked.autocast
    for graph in graphs:
        made = resize(graph, model, batch, loss, regions)
        if made is not None:
            return made
    return _applied(asked, capture_graph(model, batch, loss, None, regions))


def _decide_alike(plan: Plan | Pipeline, graph: Graph) -> tuple[Plan | Pipeline, str]:
    made = plan_alike(plan, graph) if isinstance(plan, Plan) else pipeline_alike(plan, graph)
    differs = made.shortened or (made.fresh and graph.training == plan.graph.training)
    return made.plan, f"{made}; a plan of its own may be faster" if differs else ""


def explain(plan: Plan | Pipeline | str | PathLike[str]) -> Explanation | PipelineExplanation:
    """What a plan does: the operators in order, and between them what is sent; of a pipeline stage by stage."""
    found = _plan(plan)
    return _explain(found) if isinstance(found, Plan) else explain_pipeline(found)


def diff_plans(before: Plan | Pipeline | str | PathLike[str], after: Plan | Pipeline | str | PathLike[str]) -> PlanDiff:
    """What differs between two plans, each of one stage or several."""
    return _diff_plans(_plan(before), _plan(after))


def simulate_plan(
    plan: Plan | Pipeline | str | PathLike[str], machine: Machine | str | PathLike[str], *, optimizer: str = "adam"
) -> Prediction | PipelinePrediction:
    """Predict a training step of a plan on a machine, which need not be at hand: seconds, where they go, memory.

    >>> import torch
    >>> model, batch = nn.Linear(4, 4), (torch.ones(8, 4), torch.ones(8, 4))
    >>> made = plan(model, batch, "dgx-h100", loss=nn.functional.mse_loss, strategy="data-parallel")
    >>> found = simulate_plan(made, "dgx-h100")
    >>> 0 < found.seconds < 1, found.fits
    (True, True)
    """
    chosen, found = _machine(machine), _plan(plan)
    if isinstance(found, Pipeline):
        return predict_pipeline(found, chosen, known_costs(), optimizer)
    return predict(found, chosen, known_costs(), optimizer)


def _plan(plan: Plan | Pipeline | str | PathLike[str]) -> Plan | Pipeline:
    """A plan, or the one in a file; its precision is one that there is."""
    found = plan if isinstance(plan, Plan | Pipeline) else load_plan(_path(plan))
    _precision(found.precision or None)
    return found


def _path(plan: str | PathLike[str]) -> Path:
    if isinstance(plan, str | PathLike):
        return Path(plan)
    raise UsageError(
        f"A {type(plan).__name__} was given instead of a plan. A plan is what conjoin.plan or conjoin.load_plan gives, "
        f"or the path of its file. Pass one of these."
    )


def _machine(machine: Machine | str | PathLike[str]) -> Machine:
    """A machine by its name or its file."""
    match machine:
        case str():
            return parse_machine(machine, machines_directory())
        case PathLike():
            return Machine.load(Path(machine))
        case Machine():
            return machine
    raise UsageError(
        f"A {type(machine).__name__} was given instead of a machine. A machine is a name as 'local:4' or 'dgx-h100:2', "
        f"the path of a .toml file, or a conjoin.Machine. Pass one of these."
    )


def _check_wish(wish: Wish | None) -> None:
    if not isinstance(wish, Wish | None):
        raise UsageError(
            f"A {type(wish).__name__} was given instead of a wish. What is asked of a search stands in a conjoin.Wish. "
            f"Write wish=conjoin.Wish(budget=60)."
        )


def known_costs() -> CostModel:
    """What was measured on this host before, and what is shipped."""
    try:
        path = costs_path()
    except UsageError:  # an account without a home has measured nothing
        return CostModel([])
    return CostModel([MeasurementStore(path)] if path.exists() else [])


def verify_plan(
    plan: Plan | Pipeline, model: nn.Module, batch: Batch, *, loss: Any = None, num_steps: int = 5
) -> Verdict:
    """Compare a plan with one device: loss, gradients and weights, all ranks in this process, in double precision.

    The model itself is run as well, for as many steps, on batches other than the one given.
    """
    if num_steps < 1:
        raise UsageError(
            f"A plan was to be compared with one device for {num_steps} steps. Nothing would be compared. "
            f"Ask for at least one step."
        )
    own, asked = plain_model(model), _precision(plan.precision or None)
    own, batch = (own, batch) if asked is None else asked.converted(own, batch)
    graph, plain = capture(own, batch, loss, check=False, precision=asked), PlainModel(own, loss, run_plainly)
    return verify_in_process(Case(plan, graph, own, batch, plain), num_steps)
