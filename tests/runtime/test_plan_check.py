"""The comparison of a plan with one device: right plans pass, and every silent error makes it fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.prune import random_unstructured

from conjoin.errors import PlanError, UsageError
from conjoin.frontends import Precision, capture
from conjoin.ir import LeafKind, Mark
from conjoin.machine import parse_machine
from conjoin.runtime import (
    TOLERANCE,
    Case,
    Difference,
    Verdict,
    check_made_for,
    verdict,
    verify_in_process,
)
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.verification import plan_check, steps
from conjoin.runtime.verification.differences import differences_of_step, largest_of, relative
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.runtime.models import captured, mlp, plan_of


def case_of(model: nn.Module, batch: Any, loss: Any = None, strategy: str = "data-parallel", ranks: int = 2) -> Case:
    graph = capture(model.train(), batch, loss)
    return Case(make_plan(graph, parse_machine(f"local:{ranks}"), strategy), graph, model, batch)


def verified(model: nn.Module, batch: Any, loss: Any = None, strategy: str = "data-parallel") -> Verdict:
    return verify_in_process(case_of(model, batch, loss, strategy), num_steps=2)


def small_case(strategy: str = "data-parallel", ranks: int = 2) -> Case:
    model, batch = mlp(dropout=0.2)
    return case_of(model, batch, functional.mse_loss, strategy, ranks)


# Right plans.


class Keeping(nn.Module):
    """Keeps what its last forward pass made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.last = [self.layer(x)]
        return self.last[0].tanh()


def pruned() -> nn.Module:
    return random_unstructured(nn.Linear(4, 4), "weight", 0.3)  # its weight is made by a hook


@pytest.mark.parametrize("make", [Keeping, pruned])
def test_a_model_that_keeps_tensors_with_a_history_is_compared(make: Callable[[], nn.Module]) -> None:
    model, batch = make(), (torch.randn(8, 4), torch.randn(8, 4))
    model(batch[0])
    assert verified(model, batch, functional.mse_loss).passed
    assert Precision.parse("bf16", "cpu").converted(model, batch)[0] is not model


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron", "zero1", "reduction"])
def test_a_right_plan_passes(strategy: str) -> None:
    found = verify_in_process(small_case(strategy), num_steps=3)
    assert found.passed and found.worst < TOLERANCE
    assert found.num_ranks == 2 and len(found.losses) == len(found.plan_losses) == 3
    assert found.losses == pytest.approx(found.plan_losses, rel=1e-12) and len(set(found.losses)) == 3


def test_differences_are_named_once_each_and_sorted() -> None:
    found = verify_in_process(small_case(ranks=4), num_steps=2)
    names = ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert sorted(d.what for d in found.differences) == sorted(["loss", *names, *(f"gradient of {n}" for n in names)])
    sizes = [difference.relative for difference in found.differences]
    assert sizes == sorted(sizes, reverse=True) and found.worst == sizes[0]
    assert {difference.rank for difference in found.differences} <= {0, 1, 2, 3}


def test_of_every_tensor_the_worst_rank_and_step_is_kept() -> None:
    zero = [Difference("loss", 0, 0.0), Difference("a", 0, 1e-12), Difference("a", 0, 3e-12)]
    one = [Difference("loss", 1, 0.0), Difference("a", 1, 2e-12), Difference("b", 1, inf)]
    found = verdict((1.0,), [((1.5,), zero), ((1.0,), one)])
    assert found.differences == (Difference("b", 1, inf), Difference("a", 0, 3e-12), Difference("loss", 0, 0.0))
    assert (found.losses, found.plan_losses, found.num_ranks) == ((1.0,), (1.5,), 2) and not found.passed
    assert verdict((), [((), [])]).passed


# What a model may be made of.


