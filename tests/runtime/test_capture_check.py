"""The captured graph against the model itself: what a graph forgets is seen, and what is right passes."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
from conjoin import CaptureError, PlanError, Verdict, plan, verify_plan
from conjoin.frontends import capture as captured_unchecked
from conjoin.frontends import run_plainly
from conjoin.runtime import PlainModel, check_capture
from conjoin.runtime.verification import capture_check
from conjoin.runtime.verification.first_difference import find_first_difference
from conjoin.runtime.verification.fresh_batches import Freshness
from tests.ir.wording import assert_three_sentences

X, Y = torch.linspace(-1, 1, 48).reshape(8, 6), torch.linspace(0, 1, 48).reshape(8, 6)
Body = Callable[[Any, Tensor], Tensor]


class Layer(nn.Module):
    """A layer and what is done with its output, with attributes of all kinds to do it with."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.body, self.n, self.rate, self.seen, self.kept = body, 0, 1.0, [], None

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.fc(x))


def verified(model: nn.Module, batch: Any = (X, Y), loss: Any = functional.mse_loss, num_steps: int = 3) -> Verdict:
    made = plan(model, batch, "local:2", loss=loss, strategy="data-parallel")
    return verify_plan(made, model, batch, loss=loss, num_steps=num_steps)


# State that Python keeps.


def counts(m: Any, h: Tensor) -> Tensor:
    m.n += 1
    return h * (1 + m.n)


def decays(m: Any, h: Tensor) -> Tensor:
    m.rate *= 0.9
    return h * m.rate


def collects(m: Any, h: Tensor) -> Tensor:
    m.seen.append(1)
    return h * len(m.seen)


def alternates(m: Any, h: Tensor) -> Tensor:
    m.n += 1
    return h.relu() if m.n % 2 else h


def switches(m: Any, h: Tensor) -> Tensor:
    m.n += 1
    return torch.tanh(h) if m.n > 2 else h


@pytest.mark.parametrize("body", [counts, decays, collects, alternates, switches], ids=lambda body: body.__name__)
def test_python_state_that_forward_changes_is_a_difference(body: Body) -> None:
    """The plan itself trains like its graph: it is the graph that does not train like the model."""
    found = verified(Layer(body))
    assert not found.passed and found.worst < 1e-9
    against = found.against_model
    assert against is not None and not against.passed and len(against.losses) == 3
    told = "\n".join(found.told)
    assert "does NOT train like the model itself" in told and "loss is off by" in told
    assert "forward changes" in told and "which a graph keeps as it was at capture" in told
    name = next(
        iter({"collects": "seen", "decays": "rate"}[b] for b in [body.__name__] if b in ("collects", "decays")), "n"
    )
    assert against.changed == (name,)


def test_state_that_nothing_reads_passes_and_is_told() -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        m.n += 1
        m.seen.append(h.detach())
        return h

    found = verified(Layer(body))
    assert found.passed and "in these steps that made no difference" in "\n".join(found.told)


def test_state_that_every_capture_moves_on_is_told_as_that() -> None:
    model = Layer(lambda m, h: h * next(m.kept))
    model.kept = iter(range(1, 99))  # type: ignore[assignment]
    with pytest.raises(PlanError, match="if only by capture, where forward moves on something") as told:
        verified(model)
    assert_three_sentences(told.value)


# What is drawn or read outside of torch.


