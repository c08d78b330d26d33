"""Parts of any sizes trained as equal pieces: the plain model on the graph as it was is the judge."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import zoo
from conjoin.errors import UsageError
from conjoin.gnn import UNLABELLED, pad_parts
from conjoin.runtime.ranks.threads import run_ranks
from tests.runtime.hand_plans import by_strategy, captured
from tests.runtime.test_halo import alone, check, sample_of, together


@pytest.mark.parametrize("cuts", [(0, 1, 1, 9, 13), (0, 13, 13), (0, 4, 8, 13)])
@pytest.mark.parametrize("name", ["graphsage", "gat"])
def test_uneven_and_empty_parts_train_like_the_graph_itself(name: str, cuts: tuple[int, ...]) -> None:
    sample, loss = sample_of(name)
    x, edges, labels = sample.inputs
    padding = pad_parts(cuts, torch.randperm(13, generator=torch.Generator().manual_seed(0)))
    batch = padding.spread(x), padding.renumber(edges), padding.spread(labels, UNLABELLED)
    padded = captured(sample.model, batch, zoo.build(f"{name}:tiny").loss)
    ranks = len(cuts) - 1
    plan = by_strategy(padded, "vertex-parallel", ranks)
    assert torch.equal(padding.collect(batch[0]), x)
    check(plan, alone(sample, loss), run_ranks(plan.mesh, partial(together, plan, padded, 1)))


@pytest.mark.parametrize("cuts", [(), (0,), (1, 3), (0, 3, 2), (0, 0)])
def test_cuts_that_are_none_are_told(cuts: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"Cuts begin with 0, never go down, .* Take them from a partition"):
        pad_parts(cuts)


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3]])
def test_orders_that_are_none_are_told(order: list[int]) -> None:
    with pytest.raises(UsageError, match=r"each vertex once. Give the vertices"):
        pad_parts((0, 1, 3), torch.tensor(order))
