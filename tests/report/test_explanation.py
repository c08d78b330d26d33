"""Explanations of plans: what is told to be sent is what ranks send, byte for byte."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache

import pytest

from conjoin.ir import MemoryAction, parse_graph
from conjoin.machine import parse_machine
from conjoin.report import explain, explanation_summary, explanation_text
from conjoin.search import make_plan, strategy_names
from tests.report.plans import SUM, Case, make_case, measure_bytes, plan_of

cases = cache(make_case)
MODELS = ("lenet", "gpt-125m", "dlrm", "moe-8x7b", "gat")


EVENLY = ("data-parallel", "zero1", "fsdp")


@pytest.mark.parametrize(
    ("strategy", "machine", "models"),
    [
        *((name, "local:6", MODELS[:3] if name in EVENLY else MODELS) for name in strategy_names() if name != "single"),
        *((name, "local:4", MODELS[3:]) for name in EVENLY),
    ],
)
def test_what_is_told_is_what_is_sent(strategy: str, machine: str, models: tuple[str, ...]) -> None:
    """By the first two models that a strategy fits, each strategy beginning with another one."""
    fitting, first = 0, strategy_names().index(strategy) % len(models)
    for name in (*models[first:], *models[:first]):
        case = cases(name, 7)
        plan = case.plan(machine, strategy)
        if plan is not None and fitting < 2:
            fitting += 1
            found = explain(plan)
            assert measure_bytes(plan, case.workload) == found.sent().all, name
            assert sum(found.sent(kind=total.kind).total for total in found.totals) == found.sent().total
    assert fitting > 0, f"{strategy} fits none of {models} on {machine}"


@pytest.mark.parametrize("name", ["moe-8x7b", "xdl"])
def test_uneven_pieces_and_odd_models(name: str) -> None:
    case = cases(name, 5)
    for strategy in ("fsdp", "megatron"):
        plan = case.plan("local:3", strategy)
        if plan is not None:
            assert measure_bytes(plan, case.workload) == explain(plan).sent().all


def test_many_bundles_of_parameters() -> None:
    for strategy in ("data-parallel", "fsdp"):
        case = cases("gpt-125m", 8)
        plan = case.plan("local:4", strategy)
        assert plan is not None
        plan = replace(plan, bundle_bytes=3000)
        found = explain(plan)
        assert measure_bytes(plan, case.workload) == found.sent().all
        assert sum(len(shipment.tensors) > 1 for shipment in found.shipments) > 1


def test_one_device_sends_nothing() -> None:
    found = explain(make_plan(cases("mlp", 4).graph, parse_machine("local:1"), "single"))
    assert found.bytes_of(0) == 0 and found.totals == () and found.stored_bytes == found.parameter_bytes
    assert "1 device" in "\n".join(explanation_summary(found))


def test_the_text_is_annotated_code() -> None:
    assert explanation_text(explain(plan_of(SUM))) == """\
strategy     by hand
mesh         2 devices, axes d0:2
model        net 1111111111111111, train
machine      two 2222222222222222
precision    float32, as the model is
operators    2
parameters   16 B stored per rank, 16 B whole
sent         20 B per rank, 40 B by all ranks in a step
  all-reduce       4 B forward + 16 B backward per rank

    ~ backward all-reduce of the gradient of param:w f32[4] <- d0:B over d0, 16 B per rank, 32 B by all ranks
%1: f32[8,4]{d0:S(0)} = mul.Tensor(input:x, param:w)  # split dim 0 over d0; scale net.py:7
%2: f32[]{d0:P} = sum(%1)  # split summed dim 0 over d0; net.py:8
results
    ~ forward all-reduce of %2 f32[]{d0:P} -> I over d0, 4 B per rank, 8 B by all ranks
