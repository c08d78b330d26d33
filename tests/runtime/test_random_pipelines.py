"""Any legal pipeline of any of these models trains like the plain model in a loop over the same micro-batches.

Cuts, sizes of stages, what is done inside them, and the order of rows are drawn; a checker that has not seen how they
were made says that they are legal, and the model itself is the judge of what they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conjoin.errors import StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, LeafKind, Pipeline, check_pipeline
from conjoin.machine import Machine
from conjoin.schedules import Kind, Row, Schedule
from conjoin.search import make_pipeline, named_pipelines
from tests.runtime.test_pipelines import CASES, Batch, Block, compare, over_words, words


class Experts(nn.Module):
    """Blocks of experts of which every word has two."""

    def __init__(self, words: int = 20, width: int = 6, experts: int = 3) -> None:
        super().__init__()
        self.table, self.gates = nn.Embedding(words, width), nn.ModuleList(nn.Linear(width, experts) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(width, width) for _ in range(experts)) for _ in range(2))
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for gate, experts in zip(self.gates, self.experts, strict=True):
            scores = gate(x).softmax(-1)
            kept = scores * (scores >= scores.topk(2, -1).values[..., 1:])
            x = x + sum(kept[..., i : i + 1] * torch.tanh(expert(x)) for i, expert in enumerate(experts))
        out: Tensor = self.head(x)
        return out


class Attending(nn.Module):
    """Words that look at each other, those before alone or all: as GPT and BERT do."""

    def __init__(self, causal: bool, words: int = 20, width: int = 8) -> None:
        super().__init__()
        self.causal, self.table, self.places = causal, nn.Embedding(words, width), nn.Embedding(8, width)
        self.mixes, self.blocks = (nn.ModuleList(make() for _ in range(2)) for make in (self._mix, lambda: Block(8)))
        self.head = nn.Linear(width, words)

    @staticmethod
    def _mix() -> nn.Module:
        return nn.Linear(8, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places(torch.arange(ids.shape[1]))
        for mix, block in zip(self.mixes, self.blocks, strict=True):
            q, k, v = mix(x).chunk(3, -1)
            x = block(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal))
        out: Tensor = self.head(x)
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], Callable[..., Tensor]]] = {
    **CASES,
    "experts": (Experts, words((8, 4), (8, 4)), over_words),
    "gpt": (lambda: Attending(True), words((8, 5), (8, 5)), over_words),
    "bert": (lambda: Attending(False), words((8, 5), (8, 5)), over_words),
}
SCHEDULES = (*named_pipelines.SCHEDULES, "drawn")


def drawn_rows(schedule: Schedule, in_order: bool, rng: Random) -> Schedule:
    """The same rows in any order that can be run: whatever is ready is taken by chance."""
    stages, micro = schedule.num_stages, schedule.num_micro_batches
    split, done = rng.random() < 0.5, set[Row]()
    back = Kind.INPUT_GRADIENT if split else Kind.BACKWARD
    waiting = {Row(kind, s, m) for kind in (Kind.FORWARD, back) for s in range(stages) for m in range(micro)}
    if split:
        waiting |= {Row(Kind.WEIGHT_GRADIENT, s, m) for s in range(stages) for m in range(micro)}

    def needs(row: Row) -> list[Row]:
        s, m = row.stage, row.micro_batch
        if row.kind is Kind.FORWARD:
            before = [Row(Kind.FORWARD, s, m - 1)] if in_order and m else []
            return before + [Row(Kind.FORWARD, a, m) for a, b in schedule.edges if b == s]
        if row.kind is back:
            return [Row(Kind.FORWARD, s, m), *(Row(back, b, m) for a, b in schedule.edges if a == s)]
        return [Row(back, s, m)]

    rows: list[list[Row]] = [[] for _ in range(schedule.num_owners)]
    while waiting:
        ready = sorted((row for row in waiting if done.issuperset(needs(row))), key=str)
        row = rng.choice(ready)
        waiting.remove(row)
        done.add(row)
        rows[schedule.owners[row.stage]].append(row)
    return replace(schedule, rows=tuple(map(tuple, rows)), name="drawn")


def drawn_pipeline(graph: Graph, schedule: str, rng: Random, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    """Stages of one or two ranks, cut where it comes, in the schedule of that name or in any order."""
    whole = named_pipelines.cut_rows

    def cut(micro: Graph, seconds: Any, sizes: Any, rate: float) -> list[int]:
        return whole(micro, _weights(len(micro.nodes), rng), sizes, rate)

    sizes = [rng.choice((1, 1, 2)) for _ in range(rng.choice((2, 2, 3)))]
    inside, micro = rng.choice(("", "zero1,", "fsdp,")), rng.choice((2, 4))
    name = "1f1b" if schedule == "drawn" else schedule
    with monkeypatch.context() as patch:
        patch.setattr(named_pipelines, "cut_rows", cut)
        machine = Machine("here", 1, sum(sizes), "cpu")
        strategy = f"pipeline:pp={len(sizes)},{inside}micro={micro},schedule={name}"
        made = make_pipeline(graph, machine, strategy, sizes=sizes)
    if schedule == "drawn":
        changes = any(stage.plan.graph.updates for stage in made.stages)
        made = replace(made, schedule=drawn_rows(made.schedule, changes, rng))
    return check_pipeline(made)


def _weights(count: int, rng: Random) -> Any:
    """What operators are taken to weigh: where the balance of these is, stages are cut."""
    return torch.tensor([rng.random() ** 4 for _ in range(count)], dtype=torch.float64).numpy()


_graphs: dict[str, tuple[nn.Module, Graph]] = {}


def captured(name: str) -> tuple[nn.Module, Graph]:
    if name not in _graphs:
        torch.manual_seed(4)
        make, batch, loss = MODELS[name]
        model = make().double().train()
        _graphs[name] = model, capture(model, batch(), loss)
    return _graphs[name]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(model=st.sampled_from(sorted(MODELS)), schedule=st.sampled_from(SCHEDULES), seed=st.integers(0, 2**16))
def test_any_pipeline_trains_like_the_plain_model(model: str, schedule: str, seed: int) -> None:
    found, graph = captured(model)
    _, make, loss = MODELS[model]
    with pytest.MonkeyPatch.context() as patch:
        try:
            pipeline = drawn_pipeline(graph, schedule, Random(seed), patch)
        except StrategyError as error:
            assert "leave every stage a parameter" in str(error) or "at most pp=" in str(error), error
            return
    held = compare(pipeline, found, loss, [make() for _ in range(2)])
    stored = {leaf.name for leaf in graph.leaves_of(LeafKind.PARAMETER)}
    assert {name for names in held for name in names} == stored
