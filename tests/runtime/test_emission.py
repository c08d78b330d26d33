"""The program of a rank: what stands in it and what does not, and random draws that are those of one device."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.ir import LayoutError, Mark, Plan, parse_graph
from conjoin.runtime.ranks.board import Board
from conjoin.runtime.ranks.threads import ThreadRanks, run_ranks
from conjoin.runtime.verification.strides import in_strides
from tests.runtime.hand_plans import MESH, by_hand, captured, module_on
from tests.runtime.random_graphs import Sample, differences, on_one_device, on_ranks


class Net(nn.Module):
    """A function of a weight and the input as a model."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def net(function: Callable[[Tensor, Tensor], Tensor], x: tuple[int, ...], weight: tuple[int, ...]) -> Sample:
    return captured(Net(function, *weight), (torch.randn(x),))


def lines(plan: Plan, sample: Sample, rank: int = 0) -> list[str]:
    """The calls of a rank's program, by the names of the functions."""
    code = module_on(plan, sample, ThreadRanks(plan.mesh, rank, Board(plan.mesh.size)), 0).code
    return [_MOVED.sub("moved", name) for name in _CALL.findall(code)]


_CALL = re.compile(r" = (?:torch\.ops\.)?([\w.]+)\(")
_MOVED = re.compile(r"^conjoin_runtime_movement_carriers_moved.*")


def check(plan: Plan, sample: Sample) -> None:
    assert differences(plan, on_ranks(plan, sample), on_one_device(sample)) == []


def test_a_chain_of_reshards_is_one_call() -> None:
    sample = net(lambda x, w: functional.linear(x, w).tanh().sum(), (8, 6), (4, 6))
    plan = by_hand(sample.graph, {"weight": "x:S(1)"}, {0: "x S(1), S(1) -> P", 1: "x S(0) -> S(0)", 2: "x S(0) -> P"})
    chain = [node.op for node in plan.graph.nodes]
    assert chain == ["conjoin::partition", "linear", "conjoin::reduce", "conjoin::partition", "tanh", "sum",
                     "conjoin::reduce"]  # fmt: skip
    assert lines(plan, sample) == [
        "moved", "torch._C._nn.linear", "moved", "torch.tanh", "torch.sum", "moved",
    ]  # fmt: skip
    check(plan, sample)


