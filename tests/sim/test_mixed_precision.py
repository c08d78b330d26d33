"""Parameters that are cast for use, simulated: in bundles that overlap, and delta simulation to the last bit."""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np
import pytest
import torch

from conjoin.cost import CostModel, Source
from conjoin.frontends import Precision, capture
from conjoin.frontends.torch_export import AutocastRegions
from conjoin.ir import Graph
from conjoin.machine import parse_machine
from conjoin.ops import SCALED_LINEAR, Call, TensorType
from conjoin.report import explain
from conjoin.search import make_plan
from conjoin.sim import Layouts, MachinePrices, Prediction, predict, random_change, simulate, simulate_layouts
from zoo.llama import Llama, LlamaConfig, llama_batch
from zoo.tokens import next_token_loss

SMALL = LlamaConfig(layers=1, width=16, feed_forward=32, heads=2, kv_heads=2, vocabulary=32, length=4)
LARGE = LlamaConfig(layers=2, width=4096, feed_forward=14336, heads=32, kv_heads=8, vocabulary=2048, length=4096)


def graph_of(config: LlamaConfig, batch_size: int, precision: str) -> Graph:
    asked = Precision.parse(precision)
    stored = torch.float32 if asked.autocast else asked.dtype
    return asked.applied(captured(config, batch_size, stored, asked.autocast))


@cache
def captured(config: LlamaConfig, batch_size: int, stored: torch.dtype, autocast: AutocastRegions) -> Graph:
    """What precisions that differ only in what they round besides have in common."""
    with torch.device("meta"):
        model, batch = Llama(config).train().to(stored), llama_batch(batch_size, config)
    return capture(model, batch, next_token_loss, autocast=autocast)


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron:tp=2,dp=2"])
def test_a_chain_of_changes_is_simulated_as_from_the_beginning(strategy: str) -> None:
    plan = make_plan(graph_of(SMALL, 4, "bf16-mixed"), parse_machine("k80-cluster:1"), strategy)
    simulation = simulate(plan, MachinePrices(parse_machine("k80-cluster:1"), CostModel()), unfold=True)
    cast, rng, made, seen = simulation.program.cast_by_bundles, Random(3), 0, {simulation.timeline.ticks}
    numbers = {cast}
    while made < 30:
        change = random_change(simulation.program, rng)
        if change is None:
            continue
        made += 1
        simulation = simulation.change(change)
        if made % 3:  # what is wrong after a change is so after the next
            continue
        program = simulation.program
        layouts = Layouts(program.leaves, tuple(program.choices), program.results)
        wanted = simulate_layouts(program.skeleton, layouts, program.drafts, program.regathered)
        assert program.cast_by_bundles == wanted.program.cast_by_bundles
        numbers.add(program.cast_by_bundles)
        for (task, *mine), (same, *theirs) in zip(simulation.timeline.times(), wanted.timeline.times(), strict=True):
            assert task.name == same.name and all(map(np.array_equal, mine, theirs))
        seen.add(simulation.timeline.ticks)
    assert len(seen) > 1 and len(numbers) > 1, "the changes made no difference"


@cache
def predicted(precision: str, strategy: str) -> Prediction:
    machine = parse_machine("dgx-h100:2")
    return predict(make_plan(graph_of(LARGE, 32, precision), machine, strategy), machine, CostModel(), "adamw")


@pytest.mark.parametrize("strategy", ["data-parallel", "zero1", "fsdp"])
def test_as_much_is_hidden_as_where_all_is_narrow(strategy: str) -> None:
    def hidden(precision: str) -> float:
        found = predicted(precision, strategy).breakdown
        return found.hidden / (found.hidden + found.exposed)

    assert hidden("bf16-mixed@cuda") >= 0.95 * hidden("bf16@cuda") > 0.5


def test_mixed_precision_is_faster_and_holds_narrow_copies_only_while_they_are_used() -> None:
    wide, mixed = (predicted(precision, "fsdp") for precision in ("float32@cuda", "bf16-mixed@cuda"))
    assert mixed.seconds < 0.5 * wide.seconds
    assert mixed.memory.parameters == wide.memory.parameters and mixed.memory.peak < wide.memory.peak


