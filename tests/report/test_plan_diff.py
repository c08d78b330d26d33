"""What differs between two plans."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from conjoin.frontends import capture
from conjoin.ir import Graph, MemoryAction, Pipeline, Plan
from conjoin.machine import Machine
from conjoin.report import PlanDiff, diff_plans
from conjoin.search import make_pipeline, make_plan
from tests.report.plans import SUM, make_case, plan_of

STORED_SPLIT = (
    SUM.replace("param:w f32[4] trainable", "param:w f32[4]{d0:S(0)} trainable")
    .replace('%0: f32[4]{d0:B} = conjoin::replicate(param:w, axes=["d0"])',
             '%0: f32[4] = conjoin::combine(param:w, dim=0, axes=["d0"])\n'
             '%1: f32[4]{d0:B} = conjoin::replicate(%0, axes=["d0"])')
    .replace('%1: f32[8,4]{d0:S(0)} = mul.Tensor(input:x, %0)', '%2: f32[8,4]{d0:S(0)} = mul.Tensor(input:x, %1)')
    .replace("%2: f32[]{d0:P} = sum(%1)", "%3: f32[]{d0:P} = sum(%2)")
    .replace("%3: f32[] = conjoin::reduce(%2", "%4: f32[] = conjoin::reduce(%3")
    .replace("returns [%3]", "returns [%4]")
)  # fmt: skip


def test_equal_plans_say_so() -> None:
    found = diff_plans(plan_of(SUM), replace(plan_of(SUM), predictions=(("seconds_per_step", 1.0),)))
    assert found.equal and str(found) == "The plans are the same.\n"
    assert found.to_json()["equal"] is True and found.to_json()["storage"] == []


def test_another_way_to_store_a_parameter() -> None:
    after = replace(plan_of(STORED_SPLIT, strategy="zero1"), memory=(MemoryAction("regather", "w"),))
    found = diff_plans(plan_of(SUM), after)
    assert not found.equal
    assert (
        str(found)
        == """\
making
    strategy: by hand -> zero1
memory
  + regather w
storage
    param:w: f32[4] -> f32[4]{d0:S(0)}
transfers
  - backward all-reduce of the gradient of param:w f32[4] <- d0:B over d0
  + forward all-gather of param:w f32[4]{d0:S(0)} -> d0:B over d0
  + backward reduce-scatter of the gradient of param:w f32[4]{d0:S(0)} <- d0:B over d0
traffic
    parameters stored: 16 B (16 B) per rank -> 8 B (8 B) per rank
    all-reduce: 20 B (20 B) per rank -> 4 B (4 B) per rank
  + all-gather: 8 B (8 B) per rank
  + reduce-scatter: 8 B (8 B) per rank
