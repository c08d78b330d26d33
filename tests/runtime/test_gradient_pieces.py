"""torch's own calls on gradients that are pieces: as on one device, or refused."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import UsageError
from conjoin.ir import Plan
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.program.gradient_pieces import GradientPiece
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.blocks import cut_out
from conjoin.runtime.state.optimizer_trial import try_out
from tests.ir.wording import assert_three_sentences
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import by_hand, by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample

STORED = {"0.weight": "x:S(0) y:S(0)", "0.bias": "x:S(0)", "2.weight": "y:S(1)"}


@cache
def case(kind: str) -> tuple[Sample, Plan]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    sample = captured(model, (torch.randn(8, 4), torch.randn(8, 2)), functional.mse_loss)
    return sample, by_hand(sample.graph, STORED, {}) if kind == "by hand" else by_strategy(sample, kind)


KINDS = "by hand", "fsdp", "megatron", "data-parallel"


def total_by_hand(parameters: list[nn.Parameter]) -> Tensor:
    """As people write it."""
    return sum(p.grad.data.norm(2).item() ** 2 for p in parameters if p.grad is not None) ** 0.5  # type: ignore[return-value]


CALLS: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip_grad_norm_": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1),
    "of order 1": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, 1.0),
    "of the largest": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, inf),
    "without foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=False),
    "with foreach": lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=True),
    "get_total_norm": lambda ps: nn.utils.get_total_norm([p.grad for p in ps]),
    "in two": lambda ps: nn.utils.clip_grads_with_norm_(ps, 0.1, nn.utils.get_total_norm([p.grad for p in ps])),
    "clip_grad_value_": lambda ps: nn.utils.clip_grad_value_(ps, 0.01),
    "torch.norm": lambda ps: torch.stack([torch.norm(p.grad) for p in ps]).norm(),
    "by hand": total_by_hand,
    "squares by hand": lambda ps: sum((p.grad**2).sum() for p in ps) ** 0.5,
    "sums": lambda ps: [torch.sum(p.grad.flatten()).item() for p in ps],
    "means": lambda ps: [p.grad.abs().mean().item() for p in ps],
    "largest": lambda ps: [p.grad.max().item() for p in ps] + [torch.amax(p.grad.abs()).item() for p in ps],
    "smallest": lambda ps: [torch.min(p.grad).item() for p in ps],
    "of two": lambda ps: [torch.max(p.grad, -p.grad).sum().item() for p in ps],
    "any": lambda ps: [bool((p.grad > 0.1).any()) for p in ps] + [bool(torch.isnan(p.grad).any()) for p in ps],
    "all": lambda ps: [bool(torch.isfinite(p.grad).all()) for p in ps] + [bool(torch.all(p.grad.t() > 0)) for p in ps],
    "counted": lambda ps: [int((p.grad > 0).sum()) for p in ps] + [int(torch.count_nonzero(p.grad > 0)) for p in ps],
    "against numbers of all": lambda ps: [int((p.grad > p.grad.mean()).int().sum()) for p in ps]
    + [bool((p.grad > torch.tensor(0.1)).any()) for p in ps],
    "compared": lambda ps: [torch.equal(p.grad, p.grad.clamp(max=p.grad.max().item() - 1e-3)) for p in ps]
    + [torch.allclose(p.grad.clamp(min=p.grad.min().item() + 1e-3), p.grad) for p in ps],
    "copies": lambda ps: [p.grad.clone().norm().item() + copy.deepcopy(p.grad).sum().item() for p in ps],
    "by name": lambda ps: [torch.linalg.norm(p.grad, "fro" if p.dim() > 1 else inf).item() for p in ps],
    "written by a mask": lambda ps: [p.grad.__setitem__(p.grad.abs() > 0.1, 0.0) or p.grad.norm().item() for p in ps],
    "after a factor": lambda ps: [torch.linalg.vector_norm(p.grad.detach().mul(2).float()).item() for p in ps],
}  # fmt: skip


def wanted_of(call: str) -> tuple[Any, dict[str, Tensor]]:
    model = copy.deepcopy(case("fsdp")[0].model)
    sample = case("fsdp")[0]
    functional.mse_loss(model(sample.inputs[0]), sample.inputs[1]).backward()
    found = CALLS[call](list(model.parameters()))
    return found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(step: ParallelModule, wanted: dict[str, Tensor]) -> None:
    for name, parameter in step.named_parameters():
        part = step.store.cut(name, wanted[name])
        torch.testing.assert_close(parameter.grad, part, rtol=1e-6, atol=1e-9, check_dtype=False)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_and_clipping_are_those_of_one_device(kind: str) -> None:
    sample, plan = case(kind)
    wanted = {call: wanted_of(call) for call in CALLS}

    def program(communicator: Communicator) -> dict[str, Any]:
        step, found = module_on(plan, sample, communicator), {}
        for call, look in CALLS.items():
            step.zero_grad()
            step(*sample.inputs).backward()
            found[call] = look(list(step.parameters()))
            check_gradients(step, wanted[call][1])
        return found

    for found in run_ranks(plan.mesh, program):
        for call, (value, _) in wanted.items():
            assert (found[call] is None) == (value is None), call
            if value is not None:
                torch.testing.assert_close(found[call], value, rtol=1e-6, atol=0.0, check_dtype=False, msg=call)


def scaled_steps(module: nn.Module, loss: Callable[[nn.Module], Tensor], bad: Callable[[int], None]) -> list[Any]:
    """Four steps with torch's own scaler; in one of them a gradient overflows."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    scales = []
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(module)).backward()
        bad(i)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append((scaler.get_scale(), norm.item() if norm.isfinite() else inf))
    return scales


