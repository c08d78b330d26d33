"""Every named strategy on every model of the zoo it fits, on real Gloo ranks: trains exactly like one device.

Some optimizer steps: loss, every gradient, the updated weights. In double precision they agree to a relative 1e-9. In
single precision losses agree to 2e-3 and tensors to 1e-2, or to ten times what one device itself is off by against
double precision, in the worst of all these, where that is more: batch norm over tiny batches and pooling between near
ties multiply rounding a thousandfold a step, so only double precision can tell a wrong plan of such a model. One device
is run from its values and from some that are a rounding away, since near ties fall as rounding has it.
`make test` runs a sample that covers every strategy, two steps of each, of which the second begins with what the first
has left behind, and the first of most models in single precision too; `make test-all` everything, for five.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from conjoin.errors import StrategyError
from conjoin.ir import Graph, Plan
from conjoin.machine import parse_machine
from conjoin.runtime import TOLERANCE, Case, Reference, compare_rank, connect, launch, train_alone, verdict
from conjoin.search import make_plan, strategy_names
from tests.zoo import graphs
from tests.zoo.workloads import tiny_names

STEPS, SAMPLE_STEPS = 5, 2
ROUGH = ("resnext-50",)
"""Batch norm over tiny batches: the sample has it in double precision alone."""
SINGLE_LOSS, SINGLE_TENSOR, TIMES_OWN_ERROR = 2e-3, 1e-2, 10.0
SHAKEN = 3
RANKS = (2, 4, 8)
JOINED = ("megatron:sp", "megatron:tp=2,sp,fsdp", "hsdp:shard=2", "hsdp:shard=2+megatron:tp=2,sp+recompute=selective")
STRATEGIES = (*(name for name in strategy_names() if name not in ("single", "hsdp")), *JOINED)
BATCH = 8
"""So that eight ranks have a sample each."""


@lru_cache(maxsize=1)
def workload(name: str) -> Any:
    return zoo.build(f"{name}:tiny", batch_size=BATCH)


def captured(name: str) -> Graph:
    return graphs.captured(name, BATCH)


def plans(name: str, ranks: int, strategies: tuple[str, ...]) -> Iterator[Plan]:
    """The plans of the strategies that fit; another error than that they do not fit is not caught."""
    graph = captured(name)
    for strategy in strategies:
        try:
            yield make_plan(graph, parse_machine(f"local:{ranks}"), strategy)
        except StrategyError as error:
            assert str(error).count(". ") >= 2, error


@dataclass(frozen=True, slots=True)
class Result:
    strategy: str
    dtype: str
    worst: float
    limit: float
    what: str


def check(
    name: str, ranks: int, strategies: tuple[str, ...], steps: int, num_singles: int | None = None
) -> list[Result]:
    """Train every plan on one process group and compare; the first ones in single precision too, by default all."""
    found, graph = workload(name), captured(name)
    cases: list[tuple[str, Case]] = []
    for number, plan in enumerate(plans(name, ranks, strategies)):
        single = Case(plan, graph, found.model, found.batch)
        cases.append(("float64", single.widened()))
        if num_singles is None or number < num_singles:
            cases.append(("float32", single))
    if not cases:
        return []
    references = {dtype: train_alone(case, steps) for dtype, case in cases[:2]}
    own = max(errors_of_single_precision(cases[1][1], references, steps)) if "float32" in references else 0.0

    def program(rank: int) -> list[Any]:
        communicator, _ = connect(cases[0][1].plan)  # all plans have the same mesh, and share its process groups
        return [compare_rank(case, references[dtype], communicator) for dtype, case in cases]

    answers = launch(ranks, program)
    results = []
    for i, (dtype, case) in enumerate(cases):
        judged = verdict(references[dtype].losses, [answer[i] for answer in answers])
        limits = {d.what: TOLERANCE if dtype == "float64" else _single_limit(d.what, own) for d in judged.differences}
        worst = max(judged.differences, key=lambda d: d.relative / limits[d.what])
        results.append(Result(case.plan.strategy, dtype, worst.relative, limits[worst.what], worst.what))
    return results


def errors_of_single_precision(case: Case, references: dict[str, Reference], steps: int) -> Iterator[float]:
    """Of one device, from its values and from some that are a rounding away."""
    alike = [references["float32"], *(train_alone(shaken(case, seed), steps) for seed in range(SHAKEN))]
    return (error_of_single_precision(each, references["float64"]) for each in alike)


def _single_limit(what: str, own: float) -> float:
    return max(SINGLE_LOSS if what == "loss" else SINGLE_TENSOR, TIMES_OWN_ERROR * own)


def shaken(case: Case, seed: int) -> Case:
    """The same case with every parameter changed by about as much as it is rounded."""
    model, random = copy.deepcopy(case.model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * noise)
    return replace(case, model=model)


def error_of_single_precision(single: Reference, double: Reference) -> float:
    """How far one device in single precision is from double precision, each tensor relative to its largest element: in
    the worst of losses, gradients and state.
    """
    losses = (abs(a - b) / max(abs(b), 1e-3) for a, b in zip(single.losses, double.losses, strict=True))
    states = zip((*single.gradients, single.state), (*double.gradients, double.state), strict=True)
    return max(*losses, *(_relative(mine[name], theirs[name]) for mine, theirs in states for name in theirs))


def _relative(mine: Tensor, theirs: Tensor) -> float:
    if not theirs.numel():
        return 0.0
    return ((mine.double() - theirs).abs().max() / theirs.abs().max().clamp_min(1e-30)).item()


def assert_equal(results: list[Result]) -> None:
    wrong = [result for result in results if not result.worst <= result.limit]
    assert not wrong, "\n".join(map(str, wrong))


SAMPLE = (
    ("mlp", 4, ("data-parallel", "fsdp", "sbp3d")),
    ("bert-base", 4, ("megatron", "zero1")),
    ("gpt-125m", 8, ("hsdp:shard=2+megatron:tp=2,sp+recompute=selective",)),
    ("gpt-125m", 4, ("megatron:tp=2,sp,fsdp", "megatron:sp", "fsdp", "hsdp:shard=2", "context")),
    ("alexnet", 2, ("one-weird-trick", "spatial")),
    ("dlrm", 4, ("table-parallel",)),
    ("gat", 2, ("vertex-parallel",)),
    ("rnnlm-2step", 2, ("reduction",)),
    ("resnext-50", 2, ("data-parallel",)),
    ("moe-8x7b", 2, ("megatron", "expert")),
)


@pytest.mark.parametrize(("name", "ranks", "strategies"), SAMPLE, ids=[f"{n}-{r}" for n, r, _ in SAMPLE])
def test_a_sample_trains_like_one_device(name: str, ranks: int, strategies: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    num_singles = int(name not in ROUGH and ranks < max(RANKS))
    results = check(name, ranks, strategies, SAMPLE_STEPS, num_singles)
    assert len(results) == len(strategies) + num_singles, "a strategy of the sample does not fit"
    assert_equal(results)


def test_the_sample_covers_every_strategy() -> None:
    assert {name for _, _, strategies in SAMPLE for name in strategies} == set(STRATEGIES)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", tiny_names())
def test_everything_trains_like_one_device(name: str, ranks: int) -> None:
    torch.set_num_threads(1)
    results = check(name, ranks, STRATEGIES, STEPS)
    assert results, "no strategy fits"
    for result in results:
        print(f"{name:<18} {ranks} ranks  {result.strategy:<26} {result.dtype}  {result.worst:.1e}  {result.what}")
    assert_equal(results)
