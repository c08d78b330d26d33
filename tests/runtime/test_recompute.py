"""Segments run again in the backward pass: same loss, gradients and buffers, fewer bytes kept, bytes sent as told."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import conjoin
from conjoin.errors import PlanError
from conjoin.frontends import capture
from conjoin.ir import (
    RECOMPUTE,
    Graph,
    MemoryAction,
    Plan,
    check_plan,
    operators_of,
    plan_from_json,
    plan_to_json,
    recompute_actions,
)
from conjoin.machine import parse_machine
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_plan
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample


class Layer(nn.Module):
    """One layer of a transformer, with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        heads = [layer(y).unflatten(-1, (4, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        attended = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.down(functional.gelu(self.up(self.norms[1](x)))))


class Transformer(nn.Module):
    def __init__(self, width: int = 16, depth: int = 1) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(12, width), nn.Sequential(*(Layer(width) for _ in range(depth)))
        self.head = nn.Linear(width, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def transformer_loss(scores: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def convolutions() -> nn.Module:
    """A small network with batch norm, whose statistics must be taken once, and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4),
    )  # fmt: skip


@cache
def sample(name: str) -> Sample:
    """Blocks are found where there are two of them."""
    torch.manual_seed(3)
    if name in ("transformer", "two layers"):
        model: nn.Module = Transformer(depth=2 if name == "two layers" else 1)
        inputs: tuple[Tensor, ...] = (torch.randint(12, (4, 6)), torch.randint(12, (4, 6)))
        return Sample(capture(model.train(), inputs, transformer_loss), model, inputs)
    model, inputs = convolutions(), (torch.randn(4, 3, 8, 8), torch.randint(4, (4,)))
    return Sample(capture(model.train(), inputs, functional.cross_entropy), model, inputs)


def plan_for(graph: Graph, strategy: str, length: int, ranks: int = 4) -> tuple[Plan, Plan]:
    """A plan, and the same with segments of that many operators run again, read from its file's text."""
    plan = make_plan(graph, parse_machine(f"local:{ranks}"), strategy)
    count = len(operators_of(plan.graph))
    segments = [(i, min(i + length, count) - 1) for i in range(0, count, length)]
    again = replace(plan, memory=(*plan.memory, *recompute_actions(plan.graph, segments)))
    return plan, check_plan(plan_from_json(plan_to_json(again)))


CASES = [
    ("transformer", "data-parallel"), ("transformer", "fsdp"), ("transformer", "megatron:tp=2"),
    ("transformer", "megatron:tp=4,sp"), ("convolutions", "data-parallel"), ("convolutions", "fsdp"),
    ("convolutions", "spatial"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_training_is_as_on_one_device(name: str, strategy: str) -> None:
    found = sample(name)
    _, again = plan_for(found.graph, strategy, 4 if "=" in strategy else 11)
    case = Case(again, found.graph, found.model, found.inputs)
    assert verify_in_process(case, 2).passed


@pytest.mark.parametrize(("name", "strategy"), CASES)
def test_what_is_sent_is_told(name: str, strategy: str) -> None:
    found = sample(name)
    plan, again = plan_for(found.graph, strategy, 9)

    def program(communicator: Communicator) -> int:
        module_on(again, found, communicator)(*found.inputs).backward()
        return communicator.bytes_sent

    told, sent = explain(again), run_ranks(again.mesh, program)
    assert told.num_recomputed > 0 and told.num_regathered >= explain(plan).num_regathered
    assert sent == [told.bytes_of(rank) for rank in range(4)]
    assert told.sent().total >= explain(plan).sent().total


def train_single(plan: Plan, found: Sample, in_between: bool) -> tuple[float, list[Tensor], list[Tensor]]:
    """A step on one device, whose draws follow from the seed: loss, gradients, buffers."""

    def program(communicator: Communicator) -> tuple[float, list[Tensor], list[Tensor]]:
        module = module_on(plan, found, communicator)
        loss = module(*found.inputs)
        if in_between:
            loss = loss + 2 * module(*found.inputs)
        loss.backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        return float(loss.detach()), gradients, list(module.buffers())

    torch.manual_seed(11)
    return run_ranks(plan.mesh, program)[0]


@pytest.mark.parametrize("in_between", [False, True])
@pytest.mark.parametrize("name", ["transformer", "convolutions"])
def test_the_same_numbers_are_drawn_again(name: str, in_between: bool) -> None:
    """Also where another forward pass has drawn since; and statistics of batch norm are taken once a pass."""
    found = sample(name)
    plan, again = plan_for(found.graph, "single", 9, ranks=1)
    plain, repeated = (train_single(p, found, in_between) for p in (plan, again))
    assert plain[0] == repeated[0] and plain[1]
    torch.testing.assert_close(repeated[1:], plain[1:], rtol=0, atol=0)


def kept_bytes(plan: Plan, found: Sample) -> int:
    """What autograd keeps on rank 0 between the forward and the backward pass, parameters and inputs aside."""

    def program(communicator: Communicator) -> int:
        module = module_on(plan, found, communicator)
        outside = {x.untyped_storage().data_ptr() for x in (*module.parameters(), *module.buffers(), *found.inputs)}
        kept: dict[int, int] = {}
        keeping = [True]

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if keeping and storage.data_ptr() not in outside:
                kept[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss = module(*found.inputs)
        keeping.clear()
        loss.backward()
        return sum(kept.values())

    torch.manual_seed(5)
    return run_ranks(plan.mesh, program)[0]


@pytest.mark.parametrize("name", ["transformer", "convolutions"])
def test_autograd_keeps_much_less(name: str) -> None:
    found = sample(name)
    plan, again = plan_for(found.graph, "data-parallel", 1000, ranks=2)
    assert kept_bytes(again, found) < 0.1 * kept_bytes(plan, found)
    plan, again = plan_for(found.graph, "data-parallel", 10, ranks=2)
    assert kept_bytes(again, found) < 0.7 * kept_bytes(plan, found)


def test_without_gradients_nothing_is_prepared() -> None:
    found = sample("convolutions")
    _, again = plan_for(found.graph, "data-parallel", 5, ranks=2)

    def program(communicator: Communicator) -> tuple[bool, Any]:
        module = module_on(again, found, communicator)
        with torch.no_grad():
            loss = module(*found.inputs)
        return loss.requires_grad, module.code

    (requires_grad, code), _ = run_ranks(again.mesh, program)
    assert not requires_grad and "which the backward pass runs again" in code


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the kernels of products and of attention that run, and the bytes that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: Counter[str] = Counter()
        self._alive: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        self.kernels[name] += name in ("mm", "addmm") or "attention" in name
        for x in made if isinstance(made, tuple | list) else (made,):
            if isinstance(x, Tensor):
                self._alive[x.untyped_storage()] = x.untyped_storage().nbytes()
        return made

    def bytes(self) -> int:
        return sum({storage._cdata: storage.nbytes() for storage in list(self._alive)}.values())


class Selected(nn.Module):
    """A layer under torch's own selective checkpointing, which keeps attention and every other product."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> Any:
        seen: Counter[bool] = Counter()

        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            name = op.__name__.partition(".")[0]
            seen[ctx.is_recompute] += name in ("mm", "addmm")
            is_kept = "attention" in name or (name in ("mm", "addmm") and seen[ctx.is_recompute] % 2 == 1)
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)


def watched(run: Callable[[], Tensor]) -> tuple[Counter[str], int]:
    """What kernels a step runs, and the bytes that are alive between its two passes."""
    with Watching() as watch:
        loss = run()
        alive = watch.bytes()
        loss.backward()
    return watch.kernels, alive


def test_selective_runs_and_keeps_no_more_than_torchs_own_selective_checkpointing() -> None:
    torch.manual_seed(7)
    model = Transformer(64, 3).train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    inputs = torch.randint(12, (4, 32)), torch.randint(12, (4, 32))
    found = Sample(capture(model, inputs, transformer_loss), model, inputs)
    plan = make_plan(found.graph, parse_machine("local:1"), "single+recompute=selective")
    mine = run_ranks(plan.mesh, lambda ranks: _watched_plan(plan, found, ranks))[0]
    judge = copy.deepcopy(model)
    judge.layers = nn.Sequential(*(Selected(layer) for layer in judge.layers))
    kernels, alive = watched(lambda: transformer_loss(judge(inputs[0]), inputs[1]))
    assert mine[0] == kernels and kernels["_scaled_dot_product_flash_attention_for_cpu"] == 3
    assert mine[1] <= 1.01 * alive


def _watched_plan(plan: Plan, found: Sample, ranks: Communicator) -> tuple[Counter[str], int]:
    module = module_on(plan, found, ranks)
    return watched(lambda: module(*found.inputs))


def test_kept_operators_stand_in_the_file() -> None:
    plan = make_plan(sample("two layers").graph, parse_machine("local:2"), "fsdp+recompute=selective")
    named = [action.tensor for action in plan.memory if action.action == RECOMPUTE]
    assert len(named) == 2 and all(" but %" in name for name in named)
    assert check_plan(plan_from_json(plan_to_json(plan))) == plan
    other = replace(plan, memory=(MemoryAction(RECOMPUTE, f"{named[0].partition(' but')[0]} but %1"),))
    with pytest.raises(PlanError, match="keeps what no operator of it makes"):
        check_plan(other)
    found = sample("two layers")
    assert verify_in_process(Case(plan, found.graph, found.model, found.inputs), 2).passed


class Dropping(nn.Module):
    """Attention that draws inside, and a draw after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.up(self.norm(x)).chunk(3, -1))
        read = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return x + functional.dropout(self.down(read.transpose(1, 2).flatten(2)), 0.3)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_what_is_drawn_after_kept_attention_that_draws_is_the_same_in_both_runs(strategy: str, ranks: int) -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(Dropping(), Dropping()).double().train(), torch.randn(4, 5, 8, dtype=torch.float64)

    def loss(out: Tensor) -> Tensor:
        return out.square().mean()

    plan = conjoin.plan(model, batch, f"local:{ranks}", strategy=f"{strategy}+recompute=selective", loss=loss)
    assert conjoin.verify_plan(plan, model, batch, loss=loss, num_steps=2).passed
