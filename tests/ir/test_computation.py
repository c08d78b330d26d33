"""Edits of a plan file: what changes layouts is read, what changes the computation is refused unless it is meant."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.errors import PlanError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan, computation_digest, load_plan, parse_graph, plan_to_text
from conjoin.machine import parse_machine
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 4), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.norm(self.up(x)))
        return self.down(nn.functional.dropout(y * 2 - y.tanh(), 0.1))


BATCH = torch.ones(8, 8), torch.ones(8, 4)


@cache
def captured() -> Graph:
    return capture(Model().train(), BATCH, nn.functional.mse_loss)


@cache
def made(strategy: str = "data-parallel") -> Plan:
    return make_plan(captured(), parse_machine("local:2"), strategy)


EDITS = [
    ("= gelu(", "= relu("), ("= tanh(", "= sigmoid("), ("cudnn_enable=false", "eps=0.001, cudnn_enable=false"),
    ("p=0.1", "p=0.2"), ("= sub.Tensor(", "= add.Tensor("), ("(%6, 2)", "(%6, 3)"), ("mse_loss(", "l1_loss("),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), EDITS)
def test_another_computation_is_refused(old: str, new: str, tmp_path: Path) -> None:
    path, text = tmp_path / "plan.json", plan_to_text(made())
    assert text.count(old) == 1, text
    path.write_text(text.replace(old, new))
    for take in (lambda: load_plan(path), lambda: conjoin.load(path, Model())):
        with pytest.raises(PlanError, match="does not compute what it did") as told:
            take()
        assert_three_sentences(told.value)
    path.write_text(path.read_text().replace(f'"computes": "{made().computes}"', '"computes": null'))
    assert new in str(load_plan(path).graph), "it is meant"


def test_other_operands_are_another_computation(tmp_path: Path) -> None:
    plan = made()
    line = next(line for line in str(plan.graph).splitlines() if "= sub.Tensor(" in line)
    first, second = line.split("sub.Tensor(")[1].split(")")[0].split(", ")[:2]
    path = tmp_path / "plan.json"
    path.write_text(plan_to_text(plan).replace(f"sub.Tensor({first}, {second}", f"sub.Tensor({second}, {first}"))
    with pytest.raises(PlanError, match="does not compute what it did"):
        load_plan(path)


def test_an_edited_plan_that_was_never_in_a_file_is_refused_too() -> None:
    graph = parse_graph(str(made().graph).replace("= gelu(", "= relu("))
    with pytest.raises(PlanError, match="does not compute what it did"):
        conjoin.load(replace(made(), graph=graph), Model())


def test_a_plan_without_its_digest_is_refused(tmp_path: Path) -> None:
    data = json.loads(plan_to_text(made()))
    del data["computes"]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="'computes' is missing"):
        load_plan(path)


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "reduction", "single"])
def test_layouts_have_no_part_in_it(strategy: str) -> None:
    plan = make_plan(captured(), parse_machine("local:1" if strategy == "single" else "local:4"), strategy)
    assert plan.computes == computation_digest(plan.graph)
    if not plan.substitutions:
        assert plan.computes == computation_digest(captured())


def test_neither_have_numbers_and_the_order_of_lines(tmp_path: Path) -> None:
    """The second weight brought before anything else, under another number."""
    lines = str(made().graph).splitlines()
    brought = next(i for i, line in enumerate(lines) if "replicate(param:down.weight" in line)
    number = lines[brought].split(":")[0]
    first = next(i for i, line in enumerate(lines) if line.startswith("%"))
    lines.insert(first, lines.pop(brought))
    text = "\n".join(lines).replace(f"{number}:", "%90:").replace(f"{number},", "%90,") + "\n"
    moved = parse_graph(text)
    assert str(moved) != str(made().graph) and computation_digest(moved) == made().computes
