"""`pipeline`: a model in stages on parts of the machine, each by a named strategy, run by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate

from conjoin.cost import CostModel
from conjoin.errors import StrategyError, UsageError
from conjoin.ir import (
    Graph,
    LeafKind,
    Mark,
    Pipeline,
    Plan,
    Stage,
    StageGraph,
    Value,
    check_pipeline,
    computation_digest,
    cut_in_micro_batches,
    cut_in_stages,
    model_mark,
    parallelize,
    recompute_actions,
    stage_edges,
)
from conjoin.machine import DeviceType, Machine, devices_of
from conjoin.schedules import (
    Memory,
    Problem,
    Schedule,
    chain,
    eager_one_f_one_b,
    find_schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble,
)
from conjoin.search.blocks import segments_for
from conjoin.search.bundle_size import choose_bundle_bytes
from conjoin.search.drafts import lay_out, settle_draft
from conjoin.search.named_plans import drafter
from conjoin.search.offloads import with_offloads
from conjoin.search.request import Request
from conjoin.search.stage_cuts import cut_rows, node_seconds
from conjoin.search.strategies import read_request
from conjoin.sim import predict_pipeline, with_fastest_chunks

_VIRTUAL = 2
"""Stages to an owner where a schedule interleaves them and nobody says how many."""
_PER_STAGE = 4
"""Micro-batches for every stage where nobody says how many: the bubble of 1F1B is then a fifth at most."""

_STEPS = 2_000
"""Of branch and bound for a schedule: about a second."""
FOUND = "found"
_NOMINAL = DeviceType("nominal", "cpu", 2**34, 1e11, (("float32", 1e12),))
"""What operators are weighed by where a machine's description says no speeds."""

SCHEDULES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda owners, each, micro: gpipe(owners, micro),
    "1f1b": lambda owners, each, micro: one_f_one_b(owners, micro),
    "eager-1f1b": lambda owners, each, micro: eager_one_f_one_b(owners, micro),
    "interleaved": lambda owners, each, micro: interleaved(owners, each, micro),
    "zero-bubble": lambda owners, each, micro: zero_bubble(owners, micro),
}

_IN_TWO = ("zero-bubble", FOUND)
"""Schedules in which a backward pass may be in two parts."""


