"""Loading a plan on real ranks: what is refused before the first collective, and what is made to agree."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from conjoin.errors import ConjoinError, PlanError, RankError, UsageError
from conjoin.ir import REGATHER, MemoryAction
from conjoin.runtime import launch, load
from tests.runtime.models import Mlp, captured, mlp, plan_of


def message_of(action: Any) -> str:
    """What a refused action says; three sentences."""
    try:
        action()
    except ConjoinError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def test_one_rank_needs_no_process_group() -> None:
    model, batch = mlp()
    step = load(plan_of(model, batch, 1, "single"), model, device="cpu")
    assert torch.equal(step(batch), nn.functional.mse_loss(model(batch[0]), batch[1]))
    assert not dist.is_initialized()


def test_a_plan_for_more_ranks_says_how_to_start_them() -> None:
    model, batch = mlp()
    with pytest.raises(PlanError, match=r"needs 2 ranks.*torchrun --nproc-per-node 2"):
        load(plan_of(model, batch, 2), model)


def test_another_number_of_ranks_is_refused() -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 4)
    said = launch(2, lambda rank: message_of(lambda: load(plan, model)))
    assert all(text.startswith("PlanError: The plan of Mlp is for 4 ranks and 2 are running.") for text in said)


def test_ranks_with_different_plans_are_refused_by_name() -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 3)
    other = replace(plan, memory=(MemoryAction(REGATHER, "up.weight"),))
    said = launch(3, lambda rank: message_of(lambda: load(other if rank == 2 else plan, model)))
    assert all("do not agree on the plan: rank 2 has another than rank 0" in text for text in said), said


def test_models_initialised_differently_take_the_values_of_the_first_rank() -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 2)

    def program(rank: int) -> float:
        torch.manual_seed(rank)
        mine = Mlp().train()
        return load(plan, mine)(batch).item()

    losses = launch(2, program)
    torch.manual_seed(0)
    expected = nn.functional.mse_loss(Mlp().train()(batch[0]), batch[1]).item()
    assert losses == [pytest.approx(expected, rel=1e-6)] * 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda m: setattr(m, "up", nn.Linear(8, 16)), r"up.weight is f32\[16,8\] instead of f32\[32,8\]"),
        (lambda m: m.up.weight.requires_grad_(False), "up.weight is frozen, which it was not"),
        (lambda m: m.double(), r"up.weight is f64\[32,8\] instead of f32\[32,8\]"),
        (lambda m: delattr(m, "down"), "there is no param down.weight"),
    ],
    ids=["shape", "frozen", "dtype", "missing"],
)
def test_a_changed_model_is_refused(change: Any, why: str) -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 1, "single")
    change(model)
    with pytest.raises(PlanError, match=why):
        load(plan, model)


def test_what_is_no_model_is_refused() -> None:
    model, batch = mlp()
    with pytest.raises(UsageError, match="A dict was given instead of the model"):
        load(plan_of(model, batch, 1, "single"), {})  # type: ignore[arg-type]


def test_an_illegal_plan_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    model, batch = mlp()
    path = tmp_path / "plan.json"
    plan_of(model, batch, 2).save(path)
    path.write_text(path.read_text().replace("param:up.weight f32[32,8]", "param:up.weight f32[32,8]{d0:B}", 1))
    said = launch(2, lambda rank: message_of(lambda: load(path, model)))
    assert all("PlanError" in text and "param:up.weight: is stored as B on axis d0" in text for text in said), said


def test_inputs_may_be_whole_or_local_and_nothing_else() -> None:
    model, batch = mlp(batch=7)
    plan = plan_of(model, batch, 2)

    def program(rank: int) -> tuple[float, float, str]:
        step = load(plan, model)
        part = slice(0, 4) if rank == 0 else slice(4, 7)
        local = tuple(x[part] for x in batch)
        wrong = message_of(lambda: step((batch[0][:5], batch[1])))
        return step(batch).item(), step(local).item(), wrong

    for whole, local, wrong in launch(2, program):
        assert whole == local
        assert "f32[7,8]{d0:S(0)} as a whole" in wrong and "shape (5, 8) came" in wrong


def test_loading_twice_works() -> None:
    model, batch = mlp()
    plan = plan_of(model, batch, 2)

    def program(rank: int) -> list[float]:
        return [load(plan, copy.deepcopy(model))(batch).item() for _ in range(2)]

    for first, second in launch(2, program):
        assert first == second


def test_a_mode_switch_is_refused() -> None:
    model, batch = mlp()
    step = load(plan_of(model, batch, 1, "single"), model, device="cpu")
    assert step.train() is step
    with pytest.raises(UsageError, match="made in training mode was asked to switch to eval"):
        step.eval()


def test_ranks_that_seed_differently_still_draw_alike_where_they_must() -> None:
    model, batch = mlp(dropout=0.5)
    plan = plan_of(model, batch, 2, "reduction")

    def program(rank: int) -> list[float]:
        torch.manual_seed(rank)
        step = load(plan, model)
        return [step(batch).item() for _ in range(3)]

    first, second = launch(2, program)
    assert first == second and len(set(first)) == 3


def test_generators_that_part_later_are_found_out() -> None:
    model, batch = mlp(dropout=0.5)
    plan = plan_of(model, batch, 2, "reduction")

    def program(rank: int) -> str:
        step = load(plan, model)
        step(batch)
        torch.rand(1 + rank)
        step(batch)
        return message_of(lambda: step(batch))

    assert all("drew different random numbers" in text for text in launch(2, program))
    assert RankError.__name__ in launch(2, program)[0]


def test_captured_graph_is_what_the_plan_was_made_from() -> None:
    model, batch = mlp()
    assert plan_of(model, batch, 2).model.name == captured(model, batch).name


def test_what_would_never_run_or_train_is_refused() -> None:
    """Ranks train pieces: hooks on the model's own parameters, and optimizers of these, would be left behind."""
    model, batch = mlp()
    plan = plan_of(model, batch, 1, "single")
    hook = model.up.weight.register_hook(lambda gradient: 2 * gradient)
    assert "up.weight has a hook on its gradient" in message_of(lambda: load(plan, model, device="cpu"))
    hook.remove()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = load(plan, model, device="cpu")
    step(batch).backward()
    assert "Make the optimizer of step.parameters()" in message_of(optimizer.step)
    nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()  # the plain model by itself is trained as ever
