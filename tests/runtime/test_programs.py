"""What a program makes the device and the host do, against the plain model: as many kernels, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from conjoin.frontends import capture
from conjoin.machine import Machine
from conjoin.runtime import Case, load, to_module, verify_in_process
from conjoin.search import make_plan
from tests.kernels import Kernels

VIEWS = ("view", "detach", "t.", "transpose", "unsqueeze", "expand", "slice", "split", "select", "alias", "permute")


def kernels_of(module: nn.Module, step: Callable[[], Tensor]) -> Counter[str]:
    """What a step asks of the device, views apart; a call that writes over its operand is like one that does not."""
    module.zero_grad(set_to_none=True)
    with Kernels() as kernels:
        step().backward()  # type: ignore[no-untyped-call]
    return Counter(name.replace("_.", ".") for name, _ in kernels.asked if not name.startswith(VIEWS))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3))
        )

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layers(x)
        return h.mean((1, 2, 3))


class Positioned(nn.Module):
    """Positions and a window made of constants in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(8, device=x.device)
        near = (at[:, None] - at[None, :]).abs() < 3
        h = (self.layer(x) + self.table(at))[:, None]
        return functional.scaled_dot_product_attention(h, h, h, attn_mask=near)[:, 0].mean((1, 2))


class InHalves(nn.Module):
    """A part under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = functional.layer_norm(functional.relu(self.a(x)), (4,))
            h = self.b(h)
        return h.float()[:, 0]


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "batch norms": (Normed, (2, 4, 5, 5)),
    "positions": (Positioned, (3, 8, 4)),
    "autocast": (InHalves, (6, 4)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_step_asks_for_no_more_kernels_than_the_plain_model(name: str) -> None:
    kind, shape = MODELS[name]
    model, x, y = kind().train(), torch.randn(shape), torch.randn(shape[0])
    graph = capture(model, (x, y), functional.mse_loss)
    plain = kernels_of(model, lambda: functional.mse_loss(model(x), y))
    for planned in (to_module(graph, model), load(make_plan(graph, Machine("one", 1, 1, "cpu"), "single"), model)):
        planned(x, y)
        ours = kernels_of(planned, partial(planned, x, y))
        assert not ours - plain, "what the plain model does not ask for"


def test_what_constants_make_is_made_once() -> None:
    model, x = Positioned(), torch.randn(3, 8, 4)
    planned = to_module(capture(model, x), model)
    with torch.inference_mode():
        planned(x)
    asked = kernels_of(planned, lambda: planned(x).sum())
    assert not {"arange.default", "sub.Tensor", "abs.default", "lt.Scalar"} & {*asked}
    torch.testing.assert_close(planned(x), model(x))


class GivesPositions(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        at = torch.arange(4)
        return x + at, at.unsqueeze(0)


def test_what_a_caller_writes_to_is_made_anew() -> None:
    x = torch.zeros(2, 4)
    planned = to_module(capture(GivesPositions(), x), GivesPositions())
    planned(x)[1].zero_()
    total, at = planned(x)
    assert at.tolist() == [[0, 1, 2, 3]] and total.tolist() == [[0, 1, 2, 3]] * 2


def test_constants_under_an_autocast_and_without_are_not_mixed_up() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            ones = torch.full((4, 4), 1 / 3)
            h: Tensor = self.layer(x)
            return h @ (ones @ ones)

    model, x = Product(), torch.randn(2, 4)
    planned = to_module(capture(model, x), model)
    for _ in range(2):
        assert torch.equal(planned(x), model(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(planned(x), model(x))


def test_statistics_are_written_over_as_the_plain_model_does() -> None:
    model, x = Normed().train(), torch.randn(2, 4, 5, 5)
    planned = to_module(capture(model, x), model)
    held = {name: buffer.data_ptr() for name, buffer in model.named_buffers() if "running" in name}
    planned(x)
    assert {name: buffer.data_ptr() for name, buffer in planned.named_buffers() if "running" in name} == held


class ReadsOld(nn.Module):
    """Also reads what its statistics were, and are."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        before = self.norm.running_mean
        assert before is not None
        old = before.clone()
        y = self.norm(self.layer(x))
        return y, (old * 3 + before).sum()


def test_statistics_that_others_read_are_kept() -> None:
    plain, x = ReadsOld().train(), torch.randn(6, 4)
    model = ReadsOld().train()
    model.load_state_dict(plain.state_dict())
    planned = to_module(capture(model, x), model)
    for _ in range(3):
        for mine, theirs in zip(planned(x), plain(x), strict=True):
            torch.testing.assert_close(mine, theirs)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


def test_two_passes_before_their_gradients() -> None:
    plain, x = Normed().train(), torch.randn(2, 2, 4, 5, 5)
    model = Normed().train()
    model.load_state_dict(plain.state_dict())
    planned = to_module(capture(model, x[0]), model)
    for module in (plain, planned):
        (module(x[0]).square().sum() + module(x[1]).sum()).backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_train_the_same(name: str, strategy: str) -> None:
    kind, shape = MODELS[name]
    model, batch = kind().train(), (torch.randn(2 * shape[0], *shape[1:]), torch.randn(2 * shape[0]))
    graph = capture(model, batch, functional.mse_loss)
    plan = make_plan(graph, Machine("two", 1, 2, "cpu"), strategy)
    assert verify_in_process(Case(plan, graph, model, batch), 2).passed


def test_a_device_without_autocast() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.zeros(2, 4)
    assert to_module(capture(model, x), model)(x).shape == (2, 4)


@torch.library.custom_op("conjoin_tests::draws", mutates_args=())
def draws(x: Tensor) -> Tensor:
    """Draws, and says so nowhere."""
    return x + torch.randn_like(x)


@draws.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_an_operator_that_nobody_declared_runs_in_every_step() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + draws(torch.zeros(3))

    model, x = Noisy(), torch.ones(3)
    planned = to_module(capture(model, x), model)
    torch.manual_seed(0)
    mine = [planned(x) for _ in range(3)]
    torch.manual_seed(0)
    assert all(torch.equal(one, model(x)) for one in mine)


class Lifted(nn.Module):
    """A constant, and a buffer that is filled with one number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.copy_(x.mean())  # type: ignore[operator]
        return x * torch.arange(3)


def test_a_pass_without_values_leaves_a_module_as_it_was() -> None:
    model, x = Lifted(), torch.ones(3)
    planned = to_module(capture(model, x), model)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        planned(mode.from_tensor(x))
    planned.mean = torch.zeros(3)
    assert type(planned(x)) is Tensor and torch.equal(planned(x), model(x))


def test_a_buffer_filled_with_one_number_can_be_loaded_into() -> None:
    model, x = Lifted(), torch.ones(3)
    planned = to_module(capture(model, x), model)
    planned(x)
    planned.load_state_dict({"mean": torch.arange(3.0)})
    assert torch.equal(planned.get_buffer("mean"), torch.arange(3.0))