"""


def test_a_strangers_names_do_not_write_to_the_terminal() -> None:
    lines = [
        'graph "g" train', "param:w f32[2] trainable", "input:x f32[2]", "takes [input:x] in null",
        '%0: f32[] = sum(param:w)  @ "/tmp/a\\ud800.py":3 "fc\\u001b[31m"', "returns [%0] in null loss 0",
    ]  # fmt: skip
    text = explanation_text(explain(plan_of("\n".join(lines))))
    assert r"fc\x1b[31m a\ud800.py:3" in text and text.replace("\n", "").isprintable()


def test_gradients_that_do_not_come_back_cost_nothing() -> None:
    in_eval = plan_of(SUM.replace(" train\n", " eval\n"))
    assert explain(in_eval).bytes_of(0) == 4
    assert explain(plan_of(SUM.replace(" trainable", ""))).bytes_of(0) == 4
    unused = SUM.replace("%2: f32[]{d0:P} = sum(%1)", "%2: f32[]{d0:P} = sum(input:x)")
    assert explain(plan_of(unused)).bytes_of(0) == 4
    detached = SUM.replace("%2: f32[]{d0:P} = sum(%1)", "%2: f32[8,4]{d0:S(0)} = detach(%1)\n%4: f32[]{d0:P} = sum(%2)")
    renumbered = detached.replace("%3: f32[] = conjoin::reduce(%2", "%5: f32[] = conjoin::reduce(%4")
    text = renumbered.replace("%4", "%3").replace("%5", "%4").replace("returns [%3]", "returns [%4]")
    assert explain(plan_of(text)).bytes_of(0) == 4


def test_a_model_without_a_loss_is_trained_through_all_its_outputs() -> None:
    assert explain(plan_of(SUM.replace(" loss 0", ""))).bytes_of(0) == 20


def test_parameters_are_told_together_and_gathered_again() -> None:
    case = cases("mlp", 8)
    kept, dropped = case.plan("local:4", "zero1"), case.plan("local:4", "fsdp")
    assert kept is not None and dropped is not None
    less, more = explain(kept), explain(dropped)
    assert more.sent("all-gather").largest > less.sent("all-gather").largest
    assert more.sent("reduce-scatter") == less.sent("reduce-scatter")
    assert less.num_regathered == 0 and more.num_regathered > 0
    text = explanation_text(more)
    count = more.num_regathered
    assert f"~ forward all-gather of {count} parameters over d0 d1" in text
    assert f"~ backward all-gather of {count} parameters again over d0 d1" in text
    assert f"~ backward reduce-scatter of {count} gradients over d0 d1" in text


def test_parameters_that_are_cast_before_they_are_gathered_count_as_gathered_again() -> None:
    lines = [
        'graph "net" train', "param:w f32[4]{d0:S(0)} trainable", "input:x bf16[8,4]{d0:S(0)}",
        "takes [input:x] in null",
        "%0: bf16[4]{d0:S(0)} = _to_copy(param:w, dtype=bf16, non_blocking=none)",
        '%1: bf16[4] = conjoin::combine(%0, dim=0, axes=["d0"])',
        '%2: bf16[4]{d0:B} = conjoin::replicate(%1, axes=["d0"])',
        "%3: bf16[8,4]{d0:S(0)} = mul.Tensor(input:x, %2)", "%4: bf16[8,4]{d0:S(0)} = mul.Tensor(%3, %2)",
        "%5: bf16[]{d0:P} = sum(%4)", '%6: bf16[] = conjoin::reduce(%5, axes=["d0"])', "returns [%6] in null loss 0",
    ]  # fmt: skip
    plan = replace(plan_of("\n".join(lines)), memory=(MemoryAction("regather", "w"),))
    assert "regather     1 parameter" in explanation_summary(explain(plan))


def test_a_memory_action_that_cannot_be_done_is_told() -> None:
    plan = replace(plan_of(SUM), memory=(MemoryAction("regather", "w"),))
    assert "regather     1 parameter asked for, 0 gathered again" in explanation_summary(explain(plan))


def test_halos_and_the_agreement_on_random_draws_are_told() -> None:
    spatial = cases("lenet", 7).plan("local:4", "spatial")
    assert spatial is not None
    assert "~ forward exchange of input:x_NCHW" in explanation_text(explain(spatial))
    split = cases("gpt-125m", 7).plan("local:4", "megatron")
    assert split is not None
    drawn = any("dropout" in node.op for node in split.graph.nodes)
    assert drawn == ("~ forward all-reduce of agreement of random draws over d0 d1" in explanation_text(explain(split)))


def test_the_data_says_what_the_text_says() -> None:
    found = explain(plan_of(SUM))
    data = json.loads(json.dumps(found.to_json()))
    assert data["bytes_sent"] == {"largest": 20, "total": 40, "by_rank": [20, 20]}
    assert data["mesh"] == {"d0": 2} and data["num_devices"] == 2 and data["stored_bytes"] == 16
    product = data["operators"][0]
    assert (product["op"], product["splits"], product["module"], product["line"]) == (
        "mul.Tensor", {"d0": ["d0"]}, "scale", 7,
    )  # fmt: skip
    assert product["before"][0]["tensors"] == ["param:w"] and product["before"][0]["becomes"] == "d0:B"
    assert data["results"][0]["collectives"] == [
        {
            "kind": "all-reduce",
            "axes": ["d0"],
            "direction": "forward",
            "of_gradient": False,
            "bytes_sent": {"largest": 4, "total": 8},
        }
    ]
    assert {**data, **found.summary_to_json()} == data


def deep_case(num_layers: int) -> Case:
    layers = "\n".join(
        f"%{i}: f32[512,64] = {'relu(' if i % 2 else 'linear('}{f'%{i - 1}' if i else 'input:x'}"
        f"{')' if i % 2 else f', param:w{i})'}"
        for i in range(num_layers)
    )
    weights = "\n".join(f"param:w{i} f32[64,64] trainable" for i in range(0, num_layers, 2))
    text = (
        f'graph "deep" train\n{weights}\ninput:x f32[512,64]\ntakes [input:x] in null\n{layers}\n'
        f"%{num_layers}: f32[] = sum(%{num_layers - 1})\nreturns [%{num_layers}] in null loss 0\n"
    )
    return Case(cases("mlp", 8).workload, parse_graph(text))


def test_a_long_graph_on_many_devices_takes_seconds() -> None:
    plan = deep_case(800).plan("dgx-h100:8", "fsdp")
    assert plan is not None
    start = time.process_time()
    found = explain(plan)
    assert found.mesh.size == 64 and len(explanation_text(found).splitlines()) > 800
    assert time.process_time() - start < 10
