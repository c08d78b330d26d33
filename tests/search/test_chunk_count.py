"""A search has products go in chunks where the timeline is shorter with them, and only there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.machine import parse_machine
from conjoin.search import Wish, make_plan
from conjoin.search.chunk_count import try_chunks
from conjoin.search.entries import plan_of
from conjoin.search.searches import open_contest
from conjoin.sim import simulate


class Blocks(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.relu(self.up(x)))
        return made


@pytest.mark.parametrize(("width", "length", "pays"), [(8192, 4096, True), (64, 16, False)])
def test_chunks_are_chosen_where_they_pay(width: int, length: int, pays: bool) -> None:
    with torch.device("meta"):
        model, batch = Blocks(width).train(), (torch.empty(8, length, width), torch.empty(8, length, width))
    graph, machine = capture(model, batch, nn.functional.mse_loss), parse_machine("dgx-h100:1")
    contest = open_contest(graph, machine, CostModel(), Wish())
    plain = contest.enter_plan(make_plan(graph, machine, "megatron:tp=8,sp"), is_counted=False)
    assert contest.best is plain
    try_chunks(contest)
    assert contest.best is not None
    plan = plan_of(contest.best, graph, machine)
    assert (plan.chunks > 1, contest.best.seconds < plain.seconds) == (pays, pays)
    assert simulate(plan, contest.prices).timeline.seconds == contest.best.seconds