class Buffered(nn.Module):
    """A layer, a buffer, and what is done with the two."""

    def __init__(self, buffer: Tensor, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.fc, self.use = nn.Linear(4, 4), use
        self.register_buffer("held", buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.fc(x), self.held)


BUFFERS: dict[str, tuple[Tensor, Callable[[Tensor, Any], Tensor]]] = {
    "booleans": (torch.eye(4).bool(), lambda x, held: x.masked_fill(held, 0.0)),
    "infinities": (torch.full((4, 4), -inf).triu(1), lambda x, held: (x + held).softmax(-1)),
    "bytes": (torch.arange(4, dtype=torch.uint8), lambda x, held: x * held),
    "integers": (torch.arange(4), lambda x, held: x[:, held] * (held / 3)),
    "half": (torch.arange(4).half(), lambda x, held: x * held),
    "complex": (
        torch.polar(torch.ones(2), torch.arange(2.0)),
        lambda x, held: torch.view_as_real(torch.view_as_complex(x.reshape(4, 2, 2)) * held),
    ),
    "not a number": (torch.tensor([1.0, nan, 2.0, 3.0]), lambda x, held: x * held.nan_to_num(0.5)),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_of_every_kind(name: str) -> None:
    buffer, use = BUFFERS[name]
    assert verified(Buffered(buffer, use), torch.randn(4, 4), lambda out: out.square().mean()).passed


class TiedBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.second.running_mean = self.first.running_mean
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def test_tied_parameters_and_buffers_stay_tied() -> None:
    """`model.double()` would untie buffers."""
    case = case_of(TiedBuffers(), torch.randn(8, 4), lambda out: out.pow(3).mean())
    wide: Any = case.widened().model
    assert wide.first.running_mean is wide.second.running_mean and wide.first.weight is wide.second.weight
    assert verify_in_process(case, num_steps=2).passed


def test_widening_leaves_the_users_model_and_batch_alone() -> None:
    model, batch = mlp()
    model(batch[0]).sum().backward()
    case = Case(plan_of(model, batch, 2), captured(model, batch), model, (*batch, torch.arange(3), 7, None))
    wide = case.widened()
    assert {p.dtype for p in model.parameters()} == {torch.float32} and all(
        p.grad is not None for p in model.parameters()
    )
    assert {p.dtype for p in wide.model.parameters()} == {torch.float64}
    assert all(p.grad is None for p in wide.model.parameters())
    assert [x.dtype for x in wide.batch[:3]] == [torch.float64, torch.float64, torch.int64] and wide.batch[3:] == (
        7,
        None,
    )
    assert type(wide.batch) is tuple and batch[0].dtype == torch.float32


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.table = nn.Linear(4, 4), torch.randn(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.table  # type: ignore[no-any-return]


def test_constants_with_values_in_the_plan_and_in_the_model() -> None:
    model, x = WithTable(), torch.randn(4, 4)
    case = case_of(model, x, lambda out: out.square().mean())
    (table,) = case.graph.leaves_of(LeafKind.CONSTANT)
    assert table.data is not None
    assert verify_in_process(case, num_steps=1).passed
    with torch.device("meta"):
        shapes = WithTable()
    without = capture(shapes.train(), torch.empty(4, 4, device="meta"), lambda out: out.square().mean())
    assert [leaf.data for leaf in without.leaves_of(LeafKind.CONSTANT)] == [None]
    plan = make_plan(without, parse_machine("local:2"), "data-parallel")
    assert verify_in_process(Case(plan, without, model, x), num_steps=1).passed
    assert model.table.dtype == torch.float32, "the user's is as it was"


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        scores = self.fc(x)
        masked = scores.masked_fill(torch.ones(4).bool(), -inf)
        return {
            "scores": (scores, scores.argmax(-1)),
            "masked": masked,
            "none": None,
            "size": 4,
            "wave": torch.fft.fft(x),
        }


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
def test_models_without_a_loss(strategy: str) -> None:
    assert verified(nn.Linear(4, 4), torch.randn(4, 4), strategy=strategy).passed
    assert verified(Several(), torch.randn(4, 4), strategy=strategy).passed


@pytest.mark.parametrize(("size", "passes"), [(1e-17, True), (1e-9, False)])
def test_gradients_that_are_what_rounding_left_of_the_loss_are_nothing(size: float, passes: bool) -> None:
    """As where a model is sure of everything; what is small but more than that is compared as ever."""
    right = {"weight": torch.tensor([2 * size, -size])}, {"weight": torch.tensor([size, -size])}
    found = differences_of_step((0.5, right[0]), (0.5, right[1]), 0, lambda _, whole: whole)
    assert all(difference.is_rounding for difference in found) == passes


def test_nothing_to_train() -> None:
    """There is still an output to compare."""
    assert verified(nn.Tanh(), torch.randn(4, 4)).passed
    assert verified(nn.Linear(4, 4).requires_grad_(False), torch.randn(4, 4), lambda out: out.mean()).passed
    half = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))
    found = verified(half, torch.randn(4, 4), lambda out: out.square().mean())
    assert found.passed and "gradient of 0.weight" not in {difference.what for difference in found.differences}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_models_of_other_dtypes_are_compared_in_double(dtype: torch.dtype) -> None:
    found = verified(nn.Linear(4, 4).to(dtype), torch.randn(4, 4, dtype=dtype), lambda out: out.square().mean(), "fsdp")
    assert found.worst < 1e-12


def test_a_batch_by_name() -> None:
    model = nn.Bilinear(4, 3, 2)
    batch = {"input2": torch.randn(8, 3), "input1": torch.randn(8, 4)}
    assert verified(model, batch, lambda out: out.square().mean(), "fsdp").passed


# Wrong plans: the silent errors, made on one rank or on all.


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[ParallelModule], None]], None]:
    """Do something to every rank's module when it is made."""

    def install(change: Callable[[ParallelModule], None]) -> None:
        class Spoiled(ParallelModule):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                change(self)

        monkeypatch.setattr(plan_check, "ParallelModule", Spoiled)

    return install


