"""What a graph rounds: written into its first line, part of what it computes, kept by every rewrite but widening."""

from __future__ import annotations

from dataclasses import replace
from pickle import dumps, loads

import pytest
import torch
from torch import nn

import conjoin
from conjoin.errors import GraphError, PlanError
from conjoin.ir import (
    EXACT,
    Graph,
    Rounding,
    computation_digest,
    cut_in_micro_batches,
    fingerprint,
    parse_graph,
    plan_from_json,
    plan_to_json,
    sequential,
    widen,
)
from conjoin.ir.plan import check_plan
from conjoin.machine import parse_machine
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences

TEXT = """graph "g" train{}
param:w f32[16,16] trainable
input:x f32[8,16]
takes [input:x] in {{"kind":"tuple","keys":[],"children":[null]}}
%0: f32[8,16] = linear(input:x, param:w)
%1: f32[] = mean(%0)
returns [%1] in null loss 0
"""
BOTH = Rounding(tf32=True, sums=torch.bfloat16)


def graph(rounding: Rounding = BOTH) -> Graph:
    return parse_graph(TEXT.format(rounding))


@pytest.mark.parametrize("rounding", [EXACT, Rounding(True), Rounding(sums=torch.bfloat16), BOTH])
def test_it_is_written_and_read(rounding: Rounding) -> None:
    made = graph(rounding)
    assert made.rounding == rounding and parse_graph(str(made)) == made and loads(dumps(made)) == made
    assert str(made).splitlines()[0] == f'graph "g" train{rounding}'


def test_graphs_that_round_otherwise_are_others() -> None:
    one, other = graph(), graph(EXACT)
    assert one != other and hash(one) != hash(other)
    assert fingerprint(one) != fingerprint(other) and computation_digest(one) != computation_digest(other)


@pytest.mark.parametrize("words", [" tf32", " products=fp8", " sums=f32", " sums=bf16 products=tf32", " sums=x"])
def test_what_is_written_wrongly_is_refused(words: str) -> None:
    with pytest.raises(GraphError) as told:
        parse_graph(TEXT.format(words))
    assert_three_sentences(told.value)


def test_plans_keep_it_and_double_precision_does_not() -> None:
    plan = make_plan(graph(), parse_machine("local:2"), "fsdp")
    assert plan.graph.rounding == BOTH == sequential(plan.graph).rounding and widen(plan.graph).rounding == EXACT
    edited = {**plan_to_json(plan), "graph": str(replace(plan.graph, rounding=EXACT)).splitlines()}
    with pytest.raises(PlanError, match="does not compute what it did"):
        check_plan(plan_from_json(edited))


def test_micro_batches_keep_it() -> None:
    model, batch = nn.Linear(4, 4).train(), (torch.zeros(8, 4), torch.zeros(8, 4))
    whole = replace(conjoin.capture(model, batch, nn.functional.mse_loss), rounding=BOTH)
    assert cut_in_micro_batches(whole, 2)[0].rounding == BOTH