@pytest.mark.parametrize(("heads", "moves"), [(4, 0), (3, 1)])
def test_a_move_stands_only_where_pieces_do_not_line_up(heads: int, moves: int) -> None:
    """Twelve columns in heads: four of three can be cut in two halves, three of four cannot."""
    sample = net(lambda x, w: (x * w).view(5, heads, 12 // heads).tanh().sum(), (5, 12), (12,))
    rules = {0: "x S(1), S(0) -> S(1)", 1: "x S(1) -> S(1)", 2: "x S(1) -> S(1)", 3: "x S(1) -> P"}
    plan = by_hand(sample.graph, {"weight": "x:S(0)"}, rules)
    reshards = 2  # of the input, and of the loss
    assert lines(plan, sample).count("moved") == reshards + moves
    check(plan, sample)


def test_a_halo_comes_from_the_neighbours_and_padding_only_at_the_ends() -> None:
    sample = captured(nn.Conv1d(2, 3, 3, padding=1), (torch.randn(2, 2, 9),))
    plan = by_hand(sample.graph, {}, {0: "x S(2), B, B -> S(2); y S(2), B, B -> S(2)"}, {0: "x:S(2) y:S(2)"})
    for rank, padded in ((0, True), (1, False), (2, False), (3, True)):
        assert ("torch.constant_pad_nd" in lines(plan, sample, rank)) == padded

    def program(communicator: ThreadRanks) -> Tensor:
        made: Tensor = module_on(plan, sample, communicator)(*sample.inputs)
        return made.as_subclass(Tensor)

    parts = run_ranks(plan.mesh, program)
    torch.testing.assert_close(torch.cat(parts, 2), sample.model(*sample.inputs))


def test_what_is_made_from_nothing_is_made_in_its_piece() -> None:
    def positions(x: Tensor, w: Tensor) -> Tensor:
        return (x * w * torch.arange(6, dtype=torch.float64)).sum()

    sample = net(positions, (4, 6), (6,))
    number = next(i for i, node in enumerate(sample.graph.nodes) if node.op.startswith("arange"))
    after = {i: node for i, node in enumerate(sample.graph.nodes) if node.op == "mul.Tensor"}
    first, second = sorted(after)
    rules = {number: "x  -> S(0)", first: "x S(1), S(0) -> S(1)", second: "x S(1), S(0) -> S(1)"}
    plan = by_hand(sample.graph, {"weight": "x:S(0)"}, rules)
    check(plan, sample)


DRAWS: list[tuple[str, Callable[[Tensor, Tensor], Tensor], str]] = [
    ("in the order of memory", lambda x, w: functional.dropout((x * w).t(), 0.4).sum(0).square().sum(), "dropout"),
    ("only for some values", lambda x, w: functional.rrelu(x * w, training=True).square().sum(), "rrelu"),
    ("as many as the values say", lambda x, w: (torch.poisson((x * w).detach().abs() * 9) * w).sum(), "poisson"),
    ("expanded", lambda x, w: functional.dropout(w.expand(4, 6), 0.4).mul(x).sum(), "dropout"),
    ("alike", lambda x, w: (torch.randn_like(x) * w).sum(), "randn_like"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "op"), [case[1:] for case in DRAWS], ids=[case[0] for case in DRAWS])
@pytest.mark.parametrize("split", ["S(0)", "S(1)"])
def test_draws_can_be_those_of_one_device(function: Callable[..., Tensor], op: str, split: str) -> None:
    sample = net(function, (4, 6), (6,))
    number = next(i for i, node in enumerate(sample.graph.nodes) if node.op == op)
    plan = by_hand(sample.graph, {}, {number: f"x {split} -> {split}; y B -> B"})
    check(plan, sample)
    plan = by_hand(sample.graph, {}, {number: f"x {split} -> {split}; y {split} -> {split}"})
    check(plan, sample)


def test_a_tensor_in_another_order_of_memory_is_the_same_tensor() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    y = in_strides(x, (1, 3))
    assert torch.equal(x, y) and y.stride() == (1, 3) and in_strides(y, (1, 3)) is y
    y.backward(torch.arange(12.0).view(3, 4))  # type: ignore[no-untyped-call]
    assert x.grad is not None and torch.equal(x.grad, torch.arange(12.0).view(3, 4))


def test_autocast_around_the_program_leaves_pinned_calls_alone() -> None:
    """What was captured outside of the caller's autocast is computed in the dtypes written, on many ranks too."""

    def pinned(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return functional.linear(x, w).sum()

    sample = net(pinned, (4, 6), (4, 6))
    plan = by_hand(sample.graph, {}, {0: "x S(0), B -> S(0)", 1: "x S(0) -> P"})

    def program(communicator: ThreadRanks) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module_on(plan, sample, communicator)(*sample.inputs).detach()  # type: ignore[no-any-return]

    for loss in run_ranks(plan.mesh, program):
        torch.testing.assert_close(loss, sample.model(*sample.inputs).detach(), rtol=1e-12, atol=1e-12)


def test_an_illegal_graph_is_not_emitted() -> None:
    """Plans are checked when they are loaded; a program is not made of an unchecked wrong one either."""
    sample = net(lambda x, w: functional.linear(x, w).sum(), (8, 6), (4, 6))
    plan = by_hand(sample.graph, {}, {0: "x S(0), B -> S(0)", 1: "x S(0) -> P"})
    text = str(plan.graph).replace("{x:B} = conjoin::replicate(param:weight", "{x:P} = conjoin::assign(param:weight")
    mark = Mark("wrong", "")
    wrong = Plan(parse_graph(text), MESH, mark, mark, "by hand")
    with pytest.raises(LayoutError, match=r"on axis x S\(0\), P -> S\(0\) is not legal"):
        module_on(wrong, sample, ThreadRanks(MESH, 0, Board(4)))
