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
TURNS = (4, 2, 1, 2)
SEEDS = (
    23, 24, 32, 38, 41, 47, 69, 87, 88, 89, 91, 110, 131, 156, 168, 169, 170, 179, 182, 184, 213, 234, 242, 243,
    250, 252, 268, 307, 310, 313, 320, 323, 333, 348, 349, 370, 377, 378, 386, 391, 394, 402, 408, 429, 441, 449,
    450, 463, 470, 493, 509, 517, 539, 540, 546, 549, 554, 565, 568, 604, 605, 613, 624, 641, 652, 653, 654, 655,
    662, 677, 688, 699, 709, 712, 713, 729, 744, 751, 762, 769, 782, 790, 805, 811, 817, 826, 869, 893, 896, 906,
    911, 921, 936, 955, 958, 959, 960, 969, 982, 985, 994, 996, 1009, 1023, 1026, 1027, 1035, 1043, 1070, 1073,
    1074, 1075, 1083, 1104, 1133, 1159, 1189, 1191, 1201, 1204, 1209, 1211, 1213, 1218, 1232, 1233, 1238, 1248,
    1280, 1282, 1313, 1316, 1384, 1397, 1398, 1424, 1435, 1446, 1471, 1488, 1498, 1526, 1546, 1552, 1561, 1579,
    1580, 1603, 1612, 1627, 1634, 1640, 1654, 1659, 1670, 1674, 1702, 1710, 1733, 1774, 1783, 1814, 1835, 1840,
    1881, 1899, 1925, 1945, 1952, 1955, 1960, 1973, 1979, 1991, 2005, 2008, 2014, 2016, 2032, 2034, 2035, 2039,
    2042, 2051, 2060, 2061, 2074, 2075, 2097, 2105, 2110, 2121, 2152, 2159, 2160, 2161, 2174, 2181, 2187, 2190,
    2220, 2225, 2228, 2243, 2245, 2251, 2272, 2284, 2292, 2298, 2304, 2307, 2351, 2354, 2396, 2398,
)  # fmt: skip
"""Small ones of 2,400 that have every pattern (`python -m tests.fuzz --cover 2400`)."""


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


@pytest.mark.filterwarnings("ignore")
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
