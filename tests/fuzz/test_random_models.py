"""Random models train by plans as they do plainly; and the comparison sees what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conjoin.runtime.parallel import ParallelModule
from tests.fuzz import comparing
from tests.fuzz.comparing import examine, examine_program
from tests.fuzz.cover import forms, patterns
from tests.fuzz.programs import Program
from tests.fuzz.random_models import draw

CHUNK, STEPS = 4, 4
TURNS = (4, 2, 4, 2, 4, 2, 4, 1)
SEEDS = (
    0, 20, 32, 43, 48, 66, 70, 88, 116, 160, 167, 184, 205, 212, 234, 253, 256, 269, 274, 280, 302, 312, 313, 335,
    339, 341, 352, 389, 393, 409, 416, 421, 453, 463, 470, 485, 493, 494, 496, 498, 539, 568, 605, 607, 613, 624,
    657, 673, 677, 693, 710, 740, 751, 771, 782, 806, 833, 873, 896, 904, 928, 960, 972, 1012, 1024, 1025, 1094,
    1134, 1146, 1166, 1180, 1217, 1324, 1390, 1394, 1397, 1402, 1446, 1450, 1485, 1554, 1577, 1580, 1589, 1650,
    1654, 1655, 1675, 1680, 1702, 1722, 1760, 1834, 1886, 1917, 1932, 1945, 1990, 1991, 2033, 2067, 2084, 2125,
    2167, 2193, 2231, 2246, 2307, 2335, 2358,
)  # fmt: skip
"""The fewest of 2,400 that have every pattern (`python -m tests.fuzz --cover 2400`)."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("first", range(0, len(SEEDS), CHUNK))
@pytest.mark.filterwarnings("ignore")
def test_random_models_train_as_they_do_plainly(first: int) -> None:
    """On 1, 2 or 4 devices; `python -m tests.fuzz` takes each, and as many models and steps as there is time for."""
    for number, seed in enumerate(SEEDS[first : first + CHUNK], first):
        found = examine(seed, STEPS, (TURNS[number % len(TURNS)],))
        assert not found.fault and not found.refused, f"seed {seed}: {found.fault}{found.refused}\n{draw(seed).text}"


def test_every_pattern_is_in_one_of_these_models() -> None:
    has = frozenset[str]().union(*(forms(draw(seed)) for seed in SEEDS))
    assert [pattern for pattern, form in patterns().items() if form not in has] == []


def test_a_seed_always_draws_the_same_program() -> None:
    torch.rand(3)
    assert draw(5) == draw(5) and draw(5).text != draw(6).text


@pytest.mark.filterwarnings("ignore")
def test_plans_split_and_rewrite() -> None:
    """Where they did not, nothing would be compared."""
    found = [examine(seed, STEPS) for seed in range(3)]
    assert sum(f.splits for f in found) >= 4 and all(f.worst < 1 for f in found)


def test_what_is_right_is_not_taken_for_wrong() -> None:
    assert not examine_program(Program(0, SMALL)).fault


@pytest.mark.parametrize("what", ["gradient", "loss", "buffer"])
def test_what_is_wrong_is_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ParallelModule.__init__

    def spoiled(self: ParallelModule, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        if what == "gradient":
            self.get_parameter("l.weight").register_hook(lambda gradient: gradient * 1.001)
        elif what == "loss":
            self.register_forward_hook(lambda *given: given[2] + 1e-3)
        else:
            self.register_forward_hook(lambda module, *_: [module.n.running_mean.data.add_(1e-3), None][1])

    monkeypatch.setattr(comparing.ParallelModule, "__init__", spoiled)
    fault = examine_program(Program(0, SMALL), STEPS).fault
    name = {"gradient": "gradient of l.weight", "loss": "loss of step", "buffer": "n.running_mean"}[what]
    assert name in fault


def test_a_variance_that_is_nothing_but_rounding_is_none() -> None:
    """Features that are the same for all samples: the mean of squares less the square of the mean is a rounding."""
    text = SMALL.replace("self.l(x)", "self.l(x * 0) + 3").replace("nn.Linear(6, 8)", "nn.Linear(6, 8).double()")
    text = text.replace("nn.BatchNorm1d(8)", "nn.BatchNorm1d(8, momentum=None, dtype=torch.float64)")
    text = text.replace("torch.randn(12, 6)", "torch.randn(12, 6, dtype=torch.float64)")
    assert not examine_program(Program(0, text), STEPS, (2,), ("data-parallel",)).fault


SMALL = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(6, 8)
        self.n = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.n(self.l(x)).pow(3).mean()


def batch():
    return (torch.randn(12, 6),)
"""
