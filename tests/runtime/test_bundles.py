"""Parameters in bundles: many small ones, gathered ahead and dropped again, over several steps of training."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from conjoin.ir import REGATHER, LeafKind, MemoryAction, Plan, region_of, region_shape
from conjoin.runtime import to_module
from conjoin.runtime.movement import bundles
from conjoin.runtime.ranks.communicator import Communicator, Done
from conjoin.runtime.ranks.threads import run_ranks
from tests.runtime.hand_plans import by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample


@pytest.fixture(params=[1, 600, 25 * 2**20], ids=["one by one", "some", "all"])
def bundle_bytes(request: pytest.FixtureRequest) -> int:
    """How much goes in a bundle."""
    return int(request.param)


def deep() -> Sample:
    layers: list[nn.Module] = [nn.Embedding(12, 8)]
    for _ in range(3):
        layers += [nn.Linear(8, 8), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(8, 4))
    return captured(model, (torch.randint(12, (8,)), torch.randn(8, 4)), functional.mse_loss)


def regathering(plan: Plan) -> Plan:
    names = [leaf.name for leaf in plan.graph.leaves_of(LeafKind.PARAMETER) if leaf.type.layout]
    return replace(plan, memory=tuple(MemoryAction(REGATHER, name) for name in names))


def train(module: nn.Module, batches: list[tuple[Tensor, ...]], way: str) -> dict[str, Tensor]:
    """Some steps; the parameters at the end."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        match way:
            case "plain":
                module(*batches[step]).backward()
            case "accumulated":
                for batch in batches[step : step + 2]:
                    module(*batch).backward()
            case "together":
                torch.stack([module(*batch) for batch in batches[step : step + 2]]).sum().backward()
            case "with evaluation":
                with torch.no_grad():
                    module(*batches[step + 1])
                loss = module(*batches[step])
                module(*batches[step + 1])  # a forward pass whose backward never comes
                loss.backward()
        optimizer.step()
        with torch.no_grad():
            module(*batches[step])
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("way", ["plain", "accumulated", "together", "with evaluation"])
@pytest.mark.parametrize("kind", ["fsdp", "fsdp, gathered again", "data-parallel"])
def test_training_in_bundles(kind: str, way: str, bundle_bytes: int) -> None:
    sample = deep()
    plan = by_strategy(sample, kind.partition(",")[0], 2)
    plan = replace(regathering(plan) if "again" in kind else replace(plan, memory=()), bundle_bytes=bundle_bytes)
    x, y = sample.inputs
    batches: list[tuple[Tensor, ...]] = [(torch.randint(12, x.shape), torch.randn_like(y)) for _ in range(4)]
    want = train(to_module(sample.graph, copy.deepcopy(sample.model)), batches, way)
    layouts = {leaf.name: leaf.type.layout for leaf in plan.graph.leaves}

    def program(communicator: Communicator) -> dict[str, Any]:
        return train(module_on(plan, sample, communicator), batches, way)

    for rank, got in enumerate(run_ranks(plan.mesh, program)):
        for name, whole in want.items():
            region = region_of(tuple(whole.shape), layouts[name], plan.mesh, rank)
            torch.testing.assert_close(got[name], whole[tuple(slice(*s) for s in region)], rtol=1e-9, atol=1e-12)


def test_bundles_are_as_large_as_asked(bundle_bytes: int) -> None:
    sample = deep()
    plan = replace(by_strategy(sample, "fsdp", 2), bundle_bytes=bundle_bytes)

    def program(communicator: Communicator) -> list[int]:
        made = bundles.make_bundles(plan, communicator)
        return [len(bundle.entries) for bundle in made if bundle.kind.gathered]

    counts = run_ranks(plan.mesh, program)
    assert counts[0] == counts[1] == {1: [1] * 9, 600: counts[0], 25 * 2**20: [9]}[bundle_bytes]


def test_what_is_gathered_again_is_dropped_in_between() -> None:
    sample = deep()
    kept = replace(by_strategy(sample, "fsdp", 2), memory=(), bundle_bytes=600)

    def program(communicator: Communicator, plan: Plan) -> tuple[int, int, int]:
        """How many whole weights are there after the forward pass, and the bytes sent there and back."""
        module = module_on(plan, sample, communicator)
        loss = module(*sample.inputs)
        there = communicator.bytes_sent
        alive = sum(made() is not None for bundle in module._program.local.bundles for made in bundle.ticket.made)
        loss.backward()
        return alive, there, communicator.bytes_sent - there

    plans = kept, regathering(kept)
    (alive, there, back), (dropped, again, more) = (run_ranks(p.mesh, lambda c, p=p: program(c, p))[0] for p in plans)
    assert alive >= 4 and dropped == 0
    assert again == there and more > back, "backward gathers once more"