def scaled(communicator: Communicator) -> list[list[Any]]:
    found = []
    for kind in KINDS:
        sample, plan = case(kind)
        if plan.mesh != communicator.mesh:
            continue
        step = module_on(plan, sample, communicator)

        def overflow(i: int, step: nn.Module = step, first: bool = communicator.rank == 0) -> None:
            weight = step.get_parameter("0.weight").grad
            if i == 1 and first and weight is not None:
                weight.as_subclass(Tensor)[0, 0] = inf

        scales = scaled_steps(step, lambda step, sample=sample: step(*sample.inputs), overflow)
        whole = {name: parameter.detach() for name, parameter in step.named_parameters()}
        found.append(
            [
                kind,
                scales,
                {
                    n: (step.store.blocks(n, tuple(case(kind)[0].model.get_parameter(n).shape)), p)
                    for n, p in whole.items()
                },
            ]
        )
    return found


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_an_overflow_on_one_rank_is_an_overflow_on_all(ranks: str, tmp_path: Path) -> None:
    sample, plan = case("fsdp")
    model = copy.deepcopy(sample.model)

    def overflow(i: int) -> None:
        if i == 1:
            model.get_parameter("0.weight").grad[0, 0] = inf  # type: ignore[index]

    x, y = sample.inputs
    wanted = scaled_steps(model, lambda module: functional.mse_loss(module(x), y), overflow)
    assert [scale for scale, _ in wanted] == [2.0**10, 2.0**9, 2.0**9, 2.0**10]
    for found in run_ranks(plan.mesh, scaled) if ranks == "threads" else run_processes(plan.mesh, scaled, tmp_path):
        for kind, scales, pieces in found:
            if kind == "data-parallel":  # ranks have the same gradients there, unless somebody writes to one
                continue
            assert scales == [pytest.approx(step, rel=1e-6) for step in wanted], kind
            for name, (blocks, piece) in pieces.items():
                part = cut_out(model.get_parameter(name), blocks)
                torch.testing.assert_close(piece, part.detach(), rtol=1e-6, atol=1e-9)


def test_pieces_know_that_they_are(tmp_path: Path) -> None:
    sample, plan = case("by hand")

    def program(communicator: Communicator) -> None:
        step = module_on(plan, sample, communicator)
        for _ in range(2):  # the second time it is added to what is there
            step(*sample.inputs).backward()
        parted = {name for name, p in step.named_parameters() if isinstance(p.grad, GradientPiece)}
        assert parted == set(STORED)
        gradient = step.get_parameter("0.weight").grad
        assert isinstance(gradient, GradientPiece)
        buffer = io.BytesIO()
        torch.save(gradient, buffer)
        buffer.seek(0)
        assert torch.equal(torch.load(buffer, weights_only=True), gradient)
        for asked in (
            lambda: gradient.norm(dim=-1),
            lambda: gradient.sum(0),
            lambda: gradient.square().mean(dim=1),
            lambda: gradient.std(),
            lambda: torch.dot(gradient.flatten(), gradient.flatten()),
            lambda: torch.linalg.norm(gradient, 2),  # the largest singular value
            lambda: torch.linalg.svdvals(gradient),
            lambda: torch.linalg.qr(gradient),
            lambda: torch.svd_lowrank(gradient, 1),
            lambda: torch.fft.rfft(gradient),
            lambda: torch.where(gradient > 0),
            lambda: gradient.hsplit(1),
            lambda: gradient.flatten().sort(),
            lambda: torch.einsum("ij,ij->", gradient, gradient),
            lambda: functional.mse_loss(gradient, torch.zeros_like(gradient)),
            lambda: gradient[0].sum(),
            lambda: gradient[gradient > 0].mean(),
            lambda: [row.norm() for row in gradient],
            lambda: gradient.__setitem__(0, 0.0),
            lambda: gradient[:1].zero_(),
            lambda: torch.cat([p.grad.flatten() for p in step.parameters() if p.grad is not None]).norm(),
        ):
            with pytest.raises(UsageError) as told:
                asked()  # type: ignore[no-untyped-call]
            assert_three_sentences(told.value)
        with pytest.warns(UserWarning, match="part of shape"):
            gradient.numpy()
        assert not isinstance(gradient.new_zeros(1), GradientPiece) and len(gradient[:1].tolist()) == 1
        both = torch.cat([gradient.flatten(), 2 * gradient.flatten()]).norm()  # of parts along the same axes
        torch.testing.assert_close(both, 5**0.5 * gradient.norm())

    run_ranks(plan.mesh, program)


