"""Which parts of its operands a node reads on each rank, and what must move for that."""

from __future__ import annotations

import pytest

from conjoin.ir import (
    Node,
    RegionMove,
    exchange_axes,
    made_region,
    operand_move,
    output_move,
    parse_graph,
    place,
    region_of,
    wanted_region,
)
from conjoin.machine import Axis, Mesh

MESH = Mesh.of_nodes(1, 2)


def node_of(line: str, *leaves: str) -> Node:
    listed = ", ".join(leaf.split(" ")[0] for leaf in leaves)
    text = f'graph "one" eval\n{chr(10).join(leaves)}\ntakes [{listed}] in null\n{line}\nreturns [%0] in null\n'
    return parse_graph(text).nodes[0]


CONV = node_of(
    "%0: f32[1,1,8]{d0:S(2)} = conv1d(input:x, input:w, padding=[1])",
    "input:x f32[1,1,8]{d0:S(2)}",
    "input:w f32[1,1,3]{d0:B}",
)
ROWS = node_of(
    "%0: f32[8,4]{d0:S(0)} = add.Tensor(input:x, input:y)", "input:x f32[8,4]{d0:S(0)}", "input:y f32[4]{d0:B}"
)
HEADS = node_of("%0: f32[3,2]{d0:S(0)} = reshape(input:x, shape=[3, 2])", "input:x f32[6]{d0:S(0)}")


def test_a_window_reaches_into_its_neighbour() -> None:
    placed = place(CONV, MESH)
    assert [wanted_region(CONV, 0, placed, MESH, rank)[2] for rank in (0, 1)] == [(0, 5), (3, 8)]
    assert [made_region(CONV, 0, placed, MESH, rank)[2] for rank in (0, 1)] == [(0, 4), (4, 8)]
    move = operand_move(CONV, 0, placed, MESH, 1)
    assert move is not None and move.group == (0, 1)
    assert [region[2] for region in move.have] == [(0, 4), (4, 8)]
    assert [region[2] for region in move.want] == [(0, 5), (3, 8)]
    assert operand_move(CONV, 1, placed, MESH, 1) is None and output_move(CONV, 0, placed, MESH, 0) is None


def test_pieces_of_a_factor_need_not_line_up_with_pieces_of_its_dim() -> None:
    placed = place(HEADS, MESH)
    assert [wanted_region(HEADS, 0, placed, MESH, rank) for rank in (0, 1)] == [((0, 4),), ((4, 6),)]
    move = operand_move(HEADS, 0, placed, MESH, 0)
    assert move is not None and move.have == (((0, 3),), ((3, 6),)) and move.want == (((0, 4),), ((4, 6),))


@pytest.mark.parametrize("rank", [0, 1])
def test_even_pieces_are_what_the_layouts_say(rank: int) -> None:
    placed = place(ROWS, MESH)
    for i, value in enumerate(ROWS.inputs):
        held = region_of(value.type.shape, value.type.layout, MESH, rank)
        assert wanted_region(ROWS, i, placed, MESH, rank) == held
        assert operand_move(ROWS, i, placed, MESH, rank) is None
    assert output_move(ROWS, 0, placed, MESH, rank) is None


def test_what_is_not_split_is_read_as_it_lies() -> None:
    node = node_of("%0: f32[4] = relu(input:x)", "input:x f32[4]")
    placed = place(node, MESH)
    assert wanted_region(node, 0, placed, MESH, 1) == ((0, 4),) == made_region(node, 0, placed, MESH, 1)
    assert operand_move(node, 0, placed, MESH, 1) is None


UNEVEN = Mesh((Axis("n0", 5, True), Axis("d0", 3), Axis("d1", 2)))
NODES = {
    "heads": node_of(
        "%0: f32[34,2]{n0:S(0),d0:S(0)} = reshape(input:x, shape=[34, 2])", "input:x f32[68]{n0:S(0),d0:S(0)}"
    ),
    "heads, the other order": node_of(
        "%0: f32[7,34,3]{d1:S(0),d0:S(1),n0:S(1)} = reshape(input:x, shape=[7, 34, 3])",
        "input:x f32[7,102]{d1:S(0),d0:S(1),n0:S(1)}",
    ),
    "at one place": node_of(
        "%0: f32[34,2]{n0:S(0),d0:At(1)} = reshape(input:x, shape=[34, 2])", "input:x f32[68]{n0:S(0),d0:At(1)}"
    ),
    "windows": node_of(
        "%0: f32[7,1,13]{d1:S(0),n0:S(2)} = conv1d(input:x, input:w, stride=[2], padding=[2])",
        "input:x f32[7,1,26]{d1:S(0),n0:S(2)}",
        "input:w f32[1,1,5]{d1:B,n0:B}",
    ),
    "rows": node_of("%0: f32[34,2]{n0:S(0),d0:S(0)} = relu(input:x)", "input:x f32[34,2]{n0:S(0),d0:S(0)}"),
}


@pytest.mark.parametrize("name", NODES)
def test_a_group_moves_what_its_ranks_have_and_want_one_by_one(name: str) -> None:
    node = NODES[name]
    placed = place(node, UNEVEN)
    moved = 0
    for rank in range(UNEVEN.size):
        for find, region, types in (
            (operand_move, wanted_region, [value.type for value in node.inputs]),
            (output_move, made_region, node.types),
        ):
            for i, type in enumerate(types):
                axes = exchange_axes(node, placed, type, UNEVEN)
                group = UNEVEN.group(rank, axes)
                held = tuple(region_of(type.shape, type.layout, UNEVEN, member) for member in group)
                used = tuple(region(node, i, placed, UNEVEN, member) for member in group)
                have, want = (held, used) if find is operand_move else (used, held)
                expected = None if not axes or have == want else RegionMove(group, have, want)
                assert find(node, i, placed, UNEVEN, rank) == expected
                moved += expected is not None
    assert (moved == 0) == (name == "rows")
