"""What forward reads from outside of the model and the batch is told at capture, also of models without values."""

from __future__ import annotations

import datetime
import logging
import os
import random
import secrets
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function

import conjoin
from conjoin.errors import CaptureError, PlanError
from conjoin.frontends import capture
from conjoin.ir import changed_names, python_state

GENERATOR = random.Random(3)


class Scaled(nn.Module):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(4, 4), read
        self._count, self.last = 0, deque([1.0], maxlen=4)
        self.kept = SimpleNamespace(calls=0)
        self.tensors = [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.read(self)


def elapsed(x: Tensor) -> Tensor:
    """A function that others may take over, as torch's own may be."""
    if torch._C._is_torch_function_mode_enabled():
        return handle_torch_function(elapsed, (x,), x)
    return x * time.time()


CLOCKS = {
    "time": lambda m: time.time(),
    "between calls of torch": lambda m: m.linear.bias.relu() * time.time() * m.linear.bias.relu(),
    "in a function like torch's": lambda m: elapsed(m.linear.bias),
    "in what torch calls": lambda m: torch.vmap(lambda x: x * time.time())(m.linear.weight)[0],
    "perf_counter": lambda m: time.perf_counter(),
    "now": lambda m: datetime.datetime.now().second,
    "today": lambda m: datetime.date.today().day,
}
DRAWS = {
    "urandom": lambda m: os.urandom(1)[0],
    "uuid4": lambda m: uuid.uuid4().int % 7,
    "secrets": lambda m: secrets.randbelow(7),
    "SystemRandom": lambda m: random.SystemRandom().random(),
    "Random": lambda m: random.Random().random(),
    "a generator of the file": lambda m: GENERATOR.random(),
    "default_rng": lambda m: float(numpy.random.default_rng().random()),
}


@pytest.mark.parametrize("read", [*CLOCKS.values(), *DRAWS.values()], ids=[*CLOCKS, *DRAWS])
def test_clocks_and_entropy_are_told(read: Callable[[Any], float], caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):  # of which no comparison with the model itself is made
        capture(Scaled(read), torch.zeros(8, 4))
    assert caplog.text.count("the graph keeps what it read") == 1 and "test_outside_values.py:" in caplog.text


@pytest.mark.parametrize(
    "read",
    [
        lambda m: random.Random(7).random(),
        lambda m: float(numpy.random.default_rng(7).random()),
        lambda m: logging.getLogger("quiet").isEnabledFor(0) + time.gmtime(0).tm_year,
    ],
    ids=["seeded", "seeded by NumPy", "no clock"],
)
def test_what_is_the_same_in_every_call_is_not_told(
    read: Callable[[Any], float], caplog: pytest.LogCaptureFixture
) -> None:
    capture(Scaled(read), torch.zeros(8, 4))
    assert "the graph keeps" not in caplog.text


def test_a_profiler_of_the_users_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    sys.setprofile(lambda frame, event, called: seen.append(event))
    try:
        capture(Scaled(CLOCKS["today"]), torch.zeros(8, 4))
        assert sys.getprofile() is not None and "c_call" in seen
    finally:
        sys.setprofile(None)
    assert sys.getprofile() is None


def counted(m: Any) -> float:
    m._count += 1
    return float(m._count)


def counted_in_an_object(m: Any) -> float:
    m.kept.calls += 1
    return float(m.kept.calls)


def counted_in_a_deque(m: Any) -> float:
    m.last.append(m.last[-1] + 1)
    return float(m.last[-1])


def counted_in_a_tensor(m: Any) -> Any:
    m.tensors[0] = m.tensors[0] + 1
    return m.tensors[0]


COUNTS = {
    "_count": counted, "kept": counted_in_an_object, "last": counted_in_a_deque, "tensors": counted_in_a_tensor,
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_what_forward_changes_is_told_and_found_by_verification(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = Scaled(COUNTS[name]), (torch.randn(8, 4), torch.randn(8, 4))
    plan = conjoin.plan(model, batch, "local:2", loss=nn.functional.mse_loss, strategy="data-parallel")
    assert f"attribute {name}: forward changes it" in caplog.text
    try:
        assert not conjoin.verify_plan(plan, model, batch, loss=nn.functional.mse_loss).passed
    except PlanError as error:  # an object is shared by all copies, and capture has counted, too
        assert "forward moves on something that is no tensor" in str(error) and name == "kept"


def test_state_is_looked_at_once_and_also_where_it_holds_itself() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    settings = SimpleNamespace(rates=[0.1, 0.2])
    settings.itself = settings
    for part in model:
        part._settings = settings
    before = python_state(model)
    settings.rates[1] = 0.3
    assert changed_names(before, python_state(model)) == ("0._settings", "1._settings")


TRAINED = nn.Parameter(torch.tensor(2.0))
MADE = torch.ones(4, requires_grad=True) * 2


def assigned(m: Any) -> Any:
    made = torch.ones(4)
    made[0] = TRAINED
    return made


@pytest.mark.parametrize(
    "read", [lambda m: MADE, assigned, lambda m: m.kept.weight], ids=["made of it", "assigned", "of an object"]
)
def test_what_is_trained_beside_the_model_is_refused(read: Callable[[Any], Any]) -> None:
    model = Scaled(read)
    model.kept.weight = nn.Parameter(torch.ones(4))
    with pytest.raises(CaptureError, match=r"that model\.parameters\(\) does not have"):
        capture(model, torch.ones(8, 4))


@pytest.mark.parametrize("read", [lambda m: TRAINED.item(), lambda m: float(TRAINED), lambda m: TRAINED.tolist()])
def test_a_number_of_what_is_trained_beside_the_model_is_told(
    read: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    capture(Scaled(read), torch.ones(8, 4))
    assert caplog.text.count("the graph keeps it as it was at capture") == 1