def test_tf32_takes_the_time_of_float32_but_for_its_products() -> None:
    """The judge is arithmetic: what products take less is what the rates say, and nothing else changes."""
    wide, rounded, narrow = (predicted(f"{name}@cuda", "fsdp") for name in ("float32", "tf32", "bf16-mixed"))
    assert narrow.seconds < rounded.seconds < 0.5 * wide.seconds
    assert rounded.memory == wide.memory and rounded.step_flops == wide.step_flops
    assert 4 < rounded.peak_flops / wide.peak_flops < 494.5 / 67, "attention stays in float32"
    costs, device = CostModel(), parse_machine("dgx-h100").device_types[0]
    matrix = TensorType((8192, 8192), torch.float32)
    product, function = Call("mm", (matrix, matrix)), Call("relu", (matrix,))
    plain, fast = (each.operator(product, (0, 1), device) for each in (costs, costs.in_tf32()))
    assert 2 * 8192**3 / 494.5e12 < fast.forward.value < 0.25 * plain.forward.value
    assert fast.forward.source is Source.ESTIMATED
    assert costs.in_tf32().operator(function, (0,), device) == costs.operator(function, (0,), device)


def test_what_was_measured_in_float32_says_nothing_of_tf32() -> None:
    (h200,) = parse_machine("dgx-h200").device_types
    matrix = TensorType((4096, 4096), torch.float32)
    call, costs = Call("linear", (matrix, matrix, None)), CostModel()
    assert costs.operator(call, (), h200).forward.source is not Source.ESTIMATED
    assert costs.in_tf32().operator(call, (), h200).forward.source is Source.ESTIMATED
    assert costs.in_tf32() is costs.in_tf32() is costs.in_tf32().in_tf32()


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
def test_sums_in_half_precision_send_half_and_take_no_longer(strategy: str) -> None:
    machine, found = parse_machine("dgx-h100:2"), []
    for told in ("", ",reduce=bf16"):
        plan = make_plan(graph_of(LARGE, 32, f"bf16-mixed{told}@cuda"), machine, strategy)
        found.append(predict(plan, machine, CostModel(), "adamw"))
        sent = sum(task.sent for task, *_ in found[-1].simulation.timeline.times())
        assert sent == explain(plan).bytes_of(0), "what is simulated is what is told"
    wide, narrow = (each.breakdown for each in found)
    assert narrow.hidden + narrow.exposed < 0.8 * (wide.hidden + wide.exposed)
    assert found[1].seconds <= 1.01 * found[0].seconds, "where all is hidden, a cast more is all that is left of it"
    assert found[1].memory.peak <= found[0].memory.peak


def test_eight_bits_are_priced_as_products_and_casts() -> None:
    """The judge is arithmetic: at least the flops at the rate of float8, and every byte that casts read and write."""
    costs, device = CostModel(), parse_machine("dgx-h100").device_types[0]
    for size, faster in ((16384, 1.4), (8192, 1.1)):  # an H200 was 1.4 and 1.0 times as fast, forward
        matrix = TensorType((size, size), torch.bfloat16)
        calls = [Call(op, (matrix, matrix, None)) for op in ("linear", SCALED_LINEAR)]
        half, eight = (costs.operator(call, (0, 1), device) for call in calls)
        product, bytes_cast = 2 * size**3 / 1979e12, 2 * (2 + 2 + 1) * size**2 / 3350e9
        assert product + bytes_cast < eight.forward.value < half.forward.value / faster
        assert 2 * product < eight.backward.value < half.backward.value / faster
    small = TensorType((512, 512), torch.bfloat16)
    half, eight = (costs.operator(Call(op, (small, small, None)), (), device) for op in ("linear", SCALED_LINEAR))
    assert eight.forward.value > half.forward.value and eight.host_forward > 5 * half.host_forward
    exact = TensorType((512, 512), torch.float64)
    assert costs.operator(Call(SCALED_LINEAR, (exact, exact, None)), (), device).forward.source is Source.ESTIMATED


def test_a_large_model_is_faster_in_eight_bits() -> None:
    half, eight = (predicted(f"{name}@cuda", "fsdp") for name in ("bf16-mixed", "fp8-mixed"))
    assert eight.seconds < half.seconds and eight.step_flops == half.step_flops
    assert 1.2 < eight.peak_flops / half.peak_flops < 2
    assert eight.memory.parameters == half.memory.parameters
