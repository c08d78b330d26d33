"""Dims that are put together and parted again: the same numbers without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import conjoin
from conjoin.search.heads_apart import find_parted, part_dims


class Views(nn.Module):
    """One chain of views of a product."""

    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Linear(12, 12)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        y = self.view(self.weight(x))
        return (y * torch.arange(float(y.numel())).view(y.shape)).sin().mean()


VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "heads behind samples": (lambda x: x.reshape(2, 10, 6).transpose(0, 1).reshape(5, 2, 2, 6), True),
    "turned twice": (lambda x: x.reshape(2, 10, 6).transpose(0, 1).transpose(1, 2).reshape(5, 2, 6, 2), True),
    "not turned": (lambda x: x.reshape(10, 12).reshape(2, 5, 12), True),
    "other parts": (lambda x: x.reshape(2, 12, 5).transpose(0, 1).reshape(4, 3, 2, 5), False),
    "put together still": (lambda x: x.reshape(10, 12).transpose(0, 1).reshape(3, 40), False),
    "no dims to part": (lambda x: x.reshape(2, 60).transpose(0, 1).reshape(60, 1, 2), False),
}


@pytest.mark.parametrize("view", VIEWS)
def test_parted_views_give_the_same_numbers(view: str) -> None:
    torch.manual_seed(0)
    function, is_parted = VIEWS[view]
    model, x = Views(function), torch.randn(2, 5, 12)
    graph = conjoin.capture(model, x)
    found = [node for node in graph.nodes if find_parted(graph, node)]
    assert len(found) == is_parted
    parted = part_dims(graph, found)
    assert not any(find_parted(parted, node) for node in parted.nodes)
    assert torch.equal(conjoin.to_module(parted, model)(x), model(x))


def test_nothing_is_parted_of_no_elements() -> None:
    model = Views(lambda x: x.reshape(0, 10, 6).transpose(0, 1).reshape(5, 2, 0, 6))
    graph = conjoin.capture(model, torch.ones(0, 5, 12))
    assert not any(find_parted(graph, node) for node in graph.nodes)
