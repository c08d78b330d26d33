"""The ordinary calls of a loop on a module of several ranks: as on one device, or refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conjoin.errors import UsageError
from conjoin.frontends import capture
from conjoin.ir import Plan
from conjoin.machine import parse_machine
from conjoin.runtime import ParallelModule, Piece, full_state_dict
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample

NUM_STEPS = 12
Losses = list[float]


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    features = [torch.randn(8, 6, generator=generator).double() for _ in range(4)]
    return [(x, x[:, :4].argmax(1)) for x in features]


def on_ranks(use: Callable[[ParallelModule], Any], strategy: str = "fsdp", model: nn.Module | None = None) -> Any:
    """What two ranks say, which is the same."""
    model = model or classifier()
    graph = capture(model.train(), batches()[0], functional.cross_entropy)
    plan = make_plan(graph, parse_machine("local:2"), strategy)
    assert isinstance(plan, Plan)
    sample = Sample(graph, model, batches()[0])
    first, second = run_ranks(plan.mesh, lambda ranks: use(module_on(plan, sample, ranks)))
    return first, second


def plain_loss(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, y: functional.cross_entropy(model(x), y)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    """As nanoGPT has them: matrices decay, the rest does not; by names, since pieces have fewer elements."""
    named = dict(module.named_parameters())
    decays = [p for name, p in named.items() if name.endswith("weight") and not name.startswith("1.")]
    others = [p for p in named.values() if all(p is not q for q in decays)]
    return [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]


def loop(
    module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], no_sync: Callable[[], Any] | None = None
) -> tuple[Losses, Losses]:
    """Groups, a schedule, accumulation, a scaler, clipping, an average of the weights: losses, and rates."""
    optimizer = torch.optim.AdamW(groups_of(module), lr=1e-2)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS - 3)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, fall], [3])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=4)
    average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    losses: Losses = []
    for _ in range(NUM_STEPS):
        parts = batches()
        for place, (x, y) in enumerate(parts):
            if no_sync is not None and place < len(parts) - 1:
                with no_sync():
                    value = loss(x, y) / len(parts)
                    scaler.scale(value).backward()
            else:
                value = loss(x, y) / len(parts)
                scaler.scale(value).backward()
            losses.append(value.item())
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.3)
        losses.append(norm.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
        average.update_parameters(module)
    x, y = batches()[0]
    with torch.no_grad():
        whole = isinstance(module, ParallelModule)
        losses.append((average(x, y) if whole else functional.cross_entropy(average(x), y)).item())
    return losses, [*schedule.get_last_lr(), scaler.get_scale()]


@pytest.mark.parametrize("strategy", ["fsdp", "megatron", "zero1"])
def test_a_whole_loop_is_that_of_one_device(strategy: str) -> None:
    plain = classifier()
    losses, rates = loop(plain, plain_loss(plain))
    first, second = on_ranks(lambda step: loop(step, step, step.no_sync), strategy)
    assert first == second and first[1] == rates and first[0] == pytest.approx(losses, rel=1e-9)


def test_a_state_of_pieces_is_saved_by_torch_and_loaded_on_the_same_rank_only() -> None:
    def use(step: ParallelModule) -> tuple[float, float, bool]:
        file, (x, y) = io.BytesIO(), batches()[0]
        before = step(x, y).item()
        torch.save(step.state_dict(), file)
        with torch.no_grad():
            for parameter in step.parameters():
                parameter.zero_()
        file.seek(0)
        state = torch.load(file)
        step.load_state_dict(state)
        with pytest.raises(RuntimeError, match="was called on a piece of a tensor"):
            classifier().load_state_dict(state)
        return before, step(x, y).item(), any(isinstance(value, Piece) for value in state.values())

    for before, after, has_pieces in on_ranks(use):
        assert before == after and has_pieces


def test_plain_weights_go_in_and_come_out() -> None:
    wanted = {name: torch.full_like(x, 0.25) for name, x in classifier().state_dict().items()}

    def use(step: ParallelModule) -> dict[str, Tensor]:
        step.load_state_dict(wanted)
        return full_state_dict(step, everywhere=True)

    for found in on_ranks(use):
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], x) for name, x in wanted.items())


def test_another_wrapper_around_it_is_refused() -> None:
    step = on_ranks(lambda step: step)[0]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="Use the module that") as told:
            nn.parallel.DistributedDataParallel(step)
    finally:
        dist.destroy_process_group()
    assert_three_sentences(told.value)


class Adapted(nn.Module):
    """A layer that stays as it is, and a small product beside it that learns (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, dtype=torch.float64) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.base.weight, self.base.bias) + x @ self.down.T @ self.up.T


def adapted() -> nn.Module:
    model = classifier().requires_grad_(False)
    model[0], model[3] = Adapted(model[0], 2), Adapted(model[3], 2)  # type: ignore[index, operator]
    return model


def tune(module: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Losses:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=5e-2)
    losses = []
    for x, y in batches() * 2:
        optimizer.zero_grad()
        value = loss(x, y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("strategy", ["fsdp", "data-parallel"])
def test_adapters_alone_learn_and_are_taken_out_by_name(strategy: str) -> None:
    plain = adapted()
    expected = tune(plain, plain_loss(plain))

    def use(step: ParallelModule) -> tuple[Losses, dict[str, Tensor]]:
        return tune(step, step), full_state_dict(step, everywhere=True)

    losses, weights = on_ranks(use, strategy, adapted())[0]
    assert losses == pytest.approx(expected, rel=1e-9) and losses[4] < losses[0]
    trained = {name: x for name, x in weights.items() if name.endswith(("down", "up"))}
    frozen = {name: x for name, x in adapted().state_dict().items() if name not in trained}
    assert len(trained) == 4 and all(torch.equal(weights[name], x) for name, x in frozen.items())
    again = adapted()
    again.load_state_dict(trained, strict=False)
    assert all(torch.allclose(x, again.state_dict()[name], rtol=1e-9) for name, x in plain.state_dict().items())


def test_layers_of_the_module_are_not_there_to_be_called() -> None:
    """Each would do nothing, and nobody would know."""

    def use(module: ParallelModule) -> None:
        layer = module.get_submodule("0")
        for call in (
            lambda: module.apply(lambda layer: None),
            lambda: layer.register_forward_hook(lambda layer, given, made: None),
            lambda: layer.register_full_backward_hook(lambda layer, given, made: None),
            lambda: layer(torch.randn(8, 6)),
            lambda: layer[1],
        ):
            with pytest.raises(UsageError) as told:
                call()
            assert_three_sentences(told.value)

    on_ranks(use)


@pytest.mark.parametrize("strategy", ["fsdp", "data-parallel"])
def test_what_was_frozen_in_the_plan_is_not_trained_in_silence(strategy: str) -> None:
    model = classifier()
    model[0].requires_grad_(False)

    def use(module: ParallelModule) -> None:
        x, y = batches()[0]
        module(x, y).backward()
        module.get_parameter("0.weight").requires_grad_(True)
        with torch.no_grad():
            module(x, y)
        with pytest.raises(UsageError) as told:
            module(x, y)
        assert_three_sentences(told.value)

    on_ranks(use, strategy, model)
