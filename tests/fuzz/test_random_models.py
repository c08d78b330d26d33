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
    10, 20, 23, 27, 35, 37, 60, 69, 88, 116, 128, 143, 152, 160, 179, 193, 210, 216, 219, 226, 234, 242, 247, 250, 255,
    256, 269, 274, 275, 291, 302, 314, 323, 333, 339, 349, 370, 381, 391, 398, 408, 409, 416, 429, 441, 444, 450, 485,
    493, 509, 523, 527, 529, 543, 545, 549, 559, 562, 573, 577, 579, 605, 613, 618, 624, 648, 651, 662, 673, 688, 693,
    709, 711, 717, 725, 740, 744, 751, 753, 766, 768, 769, 782, 787, 789, 806, 810, 817, 835, 851, 861, 867, 874, 896,
    909, 912, 921, 929, 945, 957, 976, 989, 996, 1007, 1010, 1033, 1073, 1074, 1077, 1081, 1113, 1117, 1159, 1180, 1201,
    1204, 1207, 1217, 1233, 1238, 1254, 1266, 1271, 1316, 1328, 1342, 1354, 1384, 1390, 1397, 1417, 1428, 1430, 1450,
    1457, 1462, 1466, 1473, 1485, 1529, 1549, 1552, 1559, 1571, 1580, 1590, 1594, 1603, 1612, 1632, 1641, 1691, 1702,
    1724, 1772, 1785, 1791, 1797, 1814, 1819, 1829, 1839, 1840, 1854, 1869, 1872, 1884, 1896, 1917, 1928, 1942, 1945,
    1952, 1955, 1970, 1990, 1991, 2013, 2016, 2036, 2079, 2125, 2127, 2152, 2181, 2182, 2189, 2195, 2202, 2217, 2225,
    2227, 2239, 2246, 2257, 2272, 2292, 2294, 2296, 2299, 2307, 2328, 2397, 2398,
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
