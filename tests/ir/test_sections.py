"""Sections of packed weights: told, read again, and refused where they are not those of one tensor."""

from __future__ import annotations

import pickle

import pytest

from conjoin.ir import LeafKind, by_tensor, find_faults, parse_graph, stored_alike, whole_type
from conjoin.machine import Mesh
from conjoin.ops import Split

LINES = (
    'param:"w[0:4]" f32[4,6]{d0:S(0)} trainable section "w" dim 0 from 0 of 6',
    'param:"w[4:6]" f32[2,6]{d0:S(0)} trainable section "w" dim 0 from 4 of 6',
)


def text_with(*lines: str) -> str:
    rest = "input:x f32[2]", "takes [input:x] in null", "returns [input:x] in null"
    return "\n".join(('graph "g" train', *lines, *rest))


def test_the_text_is_read_again() -> None:
    graph = parse_graph(text_with(*LINES))
    assert not find_faults(graph)
    assert parse_graph(str(graph)) == graph == pickle.loads(pickle.dumps(graph))
    sections = by_tensor(graph.leaves)[LeafKind.PARAMETER, "w"]
    assert [leaf.names for leaf in sections] == [("w",), ("w",)]
    assert {whole_type(leaf).shape for leaf in sections} == {(6, 6)}


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (LINES[:1], "its sections 0:4 do not make up 0:6"),
        ((LINES[0], LINES[1].replace("from 4", "from 3")), "its sections 0:4, 3:5 do not make up 0:6"),
        ((LINES[0], LINES[1].replace("{d0:S(0)}", "")), "or are stored differently"),
        ((LINES[0], LINES[1].replace("f32", "f64")), "differ in more than where they begin"),
        ((LINES[0], LINES[1].replace("trainable ", "")), "differ in more than where they begin"),
        ((LINES[0], LINES[1].replace("dim 0", "dim 7")), "a dim that it has not"),
        ((*LINES, "param:w f32[6,6]"), "nothing else is of its name"),
        (tuple(line.replace("param", "const").replace(" trainable", "") for line in LINES), "only a parameter"),
    ],
)
def test_what_is_not_one_tensor_is_told(lines: tuple[str, ...], fault: str) -> None:
    assert any(fault in str(found) for found in find_faults(parse_graph(text_with(*lines))))


def test_sections_are_stored_as_the_one_in_the_most_pieces() -> None:
    mesh = Mesh.of_nodes(1, 4)
    long, short, _ = parse_graph(text_with(*LINES)).leaves
    rows, columns = (("d0", Split(0)), ("d1", Split(0))), (("d0", Split(1)), ("d1", Split(1)))
    half = (("d0", Split(0)),)
    alike = {long: half, short: half}
    assert stored_alike(alike, mesh) is alike
    assert stored_alike({long: rows, short: half}, mesh) == alike, "two rows are not enough for four"
    assert stored_alike({long: columns, short: ()}, mesh) == {long: columns, short: columns}
    assert stored_alike({long: rows, short: ()}, mesh) == {long: (), short: ()}
