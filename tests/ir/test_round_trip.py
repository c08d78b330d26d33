"""What is written is read back as the same graph: models of the zoo, and random graphs, in text and in JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings

import conjoin
import zoo
from conjoin.ir import Graph, fingerprint, parse_graph, verify
from conjoin.ir.graph_file import graph_from_json, graph_to_json
from tests.ir.graphs import GOLDEN, random_graphs

MODELS = (
    "mlp", "lenet", "alexnet", "resnet-50", "vit-b-16", "rnntc", "rnnlm-fused", "bert-base", "gpt-125m", "llama-7b",
    "dlrm", "xdl", "candle-uno",
)  # fmt: skip


def check(graph: Graph) -> None:
    text = str(graph)
    from_text = parse_graph(text)
    assert from_text == graph and str(from_text) == text and from_text.sources == graph.sources
    again = graph_from_json(json.loads(json.dumps(graph_to_json(graph), allow_nan=False)))
    assert again == graph and again.sources == graph.sources
    assert fingerprint(again) == fingerprint(from_text) == fingerprint(graph)


@pytest.mark.parametrize("name", MODELS)
def test_models_round_trip(name: str) -> None:
    model, batch, loss = zoo.build(f"{name}:tiny")
    for training in (True, False):
        graph = conjoin.capture(model.train(training), batch, loss)
        assert graph.training is training and any(graph.sources)
        check(graph)
        assert verify(parse_graph(str(graph))) == graph


@given(random_graphs())
@example(parse_graph(GOLDEN))
@settings(settings.get_profile("ir"), max_examples=150)
def test_random_graphs_round_trip(graph: Graph) -> None:
    check(graph)


def test_half_a_character_in_a_name_round_trips() -> None:
    text = 'graph "\\ud800" eval\ninput:"\\udc00" f32[]\ntakes [input:"\\udc00"] in null\nreturns [] in null'
    check(parse_graph(text))