Spoil = Callable[[Callable[[ParallelModule], None]], None]


def failures(found: Verdict) -> set[str]:
    return {difference.what for difference in found.differences if difference.relative > TOLERANCE}


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
def test_a_gradient_doubled_on_one_rank_is_seen(spoil: Spoil, strategy: str) -> None:
    def change(module: ParallelModule) -> None:
        if module.communicator.rank == 1:
            module.get_parameter("down.weight").register_hook(lambda gradient: 2 * gradient)

    spoil(change)
    found = verify_in_process(small_case(strategy), num_steps=1)
    assert not found.passed and failures(found) == {"gradient of down.weight", "down.weight"}
    assert found.differences[0] == Difference("gradient of down.weight", 1, found.worst) and found.worst > 0.1


def test_a_loss_averaged_instead_of_summed_is_seen(spoil: Spoil) -> None:
    def change(module: ParallelModule) -> None:
        module.register_forward_hook(lambda _, __, loss: loss / 2)

    spoil(change)
    found = verify_in_process(small_case(), num_steps=1)
    assert not found.passed and "loss" in failures(found) and found.plan_losses[0] == pytest.approx(found.losses[0] / 2)
    assert next(d for d in found.differences if d.what == "loss").relative == pytest.approx(0.5)


def test_a_loss_that_is_no_number_on_one_rank_is_seen(spoil: Spoil) -> None:
    def change(module: ParallelModule) -> None:
        if module.communicator.rank == 1:
            module.register_forward_hook(lambda _, __, loss: loss + (loss.detach() * nan))

    spoil(change)
    found = verify_in_process(small_case(), num_steps=2)
    assert not found.passed and found.differences[0].relative == inf and "loss" in failures(found)


def test_a_parameter_that_is_not_updated_is_seen(spoil: Spoil) -> None:
    def change(module: ParallelModule) -> None:
        held = module.get_parameter("up.bias")
        value = held.detach().clone()
        module.register_forward_pre_hook(lambda *_: (held.data.copy_(value), None)[1])

    spoil(change)
    found = verify_in_process(small_case(), num_steps=2)
    assert not found.passed and "up.bias" in failures(found)


def test_a_parameter_never_given_a_gradient_is_seen(spoil: Spoil) -> None:
    def change(module: ParallelModule) -> None:
        module.get_parameter("up.bias").requires_grad_(False)

    spoil(change)
    found = verify_in_process(small_case(), num_steps=1)
    assert found.worst == inf and found.differences[0].what == "gradient of up.bias (missing on one side)"


def test_a_parameter_that_is_not_there_is_seen(spoil: Spoil) -> None:
    """What a rank does not hold cannot be compared: that it does not is the difference."""

    def change(module: ParallelModule) -> None:
        module.named_parameters = lambda *a, **k: (  # type: ignore[method-assign]
            (name, p) for name, p in nn.Module.named_parameters(module, *a, **k) if name != "up.bias"
        )

    spoil(change)
    assert not verify_in_process(small_case(), num_steps=1).passed


def test_running_statistics_of_a_part_of_the_batch_are_seen(spoil: Spoil) -> None:
    def change(module: ParallelModule) -> None:
        def drift(*_: Any) -> None:
            norm = module.get_submodule("1")
            norm._buffers["running_var"] = norm._buffers["running_var"] * 1.001  # type: ignore[operator]

        module.register_forward_hook(drift)

    spoil(change)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    found = verified(model, torch.randn(8, 4), lambda out: out.pow(3).mean())
    assert failures(found) == {"1.running_var"}, "the loss of training does not show it"


