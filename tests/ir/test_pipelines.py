"""Pipelines as files: what is written is read again, and what is edited wrongly is told in three sentences."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conjoin.errors import ConjoinError
from conjoin.frontends import capture
from conjoin.ir import Pipeline, load_plan, pipeline_fingerprint, pipeline_to_json
from conjoin.machine import Machine
from conjoin.report import explain_pipeline, pipeline_summary
from conjoin.search import make_pipeline
from tests.ir.wording import assert_three_sentences


@cache
def pipeline() -> Pipeline:
    """Four layers, of which the last stage borrows one weight of the first."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    layers[3][0].weight = layers[0][0].weight
    batch = torch.randn(8, 4), torch.randn(8, 4)
    graph = capture(nn.Sequential(*layers), batch, nn.functional.mse_loss)
    return make_pipeline(graph, Machine("four", 1, 4, "cpu"), "pipeline:pp=2,micro=4")


def saved(folder: Path, change: Callable[[dict[str, Any]], object] = lambda data: None) -> Path:
    data = copy.deepcopy(pipeline_to_json(pipeline()))
    change(data)
    path = folder / "pipeline.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    pipeline().save(tmp_path / "pipeline.json")
    read = load_plan(tmp_path / "pipeline.json")
    assert isinstance(read, Pipeline) and read == pipeline()
    assert pipeline_fingerprint(read) == pipeline_fingerprint(pipeline())
    assert read.stages[1].borrowed == ("0.0.weight",) and read.owner_of("0.0.weight") == 0


def test_chunks_may_be_edited_and_an_old_file_says_nothing_of_them(tmp_path: Path) -> None:
    plain = load_plan(saved(tmp_path))
    edited = load_plan(saved(tmp_path, lambda data: data["stages"][1]["takes"][0].update(chunks=[8, 3])))
    assert isinstance(plain, Pipeline) and isinstance(edited, Pipeline)
    assert [transfer.chunks for transfer in plain.transfers()] == [None]
    assert [transfer.chunks for transfer in edited.transfers()] == [(8, 3)]
    assert pipeline_fingerprint(plain) != pipeline_fingerprint(edited)
    assert [line for line in pipeline_summary(explain_pipeline(edited)) if line.endswith("in 8 chunks and 3 back")]


def _swap_rows(data: dict[str, Any]) -> None:
    rows = data["schedule"]["rows"][1].split()
    rows[0], rows[1] = rows[1], rows[0]
    data["schedule"]["rows"][1] = " ".join(rows)


def _edit_operator(data: dict[str, Any]) -> None:
    lines = data["stages"][0]["graph"]
    place = next(i for i, line in enumerate(lines) if " tanh(" in line)
    lines[place] = lines[place].replace(" tanh(", " relu(")


def _edit_graph(data: dict[str, Any]) -> None:
    place = next(i for i, line in enumerate(data["graph"]) if " tanh(" in line)
    data["graph"][place] = data["graph"][place].replace(" tanh(", " relu(")


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "rank of no device": (lambda d: d["stages"][1].update(ranks=[2, 9]), "rank 9 of stage 1 is none of 4"),
    "rank twice": (lambda d: d["stages"][1].update(ranks=[1, 2]), "rank 1 is one of"),
    "too few ranks": (lambda d: d["stages"][0].update(ranks=[0]), "for a mesh of 2 devices"),
    "what another does not give": (lambda d: d["stages"][1]["takes"][0].update(output=7), "which does not give it"),
    "no chunks": (
        lambda d: d["stages"][1]["takes"][0].update(chunks=[0, 1]),
        "in (0, 1) chunks, which are 1 to 65,536",
    ),
    "too many chunks": (lambda d: d["stages"][1]["takes"][0].update(chunks=[1, 1 << 17]), "which are 1 to 65,536"),
    "chunks in words": (lambda d: d["stages"][1]["takes"][0].update(chunks=["8", 1]), "8 is not a number of chunks"),
    "chunks one way": (lambda d: d["stages"][1]["takes"][0].update(chunks=[8]), "in how many chunks"),
    "nothing taken": (lambda d: d["stages"][1].update(takes=[]), "neither the batch nor another stage gives"),
    "nothing borrowed": (lambda d: d["stages"][1].update(borrows=[]), "belongs to stage 0 and to stage 1"),
    "borrowed of nobody": (lambda d: d["stages"][1].update(borrows=["1.0.weight"]), "does not read"),
    "backward first": (_swap_rows, "B1.0"),
    "row missing": (lambda d: d["schedule"]["rows"].__setitem__(0, "F0.0 B0.0"), "nothing for stage 0"),
    "no row at all": (lambda d: d["schedule"].update(rows=["F0.0 X", ""]), "'X'"),
    "another operator": (_edit_operator, "does not compute what it did"),
    "micro-batches": (lambda d: d["accumulate"].update(steps=2), "micro-batches"),
    "unknown key": (lambda d: d["stages"][0].update(speed=1), "'speed' is unknown"),
    "another operator in the graph of all": (_edit_graph, "do not compute together"),
    "owner without a row": (lambda d: d["schedule"].update(owners=[0, 2]), "2 rows of tasks"),
    "one row only": (lambda d: d["schedule"]["rows"].pop(), "1 rows of tasks"),
    "rank without a stage": (lambda d: d["mesh"][0].update(size=4), "rank 4 of 8 has no stage"),
    "no schedule": (lambda d: d.update(schedule=None), "is no schedule"),
}


@pytest.mark.parametrize(("change", "told"), EDITS.values(), ids=EDITS)
def test_a_wrong_edit_is_told(tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str) -> None:
    with pytest.raises(ConjoinError) as caught:
        load_plan(saved(tmp_path, change))
    assert told in str(caught.value), str(caught.value)
    assert_three_sentences(caught.value)


class Skipping(nn.Module):
    """What the first layer makes is read by the second and by the last, in two tensors of one type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.tanh(self.first(x))
        made: Tensor = self.last(torch.relu(self.third(torch.tanh(self.second(kept))))) * kept
        return made


def test_what_goes_from_stage_to_stage_is_not_exchanged(tmp_path: Path) -> None:
    batch = torch.randn(8, 4), torch.randn(8, 4)
    graph = capture(Skipping(), batch, nn.functional.mse_loss)
    made = make_pipeline(graph, Machine("four", 1, 2, "cpu"), "pipeline:pp=2,micro=4")
    data, path = pipeline_to_json(made), tmp_path / "plan.json"
    taken = data["stages"][1]["takes"]
    assert len(taken) == 2
    taken[0]["output"], taken[1]["output"] = taken[1]["output"], taken[0]["output"]
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ConjoinError, match="do not compute together"):
        load_plan(path)
    path.write_text(json.dumps({**data, "computes": None}), encoding="utf-8")
    assert isinstance(load_plan(path), Pipeline), "who means it says so"
