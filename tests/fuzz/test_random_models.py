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
    22, 23, 32, 101, 105, 137, 155, 191, 206, 219, 222, 228, 302, 303, 323, 328, 331, 338, 341, 357,
    395, 440, 445, 456, 462, 477, 496, 501, 553, 571, 576, 588, 632, 634, 636, 648, 658, 671, 673, 684, 711,
    712, 737, 741, 784, 833, 851, 866, 867, 868, 880, 888, 901, 915, 926, 928, 929, 959, 970, 979, 982, 989,
    1015, 1024, 1027, 1069, 1159, 1236, 1262, 1271, 1286, 1300, 1309, 1336, 1381, 1449, 1488, 1490,
)  # fmt: skip
"""The fewest of 1,500 that have every pattern (`python -m tests.fuzz --cover 1500`)."""


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
