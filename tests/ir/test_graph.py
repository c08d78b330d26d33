"""Graphs: equality, who reads a value, where a node comes from, and programs of any depth."""

from __future__ import annotations

import gc
import math
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from conjoin.ir import (
    LEAF,
    Graph,
    LeafKind,
    Source,
    Structure,
    Value,
    fingerprint,
    parse_graph,
    verify,
)
from tests.ir.graphs import GOLDEN, chain


@pytest.fixture
def graph() -> Graph:
    return parse_graph(GOLDEN)


def test_equal_texts_are_equal_graphs(graph: Graph) -> None:
    again = parse_graph(GOLDEN)
    assert again == graph and hash(again) == hash(graph) and again is not graph
    assert all(mine is other for mine, other in zip(graph.nodes, again.nodes, strict=True))
    assert graph != GOLDEN


def test_equality_is_blind_to_sources_and_labels_only(graph: Graph) -> None:
    assert replace(graph, sources=(), labels=()) == graph
    assert replace(graph, name="other") != graph
    assert replace(graph, training=False) != graph
    assert replace(graph, loss=None) != graph
    assert replace(graph, output_structure=LEAF) != graph


def test_plain_results_are_told_apart_by_type(graph: Graph) -> None:
    results = (1, 1.0, True, 0.0, -0.0, None, "1", math.nan)
    assert len({replace(graph, outputs=(result,)) for result in results}) == len(results)
    assert replace(graph, inputs=(math.nan,)) == replace(graph, inputs=(float("nan"),))
    one, true = (replace(graph, input_structure=Structure("dict", (key,), (LEAF,))) for key in (1, True))
    assert one != true


@pytest.mark.parametrize("text", [GOLDEN, str(chain(5000))], ids=["golden", "deep"])
def test_a_pickled_graph_is_made_of_the_same_nodes(text: str) -> None:
    graph = parse_graph(text)
    assert graph.numbers and graph.users and hash(graph)
    again = pickle.loads(pickle.dumps(graph))
    assert again == graph and str(again) == str(graph)
    assert again.sources == graph.sources and again.labels == graph.labels
    assert all(mine is other for mine, other in zip(graph.nodes, again.nodes, strict=True))
    assert all(mine is other for mine, other in zip(graph.leaves, again.leaves, strict=True))


def test_a_graph_is_immutable(graph: Graph) -> None:
    with pytest.raises(FrozenInstanceError):
        graph.name = "changed"  # type: ignore[misc]


def test_users_are_the_nodes_that_read_a_value(graph: Graph) -> None:
    linear, first, second, total, mean, split, join, scaled, loss = graph.nodes
    readers = {value: users for value, users in graph.users.items() if value.owner in (linear, total, split)}
    cut, rest = split.outputs()
    assert readers == {
        Value(linear): (first, second),
        Value(total): (mean, split),
        cut: (join,),
        rest: (join,),
    }
    assert Value(loss) not in graph.users
    assert graph.users[Value(graph.leaves_of(LeafKind.CONSTANT)[0])] == (scaled,)


def test_a_node_that_reads_a_value_twice_is_one_user() -> None:
    text = 'graph "g" eval\ninput:x f32[2]\ntakes [input:x] in null\n%0: f32[2] = mul.Tensor(input:x, input:x)\n'
    graph = parse_graph(f"{text}returns [%0] in null")
    assert graph.users == {Value(graph.leaves[0]): (graph.nodes[0],)}


def test_sources_are_found_by_node(graph: Graph) -> None:
    assert graph.source_of(graph.nodes[0]) == Source("mlp.py", 12, "fc")
    assert graph.source_of(graph.nodes[1]) is None
    assert replace(graph, sources=()).source_of(graph.nodes[0]) is None


def test_leaves_by_kind(graph: Graph) -> None:
    names = {kind: [leaf.name for leaf in graph.leaves_of(kind)] for kind in LeafKind}
    assert list(names.values()) == [["x", "target"], ["fc.weight", "fc.bias"], ["running mean"], ["one"]]
    assert graph.leaves_of(LeafKind.PARAMETER)[0].aliases == ("head.weight",)


def test_values_are_numbered_across_nodes_of_several_outputs(graph: Graph) -> None:
    assert sorted(graph.numbers.values()) == list(range(10))
    assert [graph.numbers[value] for value in graph.nodes[5].outputs()] == [5, 6]


def test_a_graph_is_shown_in_one_line(graph: Graph) -> None:
    assert repr(graph) == "<Graph 'mlp' train, 9 nodes>"


def test_a_chain_of_ten_thousand_nodes_needs_no_stack() -> None:
    graph = chain(10_000)
    assert len(graph.nodes) == 10_000
    assert parse_graph(str(graph)) == graph
    assert len(graph.users) == 10_000 and hash(graph) == hash(chain(10_000))
    assert len(fingerprint(graph)) == 64
    assert verify(graph) is graph
    del graph
    gc.collect(1)