def test_masks_drawn_differently_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_check, "SEED", steps.SEED + 1)  # of the ranks
    assert not verify_in_process(small_case(), num_steps=1).passed


def test_everything_lies_where_the_communicator_carries_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranks whose device is a GPU, played by one without memory: every tensor of the step is there."""
    seen: list[tuple[torch.device, ...]] = []

    class Noted(ParallelModule):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            tensors = (*args, *self.parameters(), *self.buffers())
            seen.append((self.store.device, *(x.device for x in tensors if isinstance(x, Tensor))))
            raise RuntimeError("a device without memory computes nothing")

    def compare(ranks: Any) -> Any:
        ranks.device = torch.device("meta")
        return plan_check.compare_rank(case, reference, ranks)

    monkeypatch.setattr(plan_check, "ParallelModule", Noted)
    case = small_case().widened()
    reference = plan_check.train_alone(case, 1)
    with pytest.raises(RuntimeError, match="computes nothing"):
        run_ranks(case.plan.mesh, compare)
    assert {device.type for devices in seen for device in devices} == {"meta"} and len(seen[0]) == 7


def test_values_that_differ_at_the_start_are_seen() -> None:
    case = small_case().widened()
    reference = plan_check.train_alone(case, 1)
    with torch.no_grad():
        next(case.model.parameters()).add_(1e-6)
    results = run_ranks(case.plan.mesh, lambda ranks: plan_check.compare_rank(case, reference, ranks))
    found = verdict(reference.losses, results)
    assert not found.passed and 1e-9 < found.worst < 1e-2


# The measure.


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([inf, -inf, 1.0], [inf, -inf, 1.0], 0.0),
        ([inf], [-inf], inf),
        ([1.0], [inf], inf),
        ([nan], [nan], 0.0),
        ([nan], [1.0], inf),
        ([1.0], [nan], inf),
        ([], [], 0.0),
        ([True, False], [True, True], 0.5),
        ([250], [3], 247 / 2),
        ([1j], [1.0], 2**0.5 / 2),
    ],
)
def test_the_difference_of_two_tensors(mine: list[Any], theirs: list[Any], expected: float) -> None:
    found = relative(torch.tensor(mine), torch.tensor(theirs), 2.0)
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_scale_leaves_infinities_out() -> None:
    assert largest_of(torch.tensor([-inf, 3.0, -4.0])) == 4.0
    assert largest_of(torch.tensor([nan, -inf])) == 0.0
    assert largest_of(torch.empty(0)) == 0.0 and largest_of(torch.tensor([True])) == 1.0


def test_a_difference_beside_an_infinity_is_seen(spoil: Spoil) -> None:
    """Relative to an infinity everything would be nothing."""

    def change(module: ParallelModule) -> None:
        module._buffers["held"] = module._buffers["held"].clone().index_fill_(0, torch.tensor([3]), 0.5)  # type: ignore[union-attr]

    spoil(change)
    buffer, use = BUFFERS["infinities"]
    found = verified(Buffered(buffer, use), torch.randn(4, 4), lambda out: out.square().mean())
    assert "held" in failures(found)


# What cannot be compared.


def test_a_plan_of_another_model_is_refused() -> None:
    case = small_case()
    with pytest.raises(PlanError, match="made for Mlp with fingerprint") as told:
        verify_in_process(replace(case, plan=replace(case.plan, model=Mark("Mlp", "0" * 64))))
    assert_three_sentences(told.value)
    model, batch = mlp()
    with pytest.raises(PlanError):
        check_made_for(case.plan, captured(model, batch))  # without dropout
    check_made_for(case.plan, case.graph)


def test_a_model_on_the_meta_device_is_refused() -> None:
    case = small_case()
    with pytest.raises(UsageError, match="on the meta device was given to be compared") as told:
        verify_in_process(replace(case, model=case.model.to("meta")))
    assert_three_sentences(told.value)


def test_a_loss_that_is_no_number_on_one_device_is_refused() -> None:
    model, batch = nn.Linear(4, 4), torch.randn(4, 4)
    with pytest.raises(UsageError, match="its loss there is nan in step 1") as told:
        verified(model, batch, lambda out: (out * nan).sum())
    assert_three_sentences(told.value)


def test_the_callers_generator_is_not_touched() -> None:
    before = torch.get_rng_state()
    assert verify_in_process(small_case(), num_steps=2).passed
    assert torch.equal(before, torch.get_rng_state())
