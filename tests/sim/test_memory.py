"""Memory is followed as torch really holds it: devices train small models while every storage is counted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conjoin.frontends import capture
from conjoin.ir import Plan, Rounding
from conjoin.machine import parse_machine
from conjoin.runtime import to_module
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.search import make_plan
from conjoin.sim import Prices, measure_memory, simulate
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample


class Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are alive after each operator which may have made them the most so far."""

    def __init__(self, *outside: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.peak = self._counted = self._made = 0
        for tensor in outside:
            self._note(tensor)

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if self.alive.get(storage) != storage.nbytes():
            self.alive[storage] = storage.nbytes()
            self._made += storage.nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_leaves(result):
            if isinstance(item, Tensor):
                self._note(item)
        if self._made and self._counted + self._made > self.peak:
            self._counted, self._made = sum({s._cdata: s.nbytes() for s in list(self.alive)}.values()), 0
            self.peak = max(self.peak, self._counted)
        return result


def residual() -> tuple[nn.Module, Any, Any]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(functional.gelu(self.up(self.norm(x))))

    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 8))
    return model, (torch.randn(512, 64), torch.randn(512, 8)), functional.mse_loss


def convolutions() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 64, 10),
    )  # fmt: skip
    return model, (torch.randn(32, 3, 16, 16), torch.randint(0, 10, (32,))), functional.cross_entropy


def wide() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256))
    return model, (torch.randn(8, 256), torch.randn(8, 256)), functional.mse_loss


def tall() -> tuple[nn.Module, Any, Any]:
    """Most of its memory is what is as long as the batch, the terms of the loss among it."""
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    return model, (torch.randn(4096, 32), torch.randn(4096, 32)), functional.mse_loss


def bottleneck() -> tuple[nn.Module, Any, Any]:
    """The peak is in the backward of the loss: the prediction has a gradient, and the target has none."""
    model = nn.Sequential(nn.Linear(32, 4), nn.ReLU(), nn.Linear(4, 32))
    return model, (torch.randn(4096, 32), torch.randn(4096, 32)), functional.mse_loss


