"""What is written is read back as the same graph, in text and in JSON: random graphs here, those of models in
`frontends`."""

from __future__ import annotations

from hypothesis import example, given, settings

from conjoin.ir import Graph, parse_graph
from tests.ir.graphs import GOLDEN, check_round_trip, random_graphs


@given(random_graphs())
@example(parse_graph(GOLDEN))
@settings(settings.get_profile("ir"), max_examples=60)
def test_random_graphs_round_trip(graph: Graph) -> None:
    check_round_trip(graph)


def test_half_a_character_in_a_name_round_trips() -> None:
    text = 'graph "\\ud800" eval\ninput:"\\udc00" f32[]\ntakes [input:"\\udc00"] in null\nreturns [] in null'
    check_round_trip(parse_graph(text))