def make_pipeline(
    graph: Graph, machine: Machine, strategy: str, costs: CostModel | None = None, sizes: Sequence[int] = ()
) -> Pipeline:
    """The pipeline that is asked for; `sizes` are the devices of each owner of stages where they are not all alike."""
    request = read_request(strategy)
    check_outputs(graph)
    name = request.schedule or "1f1b"
    known = (*SCHEDULES, FOUND)
    if name not in known:
        near = get_close_matches(name, known, n=1, cutoff=0.3) or ["1f1b"]
        raise UsageError(
            f"The strategy pipeline was given schedule={name[:40]!r}. The schedules are {', '.join(known)}. "
            f"Did you mean {near[0]}?"
        )
    if request.offload == "inputs":
        raise UsageError(
            "The strategy pipeline was given offload=inputs. Stages read what other stages sent, micro-batch by "
            "micro-batch, and a batch that is cut need not lie on the host. Leave it out, or take offload=activations."
        )
    if request.chunks > 1 and request.degrees.get("tp", 1) == 1:
        raise UsageError(
            f"The strategy pipeline was given chunks={request.chunks}. Inside a stage no product has a collective next "
            f"to it unless layers are split, and tp is 1. Leave chunks out, or write pipeline:pp=2,tp=2,sp,chunks=2."
        )
    if request.chunks > 1 and name in _IN_TWO:
        raise UsageError(
            f"The strategy pipeline was given chunks={request.chunks} and schedule={name}. By it stages make gradients "
            f"of inputs and of weights apart, which products in chunks make together. Leave chunks out, or take "
            f"schedule=1f1b."
        )
    if request.keep:
        raise UsageError(
            f"The strategy pipeline was given keep={request.keep}. Its stages go from one micro-batch to the next and "
            f"back, and gather for each pass. Leave keep out, or write pipeline:pp=2,zero1, which gathers once a step."
        )
    if request.part > 1:
        raise UsageError(
            f"The strategy pipeline was given part={request.part}. Its stages take whole steps of micro-batches one by "
            f"one, and none has the batch as a whole. Use micro={request.part}, or part= with another strategy."
        )
    sizes = _sizes(machine, request, sizes)
    each = request.degrees.get("v", _VIRTUAL) if name == "interleaved" else 1
    micro = request.micro if request.asks_micro else _micro_batches(graph, sizes, request.degrees.get("tp", 1))
    whole, accumulation = cut_in_micro_batches(graph, micro, own_statistics=True) if micro > 1 else (graph, None)
    device = machine.device_type(0) if machine.nodes else _NOMINAL
    seconds = node_seconds(whole, costs or CostModel(), device)
    cuts = cut_in_stages(whole, cut_rows(whole, seconds, [*sizes] * each, _rate(machine)))
    ranks = [tuple(range(end - size, end)) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    stages = tuple(
        _stage(number, cut, machine, ranks[number % len(ranks)], request, whole) for number, cut in enumerate(cuts)
    )
    schedule = SCHEDULES[name if name != FOUND else "1f1b"](len(sizes), each, micro)
    edges = tuple(sorted({*chain(len(stages)), *stage_edges(stages)}))
    made = Pipeline(
        graph=whole,
        stages=stages,
        schedule=replace(schedule, edges=edges),
        mesh=machine.mesh,
        model=model_mark(graph),
        machine=Mark(machine.name, machine.fingerprint()),
        strategy=str(replace(request, micro=micro, schedule=name)),
        accumulation=accumulation,
    )
    made = with_fastest_chunks(made, machine)
    if name == FOUND:
        made = replace(made, schedule=_best_schedule(made, machine, costs or CostModel()))
    return check_pipeline(made)


def _best_schedule(pipeline: Pipeline, machine: Machine, costs: CostModel) -> Schedule:
    """The best order that is found for what stages and transfers take, within the memory of devices."""
    if not machine.nodes:
        raise StrategyError(
            f"The best schedule for a pipeline on {machine.name} was asked for. What its stages take is not known: its "
            f"description says no speeds. Measure them with `conjoin calibrate`, or name a schedule."
        )
    told = predict_pipeline(pipeline, machine, costs)
    stays = dict.fromkeys(sorted(set(pipeline.schedule.owners)), 0)
    for owner, stage in zip(pipeline.schedule.owners, told.stages, strict=True):
        stays[owner] += stage.memory.peak - stage.kept
    held = tuple(float(stage.kept) for stage in told.stages)
    memory = Memory(held, held, tuple(max(float(told.capacity - used), 0.0) for used in stays.values()))
    if any(need > room for need, room in zip(held, memory.limits, strict=False)):
        raise StrategyError(
            f"The best schedule for a pipeline on {machine.name} was asked for. Of a stage not one micro-batch fits "
            f"into {told.capacity / 2**30:.1f} GiB. Use more stages, smaller micro-batches or recompute=full."
        )
    schedule = pipeline.schedule
    problem = Problem(schedule.owners, schedule.num_micro_batches, told.times, memory, schedule.edges)
    return replace(find_schedule(problem, _STEPS).schedule, name=FOUND)


def check_outputs(graph: Graph) -> None:
    """A pipeline gives the loss and nothing else."""
    others = sum(isinstance(value, Value) for value in graph.outputs) - (graph.loss is not None)
    if graph.loss is None or others:
        loss = "no loss" if graph.loss is None else "a loss"
        raise StrategyError(
            f"A pipeline of {graph.name} was asked for, which gives {loss} and {others} other "
            f"tensor{'' if others == 1 else 's'}. A call of a pipeline runs all its passes, and gives the loss alone. "
            f"Plan it with a function that gives the loss, as loss=lambda output: output.loss."
        )


def _sizes(machine: Machine, request: Request, sizes: Sequence[int]) -> tuple[int, ...]:
    """How many devices each owner of stages has."""
    count, degree = machine.num_devices, request.degrees.get("pp", 0)
    if sizes:
        if sum(sizes) != count or min(sizes) < 1:
            raise StrategyError(
                f"Stages on {', '.join(map(str, sizes))} devices were asked for. {machine.name} has {count}, and every "
                f"device must be used. Give numbers that add up to {count}."
            )
        return tuple(sizes)
    inner = request.degrees.get("dp", 1) * request.degrees.get("tp", 1)
    degree = degree or max(count // inner, 1)
    if degree > count:
        raise StrategyError(
            f"A pipeline of {degree} stages was asked for on {machine.name}, which has {count} devices. Every stage "
            f"needs one. Ask for pp={count} or fewer; a device runs several stages by schedule=interleaved."
        )
    return tuple(count // degree + (i < count % degree) for i in range(degree))


def usual_micro_batches(machine: Machine, request: Request) -> int:
    """As many micro-batches as a pipeline has where its batch has parts for them and nobody says."""
    return _PER_STAGE * len(_sizes(machine, request, ()))


def _micro_batches(graph: Graph, sizes: Sequence[int], tensor_degree: int) -> int:
    """The most micro-batches that a batch has parts for, up to some for every stage, and with samples for all devices
    of a stage that split them."""
    fewest = max(size // tensor_degree for size in sizes)
    for micro in range(_PER_STAGE * len(sizes), 1, -1):
        try:
            made, accumulation = cut_in_micro_batches(graph, micro, own_statistics=True)
        except StrategyError:
            continue
        cut = [leaf for leaf in made.leaves_of(LeafKind.INPUT) if leaf.name in accumulation.cut]
        if all(leaf.type.shape[0] >= fewest for leaf in cut):
            return micro
    return 1


def _rate(machine: Machine) -> float:
    """About how many bytes a second go from one stage to the next."""
    links = machine.links or (machine.nodes[0].links if machine.nodes else ())
    return min((link.bandwidth for link in links), default=1e10)


def _stage(
    number: int, cut: StageGraph, cluster: Machine, ranks: tuple[int, ...], request: Request, whole: Graph
) -> Stage:
    machine = devices_of(cluster, ranks)
    inner = _inner(machine, request)
    settled = settle_draft(cut.graph, drafter(machine, inner), shared=cut.shared)
    laid_out = lay_out(settled, is_stage=True)
    parallel = parallelize(settled.graph, laid_out.leaves, laid_out.choices, laid_out.outputs)
    segments = segments_for(request.recompute, settled.graph, whole)
    plan = Plan(
        graph=parallel,
        mesh=machine.mesh,
        model=Mark(f"stage {number}", ""),
        machine=Mark(cluster.name, cluster.fingerprint()),
        strategy=str(settled.draft.request),
        memory=(*settled.draft.memory, *recompute_actions(parallel, segments)),
        substitutions=settled.substitutions,
        computes=computation_digest(settled.graph),
        bundle_bytes=choose_bundle_bytes(cut.graph, machine),
        chunks=inner.chunks,
    )
    return Stage(with_offloads(plan, request.offload, machine.device), ranks, cut.arrivals, cut.borrowed)


def _inner(machine: Machine, request: Request) -> Request:
    """The strategy inside a stage."""
    size, tp = machine.num_devices, request.degrees.get("tp", 1)
    if size % tp:
        raise StrategyError(
            f"Tensor parallelism over {tp} devices was asked for in a stage of {size}. {size} is no multiple of {tp}. "
            f"Choose tp as a divisor of {size}, or stages of other sizes."
        )
    asked = request.degrees.get("dp")
    if asked is not None and asked * tp != size:
        raise StrategyError(
            f"The degrees dp={asked} × tp={tp} were asked for in a stage of {size} devices. They use {asked * tp}. "
            f"Leave dp out, or ask for dp={size // tp}."
        )
    if size == 1:
        return read_request("single")
    flags = sorted(request.flags)
    if tp == 1:
        stored = [flag for flag in flags if flag in ("zero1", "fsdp", "hsdp")]
        return read_request(f"{stored[0] if stored else 'data-parallel'}")
    return read_request(f"megatron:{','.join([f'tp={tp}', f'dp={size // tp}', *flags])},chunks={request.chunks}")