class Centred(torch.optim.SGD):
    """Takes the mean of a gradient away first."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad - p.grad.mean()
        return super().step(closure)


class Needy(torch.optim.SGD):
    """Cannot be made again from its options."""

    def __init__(self, params: Any, lr: float, teacher: str) -> None:
        super().__init__(params, lr)
        self.teacher = teacher.upper()


ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": lambda ps: torch.optim.Adam(ps, 0.1, amsgrad=True), "AdamW": lambda ps: torch.optim.AdamW(ps, 0.1),
    "fused": lambda ps: torch.optim.AdamW(ps, 0.1, fused=True), "Adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "Adadelta": lambda ps: torch.optim.Adadelta(ps), "Adamax": lambda ps: torch.optim.Adamax(ps),
    "NAdam": lambda ps: torch.optim.NAdam(ps), "RAdam": lambda ps: torch.optim.RAdam(ps),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, centered=True), "Rprop": lambda ps: torch.optim.Rprop(ps),
    "foreach": lambda ps: torch.optim.AdamW(ps, 0.1, foreach=True), "ASGD": lambda ps: torch.optim.ASGD(ps),
}  # fmt: skip
WHOLE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Muon": lambda ps: torch.optim.Muon(ps, 0.1), "Muon, plain": lambda ps: torch.optim.Muon(ps, 0.1, nesterov=False),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps), "LBFGS": lambda ps: torch.optim.LBFGS(ps),
    "another": lambda ps: Centred(ps, 0.1),
}  # fmt: skip


def matrices(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.dim() == 2]


def told_by_all(communicator: Communicator, kind: str) -> dict[str, str]:
    """What every optimizer is told in two steps, each from the same weights."""
    sample, plan = case(kind)
    step, told = module_on(plan, sample, communicator), {}
    begin = {name: p.detach().clone() for name, p in step.named_parameters()}
    for name, make in {**ELEMENTWISE, **WHOLE}.items():
        optimizer = make(matrices(step))

        def closure(optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = step(*sample.inputs)
            loss.backward()
            return loss

        try:
            for _ in range(2):
                optimizer.step(closure)
            states = [x for state in optimizer.state.values() for x in state.values()]
            assert not any(isinstance(x, GradientPiece) for x in states), "what is saved is plain"
            told[name] = ""
        except UsageError as error:
            assert_three_sentences(error)
            told[name] = str(error)
        with torch.no_grad():
            _ = [p.copy_(begin[each]) for each, p in step.named_parameters()]
    return told


def test_optimizers_that_look_at_more_than_an_element_are_refused_on_parts() -> None:
    for told in run_ranks(case("fsdp")[1].mesh, lambda communicator: told_by_all(communicator, "fsdp")):
        assert {name for name, text in told.items() if text} == set(WHOLE)
        for name, make in WHOLE.items():
            kind = type(make(matrices(case("fsdp")[0].model))).__name__
            assert "element by element" in told[name] and kind in told[name]
    for told in run_ranks(case("data-parallel")[1].mesh, lambda ranks: told_by_all(ranks, "data-parallel")):
        assert not any(told.values()), "whole weights may be looked at"


def test_an_optimizer_that_cannot_be_tried_is_told() -> None:
    sample, plan = case("fsdp")

    def program(communicator: Communicator) -> list[str]:
        step = module_on(plan, sample, communicator)
        optimizer = Needy(step.parameters(), 0.1, "somebody")
        step(*sample.inputs).backward()
        assert try_out(optimizer, optimizer.param_groups[0]).error is not None
        optimizer.step()
        return []

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_ranks(plan.mesh, program)
    assert any("could not be tried out" in str(warning.message) for warning in told)
