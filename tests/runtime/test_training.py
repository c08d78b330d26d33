"""What people do with a module: compile, autocast, scale the loss, checkpoint activations; on two real ranks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint

import conjoin
from conjoin.frontends import capture
from conjoin.machine import parse_machine
from conjoin.runtime import launch, load, load_checkpoint, save_checkpoint
from conjoin.search import make_plan
from tests.runtime.models import Mlp, mlp, plan_of
from tests.runtime.test_split_outputs import Scores, X, Y, plan_by
from zoo.gpt import Gpt, GptConfig, gpt_batch
from zoo.tokens import next_token_loss

Run = Callable[[Any, Any], Tensor]


def _checkpointed(step: Any, batch: Any) -> Tensor:
    return checkpoint(step, batch, use_reentrant=False)  # type: ignore[no-any-return]


def _autocast(step: Any, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return step(batch)  # type: ignore[no-any-return]


WAYS: dict[str, Run] = {
    "eager": lambda step, batch: step(batch),
    "checkpointed": _checkpointed,
    "autocast": _autocast,
}


def _gradients(step: Any, run: Run, batch: Any) -> tuple[float, list[float]]:
    torch.manual_seed(3)
    loss = run(step, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), [p.grad.double().norm().item() for p in step.parameters()]


def _all_ways(rank: int, plan: Any, model: Any, batch: Any) -> dict[str, tuple[float, list[float]]]:
    return {name: _gradients(load(plan, copy.deepcopy(model)), run, batch) for name, run in WAYS.items()}


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
def test_checkpoint_and_autocast_train_the_same(strategy: str) -> None:
    for found in launch(2, _all_ways, *_gpt_by(strategy)):
        loss, gradients = found["eager"]
        _assert_the_same(found["checkpointed"], found["eager"])
        assert found["autocast"][0] == pytest.approx(loss, rel=1e-2)
        assert found["autocast"][0] != loss
        assert found["autocast"][1] == pytest.approx(gradients, rel=0.2, abs=1e-3)


def _gpt_by(strategy: str) -> tuple[Any, nn.Module, Tensor]:
    config = GptConfig(layers=1, width=16, heads=4, length=8, vocabulary=32)
    torch.manual_seed(0)
    model, batch = Gpt(config).train(), gpt_batch(4, config)
    return make_plan(capture(model, batch, next_token_loss), parse_machine("local:2"), strategy), model, batch


def _assert_the_same(found: tuple[float, list[float]], eager: tuple[float, list[float]]) -> None:
    assert found[0] == pytest.approx(eager[0], rel=1e-5)
    assert found[1] == pytest.approx(eager[1], rel=1e-3, abs=1e-6)


SIZES = {"fsdp": (8, 8, 4), "megatron": (8,)}
"""Of the batches that compiled steps take, by strategy."""


def _compiled_and_plain(rank: int, plans: dict[str, Any], whole: Any, folder: str) -> tuple[Any, ...]:
    """Each strategy, and a whole model compiled and not: in one process, where the compiler is imported once."""
    warnings.simplefilter("ignore")  # of the compiler about itself
    pairs = {name: _pairs(plan, SIZES[name], f"{folder}/{name}") for name, plan in plans.items()}
    plan, model, batch = whole
    return pairs, [_gradients(load(plan, copy.deepcopy(model)), run, batch) for run in (_compiled, WAYS["eager"])]


def _compiled(step: Any, batch: Any) -> Tensor:
    torch.compiler.reset()
    return torch.compile(step, backend="aot_eager")(batch)  # type: ignore[no-any-return]


def _pairs(plan: Any, sizes: tuple[int, ...], folder: str) -> list[tuple[float, float]]:
    """Of batches of some sizes the loss and the scores beside it, and the norm of the gradients that add up."""
    torch.compiler.reset()
    step, plain = conjoin.load(plan, Scores().double()), Scores().double()
    compiled, found = torch.compile(step, backend="aot_eager"), []
    for size in sizes:
        made = compiled(X[:size], Y[:size]), plain(X[:size], Y[:size])
        for each in made:
            each["loss"].backward()
        found += [tuple(each[key].sum().item() for each in made) for key in ("loss", "scores")]
    norms = (torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]) for module in (step, plain))
    save_checkpoint(folder, compiled)
    load_checkpoint(folder, compiled)
    return [*found, tuple(norm.item() for norm in norms)]


def test_compiled_steps_add_up_gradients_of_batches_of_any_size(tmp_path: Path) -> None:
    """Gradients are there when the compiler looks at parameters again, and what talks to other ranks is not for it."""
    plans = {strategy: plan_by(strategy)[0] for strategy in SIZES}
    for pairs, (compiled, eager) in launch(2, _compiled_and_plain, plans, _gpt_by("data-parallel"), str(tmp_path)):
        for by_compiler, plain in chain.from_iterable(pairs.values()):
            assert by_compiler == pytest.approx(plain, rel=1e-9)
        _assert_the_same(compiled, eager)


def _scaled_steps(rank: int, plan: Any, model: Any, batch: Any) -> tuple[list[float], bool, float]:
    warnings.simplefilter("ignore")
    step = load(plan, model)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=1024.0)
    losses = []
    for i in range(3):
        loss = step(batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if i == 1 and rank == 1:
            next(step.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        before = [p.detach().clone() for p in step.parameters()]
        scaler.step(optimizer)
        scaler.update()
        if i == 1:
            kept = all(torch.equal(a, b) for a, b in zip(before, step.parameters(), strict=True))
    return losses, kept, scaler.get_scale()


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    """torch's own scaler for sharded parameters: the plain one would skip the step on one rank only."""
    model, batch = mlp()
    plan = plan_of(model, batch, 2, "fsdp")
    for losses, kept, scale in launch(2, _scaled_steps, plan, model, batch):
        assert kept and scale == 512.0 and losses[0] > losses[1] == losses[2]


def test_a_model_on_the_meta_device_is_initialised_in_pieces() -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 2, "fsdp")

    def program(rank: int) -> tuple[float, int]:
        with torch.device("meta"):
            empty = Mlp().train()
        step = load(plan, empty, seed=7)
        return step(batch).item(), sum(p.numel() for p in step.parameters())

    whole = Mlp().train()
    torch.manual_seed(7)
    whole.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    expected = nn.functional.mse_loss(whole(batch[0]), batch[1]).item()
    total = sum(p.numel() for p in whole.parameters())
    for loss, held in launch(2, program):
        assert loss == pytest.approx(expected, rel=1e-6) and held < 0.6 * total