"""
    )
    data = json.loads(json.dumps(found.to_json()))
    assert data["storage"] == [{"what": "param:w", "before": "f32[4]", "after": "f32[4]{d0:S(0)}"}]


@pytest.mark.parametrize(
    ("change", "group", "told"),
    [
        (lambda plan: replace(plan, model=replace(plan.model, fingerprint="3" * 64)), "making", "model"),
        (lambda plan: replace(plan, machine=replace(plan.machine, name="three")), "making", "machine"),
        (lambda plan: plan_of(SUM.replace("d0:S(0)", "d0:S(1)").replace("f32[4]{d0:B}", "f32[4]{d0:S(0)}").replace(
            'conjoin::replicate(param:w, axes', 'conjoin::partition(param:w, dim=0, axes')), "operators", "mul.Tensor"),
        (lambda _: plan_of(SUM.replace("mul.Tensor", "add.Tensor")), "operators", "add.Tensor"),
        (lambda _: plan_of(SUM, num_ranks=4), "making", "mesh"),
        (lambda _: plan_of(SUM.replace('net.py":7', 'net.py":70')), "operators", "net.py:70"),
        (lambda _: plan_of(SUM.replace(" loss 0", "")), "other", "returns [%3] in null"),
    ],
    ids=["model", "machine", "split", "operator", "mesh", "line", "nothing else"],
)  # fmt: skip
def test_every_kind_of_difference_is_found(change: object, group: str, told: str) -> None:
    before = plan_of(SUM)
    assert callable(change)
    after = change(before)
    found = diff_plans(before, after)
    assert not found.equal and any(told in str(line) for line in getattr(found, group)), str(found)
    assert diff_plans(after, after).equal


@cache
def plan(strategy: str) -> Plan:
    found = make_case("lenet", 8).plan("local:4", strategy)
    assert found is not None
    return found


def test_graphs_that_were_rewritten_differently_are_lined_up() -> None:
    found = diff_plans(plan("data-parallel"), plan("megatron"))
    lines = [str(change) for change in found.operators]
    assert any(line.startswith("  linear classifier.0") and "split summed k over d0 d1" in line for line in lines)
    assert any(line.startswith("- ne.Scalar") for line in lines)
    assert not any(line.startswith(("- linear", "+ linear", "- conv2d", "+ conv2d")) for line in lines)
    assert found.traffic[-1].what == "sent in all"


def test_a_long_list_is_cut_short_in_the_text_only() -> None:
    bare, full = plan("data-parallel"), plan("fsdp")
    many = replace(full, memory=full.memory * 8)
    found = diff_plans(bare, many)
    assert len(found.to_json()["memory"]) == len(found.memory)
    assert diff_plans(many, many).equal


def test_what_layers_have_in_common_is_told_once_in_the_text() -> None:
    lines = [
        'graph "net" train', *(f"param:blocks.{i}.weight f32[4] trainable" for i in range(3)),
        "input:x f32[4]", "takes [input:x] in null",
        *(f'%{i}: f32[4] = mul.Tensor({f"%{i - 1}" if i else "input:x"}, param:blocks.{i}.weight)' for i in range(3)),
        "%3: f32[] = sum(%2)", "returns [%3] in null loss 0",
    ]  # fmt: skip
    bare = plan_of("\n".join(lines))
    actions = tuple(MemoryAction("regather", f"blocks.{i}.weight") for i in range(3))
    found = diff_plans(bare, replace(bare, memory=actions))
    assert str(found) == "memory\n  + 3 × regather blocks.*.weight\n" and len(found.memory) == 3


@cache
def stages(strategy: str) -> Pipeline:
    return make_pipeline(layers(), Machine("three", 1, 3, "cpu"), strategy)


@cache
def layers() -> Graph:
    """Four layers, of which the last has the weight of the first."""
    found = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    found[3].weight = found[0].weight
    return capture(found, (torch.randn(12, 4), torch.randn(12, 4)), nn.functional.mse_loss)


def told(found: PlanDiff, group: str) -> list[str]:
    return [str(change) for change in getattr(found, group)]


def test_pipelines_are_compared_stage_by_stage() -> None:
    two, three = (stages(f"pipeline:pp={pp},micro=2") for pp in (2, 3))
    assert diff_plans(three, replace(three, predictions=(("seconds_per_step", 1.0),))).equal
    found = diff_plans(two, three)
    assert "+ stage 2: single on rank 2 of owner 2, borrows 0.weight" in told(found, "stages")
    assert "+ 1 > 2: f32[6,4] (96 B), and its gradient back" in told(found, "transfers")
    assert any(line.startswith("  linear: ") and line.endswith(" in stage 2") for line in told(found, "operators"))
    assert not any(line[0] in "+-" for line in told(found, "operators"))
    moved = next(line for line in told(found, "storage") if line.startswith("  param:2.weight: "))
    assert moved.endswith(" in stage 2")


def test_another_order_of_rows_is_told_from_where_it_begins() -> None:
    pipeline = stages("pipeline:pp=3,micro=4")
    rows = list(pipeline.schedule.rows[2])
    rows[2:6] = [*rows[4:6], *rows[2:4]]
    schedule = replace(pipeline.schedule, rows=(*pipeline.schedule.rows[:2], tuple(rows)))
    assert told(diff_plans(pipeline, replace(pipeline, schedule=schedule)), "stages") == [
        "  owner 2 from row 2 on: F2.1 B2.1 F2.2 B2.2 F2.3 B2.3 -> F2.2 B2.2 F2.1 B2.1 F2.3 B2.3"
    ]


def test_a_pipeline_beside_a_plan_of_one_stage() -> None:
    alone = make_plan(layers(), Machine("three", 1, 3, "cpu"), "data-parallel:micro=4")
    found = diff_plans(alone, stages("pipeline:pp=3,micro=4"))
    assert told(found, "stages")[0] == "+ schedule: 1f1b"
    assert not any("input:stage" in line for line in told(found, "storage"))
    assert any(line.startswith("- forward all-reduce") for line in told(found, "transfers"))