@pytest.mark.parametrize("make", [residual, convolutions, wide, tall, bottleneck])
def test_one_device_holds_what_was_predicted(make: Callable[[], tuple[nn.Module, Any, Any]], prices: Prices) -> None:
    model, batch, loss = make()
    graph = capture(model.train(), batch, loss)
    plan = make_plan(graph, parse_machine("local:1"), "single")
    predicted = measure_memory(simulate(plan, prices).program, "adam", "cpu")
    module = to_module(graph, model)
    optimizer = torch.optim.Adam(module.parameters())
    module(*batch).backward()
    optimizer.step()
    gc.collect(1)
    state = [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
    with Storages(*module.parameters(), *batch, *state) as storages:
        optimizer.zero_grad()
        module(*batch).backward()
        optimizer.step()
    assert predicted.peak == pytest.approx(storages.peak, rel=0.1)


def test_what_comes_out_beside_the_loss_is_held_and_has_no_gradient(prices: Prices) -> None:
    """As language models of libraries give it: logits, far larger than all else, beside their loss."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(2000, 8), nn.Linear(8, 2000)

        def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
            logits = self.head(self.embedding(ids))
            return {"loss": functional.cross_entropy(logits, labels), "logits": logits}

    model, batch = Head(), (torch.randint(2000, (256,)), torch.randint(2000, (256,)))
    graph = capture(model, batch)
    predicted = measure_memory(
        simulate(make_plan(graph, parse_machine("local:1"), "single"), prices).program, "sgd", "cpu"
    )
    module = to_module(graph, model)
    module(*batch)["loss"].backward()
    module.zero_grad()
    gc.collect(1)
    with Storages(*module.parameters(), *batch) as storages:
        made = module(*batch)
        made["loss"].backward()
    assert predicted.peak == pytest.approx(storages.peak, rel=0.02)


def held_by_ranks(plan: Plan, found: Sample, folder: Path) -> int:
    """The most that a rank holds in a step beside its inputs."""
    batch = found.inputs

    def step(communicator: Communicator) -> int:
        module = module_on(plan, found, communicator)
        module(*batch).backward()
        module.zero_grad()
        gc.collect(1)
        with Storages(*module.parameters(), *batch) as storages:
            module(*batch).backward()
        return storages.peak - sum(x.nbytes for x in batch)

    return int(max(run_processes(plan.mesh, step, folder)))


def test_ranks_hold_what_was_predicted(prices: Prices, tmp_path: Path) -> None:
    """A partial sum is summed up over two ranks, and the batch is split over two."""
    model, batch, loss = tall()
    graph = capture(model.train(), batch, loss)
    plan = make_plan(graph, parse_machine("local:4"), "megatron:tp=2,dp=2")
    predicted = measure_memory(simulate(plan, prices).program, "sgd", "cpu")
    held = held_by_ranks(plan, Sample(graph, model, batch), tmp_path)
    assert predicted.peak - predicted.inputs == pytest.approx(held, rel=0.03)


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
@pytest.mark.parametrize("sums", [None, torch.bfloat16])
def test_ranks_hold_what_was_predicted_in_mixed_precision(
    strategy: str, sums: torch.dtype | None, prices: Prices, tmp_path: Path
) -> None:
    model, batch, loss = wide()
    with torch.autocast("cpu", torch.bfloat16):
        graph = replace(capture(model.train(), batch, loss), rounding=Rounding(sums=sums))
    plan = make_plan(graph, parse_machine("local:2"), strategy)
    predicted = measure_memory(simulate(plan, prices).program, "sgd", "cpu")
    held = held_by_ranks(plan, Sample(graph, model, batch), tmp_path)
    assert predicted.peak - predicted.inputs == pytest.approx(held, rel=0.15)


def test_what_stays_is_counted_exactly(tiny_plan: Callable[..., Plan], prices: Prices) -> None:
    plan = tiny_plan("mlp", "local:1", "single")
    found = measure_memory(simulate(plan, prices).program, "adamw")
    trained = sum(leaf.type.bytes for leaf in plan.graph.leaves if leaf.trainable)
    assert (found.parameters, found.optimizer_state, found.gradients) == (trained, 2 * trained, trained)
    assert measure_memory(simulate(plan, prices).program, "sgd").optimizer_state == 0
    assert found.peak == max(found.curve) == found.curve[found.peak_place]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("strategy", "error"), [("context:cp=2", 0.001), ("context:cp=2,ring", 0.03)])
def test_ranks_hold_what_was_predicted_of_a_split_sequence(
    strategy: str, error: float, prices: Prices, tmp_path: Path
) -> None:
    """Of the last rank, which looks at the most keys; and of all around a ring, with what goes and comes."""
    model, batch = Attends(), (torch.randn(2, 256, 32), torch.randn(2, 256, 32))
    graph = capture(model, batch, functional.mse_loss)
    plan = make_plan(graph, parse_machine("local:2"), strategy)
    predicted = measure_memory(simulate(plan, prices).program, "sgd", "cpu")
    held = held_by_ranks(plan, Sample(graph, model, batch), tmp_path)
    assert predicted.peak - predicted.inputs == pytest.approx(held, rel=error)


def test_storing_in_pieces_and_gathering_again_take_less(tiny_plan: Callable[..., Plan], prices: Prices) -> None:
    def peak(strategy: str) -> int:
        return measure_memory(simulate(tiny_plan("mlp", "local:4", strategy), prices).program, "adam").peak

    assert peak("fsdp") <= peak("zero1") < peak("data-parallel")


@pytest.mark.parametrize("make", [residual, wide])
def test_what_was_sent_is_not_held_while_parameters_are_unpacked(
    make: Callable[[], tuple[nn.Module, Any, Any]], prices: Prices, tmp_path: Path
) -> None:
    model, batch, loss = make()
    graph = capture(model.train(), batch, loss)
    plan = make_plan(graph, parse_machine("local:2"), "fsdp")
    predicted = measure_memory(simulate(plan, prices).program, "sgd", "cpu")
    held = held_by_ranks(plan, Sample(graph, model, batch), tmp_path)
    assert predicted.peak - predicted.inputs == pytest.approx(held, rel=0.005)


class Recogniser(nn.Module):
    """Most of its memory are likelihoods of places in targets, which the loss makes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 12)

    def forward(self, x: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        scores = self.layer(x).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(scores, targets, torch.full((8,), 40), lengths)


@pytest.mark.parametrize("shape", [(8, 15), (8 * 15,)])
def test_likelihoods_of_alignments_are_counted(shape: tuple[int, ...], prices: Prices) -> None:
    """torch's allocator is the judge: what is made inside of an operator is no result of any."""
    model, batch = Recogniser(), (torch.randn(8, 40, 16), torch.randint(1, 12, shape), torch.full((8,), 15))
    plan = make_plan(capture(model.train(), batch, None), parse_machine("local:1"), "single")
    predicted = measure_memory(simulate(plan, prices).program, "sgd", "cpu")
    model(*batch).backward()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        model(*batch).backward()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    held = max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    assert predicted.peak - predicted.inputs - predicted.parameters == pytest.approx(held, rel=0.03)
