"""Steps that do not fit a GPU: what is chosen for every segment fits, and is no slower than running all again."""

from __future__ import annotations

from functools import cache
from itertools import product
from math import inf

import pytest

from conjoin.cost import CostModel
from conjoin.ir import Plan, offloaded_tensors, recomputed_segments
from conjoin.machine import Machine, NodeKind, parse_machine
from conjoin.search import Wish, find_plan, make_plan
from conjoin.search.memory_chain import _Chain
from conjoin.search.relief import segmentations
from conjoin.sim import MachinePrices, Prediction, predict, simulate
from tests.zoo.graphs import captured


def one_gpu() -> Machine:
    device = parse_machine("dgx-h200").device_type(0)
    return Machine(device.name, 1, 1, "cuda", nodes=(NodeKind("node", 1, (device,)),))


def test_what_is_found_fits_and_is_no_slower_than_running_blocks_again() -> None:
    graph, machine, costs = captured("gpt-125m", 32), one_gpu(), CostModel()
    whole = predict(make_plan(graph, machine, "single"), machine, costs, "adam").memory
    limit = whole.peak - whole.activations // 4
    found = find_plan(graph, machine, costs, Wish("joint", inf, "adam", limit, steps=30)).plan
    assert isinstance(found, Plan)
    told = predict(found, machine, costs, "adam")
    assert told.memory.peak <= limit
    assert recomputed_segments(found) or offloaded_tensors(found) or found.accumulation
    again = predict(make_plan(graph, machine, "single+recompute=full"), machine, costs, "adam")
    assert again.memory.peak > limit or told.seconds <= again.seconds


@cache
def named(name: str, bases: tuple[str, ...]) -> list[Prediction]:
    """What somebody would name on a machine, predicted."""
    graph, machine, costs = captured("gpt-125m", 32), parse_machine(name), CostModel()
    again = ("", "+recompute=selective", "+recompute=every-2", "+recompute=full")
    hosts = ("", "+offload=optimizer", "+offload=both") if bases == ("single",) else ("",)
    names = ["".join(parts) for parts in product(bases, again, hosts)]
    return [predict(make_plan(graph, machine, each), machine, costs, "adam") for each in names]


@pytest.mark.parametrize(("name", "bases", "part"), [
    ("dgx-h200:1x1", ("single",), 0.05), ("dgx-h200:1x1", ("single",), 0.9),
    ("dgx-h200:1x2", ("fsdp", "zero1"), 0.4),
])  # fmt: skip
def test_no_strategy_that_somebody_would_name_is_faster(name: str, bases: tuple[str, ...], part: float) -> None:
    """Under every limit that some of them keep to, the search begins with the fastest of those."""
    graph, machine, costs, told = captured("gpt-125m", 32), parse_machine(name), CostModel(), named(name, bases)
    peaks = [each.memory.peak for each in told]
    limit = int(min(peaks) + part * (max(peaks) - min(peaks)))
    found = find_plan(graph, machine, costs, Wish("named", 120.0, "adam", limit, stages=1))
    assert found.peak_bytes <= limit
    assert found.seconds_per_step <= min(each.seconds for each in told if each.memory.peak <= limit) * (1 + 1e-9)


def test_a_chain_counts_all_that_is_kept_once() -> None:
    graph, machine = captured("gpt-125m", 32), one_gpu()
    plan = make_plan(graph, machine, "single")
    program = simulate(plan, MachinePrices.of(graph, machine, CostModel())).program
    chain = _Chain(program, "cuda")
    for segments in segmentations(program.skeleton):
        links, room = chain.asked(segments, 0)
        inside = {place for first, last in segments for place in range(first, last + 1)}
        inside |= {*range(segments[-1][1] + 1, len(program.skeleton.operators))}
        assert room == sum(tensor.num_bytes for tensor in chain.tensors if tensor.made[0] in inside)
        for link in links[:-1]:
            kept, again, host = link.options[:3]
            assert again.kept_bytes <= kept.kept_bytes == host.copied_bytes and host.kept_bytes == 0
            assert again.again_seconds == link.forward