OUTSIDE: dict[str, Callable[[], float]] = {
    "random": random.random,
    "time": lambda: time.perf_counter() * 1e4 % 1,
    "numpy": lambda: float(__import__("numpy").random.rand()),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_forward_takes_from_outside_is_refused_with_its_line(name: str) -> None:
    def body(m: Any, h: Tensor) -> Tensor:
        return h * (0.1 + OUTSIDE[name]())

    with pytest.raises(CaptureError, match="does not compute what the model does") as told:
        plan(Layer(body), (X, Y), "local:2", loss=functional.mse_loss, strategy="data-parallel")
    assert re.search(
        rf"made by mul at .*{re.escape('test_capture_check.py')}:{body.__code__.co_firstlineno + 1}", str(told.value)
    )
    assert_three_sentences(told.value)
    graph = conjoin.capture(Layer(body), (X, Y), functional.mse_loss, check=False)
    assert graph.loss == 0


def test_a_number_drawn_close_to_the_captured_one_is_told_from_it_all_the_same() -> None:
    drawn = iter([0.5, 0.501, 0.7])

    def body(m: Any, h: Tensor) -> Tensor:
        return h * next(drawn)

    plain = PlainModel(Layer(body), functional.mse_loss, run_plainly)
    graph = captured_unchecked(Layer(body), (X, Y), functional.mse_loss)
    hint = find_first_difference(graph, plain, (X, Y), Freshness.MIXED)
    assert hint.startswith("The first value that differs is made by mul at ") and next(drawn, None) is None


def test_a_seldom_branch_by_a_number_from_outside_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Every run agrees, but for one in many: only that something was drawn shows it."""
    numpy = __import__("numpy")
    drawer, again = random.Random(3), numpy.random.default_rng(3)

    def body(m: Any, h: Tensor) -> Tensor:
        m.seen[0] = m.seen[0] + 1
        seldom = random.random() < 1e-9 or m.drawer.random() < 1e-9 or m.again.random() < 1e-9
        return h.relu() if seldom or numpy.random.rand() < 1e-9 else h

    model = Layer(body)
    model.drawer, model.again, model.seen = drawer, again, [0]  # type: ignore[assignment]
    conjoin.capture(model, (X, Y), functional.mse_loss)
    for name in ("random (Python's generator)", "numpy.random (NumPy's generator)"):
        assert f"{name}: forward draws from it, the graph keeps what it drew" in caplog.text
    for name in ("drawer", "again", "seen"):
        assert f"attribute {name}: forward changes it" in caplog.text


def test_what_is_drawn_outside_is_drawn_again_by_the_caller() -> None:
    random.seed(5)
    before = random.getstate()
    drawing = Layer(lambda m, h: h * 2 + 0 * random.random())
    check_capture(
        captured_unchecked(drawing, (X, Y), functional.mse_loss),
        PlainModel(drawing, functional.mse_loss, run_plainly),
        (X, Y),
    )
    drawn = random.getstate()
    random.seed(5)
    random.random()  # export runs forward once
    assert random.getstate() == drawn != before


# Writes that a graph loses.


def test_a_lost_write_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The net under the passes: with views told by schemas alone, as torch does, einsum's would be lost."""
    monkeypatch.setattr("conjoin.frontends.functional.storages_of_node", lambda node: frozenset())

    def body(m: Any, h: Tensor) -> Tensor:
        torch.einsum("bs->sb", h).mul_(2)
        return h + 1

    with pytest.raises(CaptureError, match="does not compute what the model does") as told:
        conjoin.capture(Layer(body), (X, Y), functional.mse_loss)
    assert "The first value that differs is made by add at" in str(told.value)
    assert not verify_after(monkeypatch, body).passed


def verify_after(monkeypatch: pytest.MonkeyPatch, body: Body) -> Verdict:
    monkeypatch.setattr(capture_check, "MAX_FLOPS", 0.0)  # unchecked
    return verified(Layer(body), num_steps=1)


def test_gradients_alone_are_enough_to_refuse() -> None:
    """A graph that forgets a detach gives the same loss."""
    stops, flows = Layer(lambda m, h: h * h.detach()), Layer(lambda m, h: h * h)
    graph = captured_unchecked(flows, (X, Y), functional.mse_loss)
    with pytest.raises(CaptureError, match="gradient of fc"):
        check_capture(graph, PlainModel(stops, functional.mse_loss, run_plainly), (X, Y))


# What is right.


def mixed_precision(m: Any, h: Tensor) -> Tensor:
    half = m.norm(h).bfloat16() @ m.fc.weight.bfloat16()
    return functional.dropout(half, 0.3).float() + torch.zeros(6) + torch.arange(6) / 3 + torch.rand(6)


def asks_for_its_dtype(m: Any, h: Tensor) -> Tensor:
    return (h * torch.finfo(h.dtype).eps * 1e6 + (h.double() if h.dtype == torch.float32 else -h)).to(h.dtype)


def under_autocast(m: Any, h: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return m.fc(h).float().softmax(-1)


def drops_nothing(m: Any, h: Tensor) -> Tensor:
    return functional.dropout(h, 0.0) + functional.dropout(h, 0.5, training=False) * torch.rand(())


@pytest.mark.parametrize("body", [mixed_precision, asks_for_its_dtype, under_autocast, drops_nothing])
def test_models_of_every_precision_pass(body: Body) -> None:
    found = verified(Layer(body))
    assert found.passed and found.against_model is not None
    own = "the model's own precision" if body is asks_for_its_dtype else "double precision"
    assert found.against_model.precision == own and "trains like the model itself" in found.told[0]


def test_a_loss_may_read_the_model() -> None:
    model = Layer(lambda m, h: h)
    with_decay = lambda out, y: functional.mse_loss(out, y) + model.fc.weight.square().mean()
    assert verified(model, loss=with_decay).passed


def test_a_loss_with_state_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    assert verified(model, (X, torch.arange(8) % 3), loss).passed


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_every_tensor_of_a_batch_is_drawn_by_itself(num_inputs: int) -> None:
    """Given twice, a tensor is two inputs: they are compared on two values."""
    seen: list[tuple[Tensor, ...]] = []

    class Sees(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, *given: Tensor) -> Tensor:
            seen.append(given)
            return self.fc(given[0]) * given[-1]

    batch = (X,) * num_inputs
    assert verified(Sees(), batch, None).passed
    values = [x.double() for given in seen for x in given if x.dtype == torch.float64]
    assert len(values) == 3 * num_inputs
    assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in [X.double(), *values[:i]])


# What is said where nothing can be compared.


def told_of(model: nn.Module, batch: Any, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level("INFO", logger="conjoin"):
        conjoin.capture(model, batch)
    return caplog.text


def test_the_report_says_that_it_was_checked(caplog: pytest.LogCaptureFixture) -> None:
    assert "checked against the model: loss, 2 gradient(s) and state agree on other values" in told_of(
        nn.Linear(6, 2), X, caplog
    )


def test_the_report_says_why_it_was_not(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "not checked against the model: it has no values" in told_of(nn.Linear(6, 2, device="meta"), X, caplog)
    monkeypatch.setattr(capture_check, "MAX_FLOPS", 10.0)
    assert "a step takes 2e+02 operations, and up to 1e+01 are run again" in told_of(nn.Linear(6, 2), X, caplog)
    monkeypatch.setattr(capture_check, "MAX_ELEMENTS", 10)
    assert "not checked against the model: it has 6.2e+01 elements" in told_of(nn.Linear(6, 2), X, caplog)


class Rows(nn.Module):
    """A matrix that is made of where its rows begin."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, first: Tensor, columns: Tensor) -> Tensor:
        return torch.sparse_csr_tensor(first, columns, x.new_ones(len(columns)), (8, 8)) @ self.layer(x)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_places_that_are_drawn_are_not_read_beyond_their_memory() -> None:
    """Torch would read where a matrix says, and the process would end there."""
    batch = X, torch.tensor([0, 3, 3, 40, 41, 41, 41, 60, 64]), torch.arange(64) % 8, Y
    assert verified(Rows(), batch, num_steps=1).passed


def test_a_model_that_does_not_run_by_itself_is_told() -> None:
    model = Layer(lambda m, h: h)
    graph = captured_unchecked(model, (X, Y), functional.mse_loss)

    def failing(*_: Any) -> Any:
        raise ValueError("no such batch")

    assert "by itself it stops with ValueError: no such batch" in check_capture(
        graph, PlainModel(model, None, failing), (X, Y)
    )