def test_a_parameter_changed_before_its_backward_pass_is_noticed() -> None:
    sample = deep()
    plan = regathering(by_strategy(sample, "fsdp", 2))

    def program(communicator: Communicator) -> str:
        module = module_on(plan, sample, communicator)
        loss = module(*sample.inputs)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
        with pytest.raises(RuntimeError) as told:
            loss.backward()
        return str(told.value)

    for message in run_ranks(plan.mesh, program):
        assert "A parameter was changed between a forward pass and its backward pass" in message


class Counted:
    """Counts the collectives that are under way."""

    under_way = most = 0

    def __init__(self) -> None:
        Counted.under_way += 1
        Counted.most = max(Counted.most, Counted.under_way)

    def wait(self) -> None:
        Counted.under_way -= 1


def test_few_reduce_scatters_hold_gradients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "under_way", 0)
    monkeypatch.setattr(Counted, "most", 0)
    sample = deep()
    plan = replace(by_strategy(sample, "fsdp", 2), bundle_bytes=1)

    def program(communicator: Communicator) -> None:
        module = module_on(plan, sample, communicator)
        if communicator.rank == 0:
            reduce_scatter = communicator.reduce_scatter
            communicator.reduce_scatter = lambda *args: (reduce_scatter(*args), Counted())[1]  # type: ignore[method-assign]
        module(*sample.inputs).backward()

    run_ranks(plan.mesh, program)
    assert Counted.most == 2 and Counted.under_way == 0


class PartlyUnused(nn.Module):
    """Layers with no part in the loss: drawn from and left, under no_grad, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.drawn, self.watched, self.idle = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        functional.dropout(self.drawn(x), 0.5)
        with torch.no_grad():
            shift = self.watched(x)
        return functional.dropout(self.used(x) + shift, 0.5)


@pytest.mark.parametrize("strategy", ["data-parallel", "zero1", "fsdp"])
def test_what_has_no_part_in_the_loss_has_no_gradient(strategy: str, bundle_bytes: int) -> None:
    """An optimizer lets a weight decay whose gradient is zeros, and leaves one alone that has none."""
    model = PartlyUnused().double()
    sample = captured(model, (torch.randn(8, 4), torch.randn(8, 4)), functional.mse_loss)
    plan = replace(by_strategy(sample, strategy, 2), bundle_bytes=bundle_bytes)

    def program(communicator: Communicator) -> set[str]:
        module = module_on(plan, sample, communicator)
        module(*sample.inputs).backward()
        return {name for name, parameter in module.named_parameters() if parameter.grad is not None}

    functional.mse_loss(model(sample.inputs[0]), sample.inputs[1]).backward()
    wanted = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert run_ranks(plan.mesh, program) == [wanted, wanted] and wanted == {"used.weight", "used.bias"}


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls that copy elements."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += any(word in name for word in ("copy", "cat", "clone")) or name == "zero_"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_ranks", "copies"), [(2, (2, 1)), (3, (2, 1))])
def test_a_bundle_is_packed_by_one_call(num_ranks: int, copies: tuple[int, int]) -> None:
    """Pack what is stored and put parameters together; pack gradients: one call each, also where pieces are uneven."""
    sample = deep()
    plan = by_strategy(sample, "fsdp", num_ranks)

    def program(communicator: Communicator) -> tuple[int, int]:
        (bundle,) = bundles.make_bundles(plan, communicator)
        regions = [region_of(x.type.shape, x.type.layout, plan.mesh, communicator.rank) for x in bundle.leaves]
        held = tuple(torch.ones(region_shape(region), dtype=torch.float64) for region in regions)
        communicator.all_gather = lambda *args: Done()  # type: ignore[method-assign]
        communicator.reduce_scatter = lambda *args: Done()  # type: ignore[method-assign]
        with Copies() as forward:
            made = bundle.mover.bring(held)
        with Copies() as backward:
            bundle.mover.scatter(made, False)
        return forward.count, backward.count

    assert run_ranks(plan.mesh, program) == [copies] * num_ranks
