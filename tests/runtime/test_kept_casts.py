"""Weights are cast once in a step of micro-batches; numbers are those of casts made anew, to the last bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conjoin.comm import MadeOnce
from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.machine import Machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.program import emission
from conjoin.runtime.program.kept_casts import Copies
from conjoin.runtime.ranks.threads import ThreadRanks, run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.search import make_pipeline, make_plan

HALF = torch.bfloat16
MICRO = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.relu(self.up(x)))
        return made


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Casts(TorchDispatchMode):
    """Counts casts of some tensors."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self._addresses, self.count = {x.data_ptr() for x in held}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._addresses:
            self.count += 1
        return func(*args, **kwargs or {})


@cache
def captured_tower() -> tuple[Graph, nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(2)
    model, batch = Tower().train(), (torch.randn(8, 8), torch.randn(8, 8))
    with torch.autocast("cpu", HALF):
        return capture(model, batch, nn.functional.mse_loss), model, batch


def steps(strategy: str) -> tuple[list[tuple[int, int]], list[list[Tensor]]]:
    """By rank how many casts its second step makes and how many weights it has; its gradients of both steps."""
    graph, model, batch = captured_tower()
    make = make_pipeline if strategy.startswith("pipeline") else make_plan
    plan = make(graph, Machine("here", 1, 2, "cpu"), strategy)

    def rank(world: ThreadRanks) -> tuple[tuple[int, int], list[Tensor]]:
        store = Store(plan, world.rank, torch.device("cpu"))
        store.fill(model)
        module = ParallelModule(plan, store, world)
        optimizer, found = torch.optim.SGD(module.parameters(), lr=0.5), list[Tensor]()
        for _ in range(2):
            optimizer.zero_grad()
            with Casts(list(module.parameters())) as casts:
                module(*batch).backward()
            found += [p.grad.clone().as_subclass(Tensor) for p in module.parameters() if p.grad is not None]
            optimizer.step()
        with torch.no_grad():
            module(*batch)
        return (casts.count, len(list(module.parameters()))), found

    made = run_ranks(plan.mesh, rank)
    return [counts for counts, _ in made], [gradients for _, gradients in made]


@pytest.mark.parametrize(
    "strategy",
    [
        f"data-parallel+micro={MICRO}", f"data-parallel+micro={MICRO}+recompute=full", f"megatron:tp=2+micro={MICRO}",
        f"pipeline:pp=2,micro={MICRO}", f"pipeline:pp=2,micro={MICRO},schedule=zero-bubble",
        f"pipeline:pp=2,micro={MICRO}+recompute=full",
    ],
)  # fmt: skip
def test_every_weight_is_cast_once_in_a_step(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts, gradients = steps(strategy)
    assert all(count == weights > 0 for count, weights in counts)
    monkeypatch.setattr(Copies, "of", lambda self, held, make: make())
    monkeypatch.setattr(emission, "find_made_once", lambda *given: MadeOnce(frozenset(), ()))
    anew, wanted = steps(strategy)
    assert all(count >= MICRO * weights for count, weights in anew)
    for mine, other in zip(gradients, wanted, strict=True):
        assert len(mine) == len(other) > 0 and all(map(torch.equal, mine, other))


@pytest.mark.parametrize("trains", [True, False])
def test_nothing_is_kept_of_a_step_that_failed(trains: bool) -> None:
    """Weights that are written by `data` do not tell that they were."""
    graph, model, batch = captured_tower()
    plan = make_plan(graph, Machine("here", 1, 2, "cpu"), f"data-parallel+micro={MICRO}")

    def losses(world: ThreadRanks, fails: bool) -> float:
        store = Store(plan, world.rank, torch.device("cpu"))
        store.fill(model)
        module, calls = ParallelModule(plan, store, world), 0
        local = module._program.local
        results = local.results

        def failing(*given: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == MICRO:
                raise ValueError("a micro-batch that fails")
            return results(*given)

        if fails:
            local.results = failing
            with torch.set_grad_enabled(trains), pytest.raises(ValueError, match="that fails"):
                module(*batch)
            local.results = results
        for parameter in module.parameters():
            parameter.data.mul_(0.5)
        with torch.no_grad():
            return module(*batch).item()

    found, wanted = (run_ranks(plan.mesh, lambda world: losses(world, fails)) for fails in (True, False))  # noqa: B023
    assert found == wanted
