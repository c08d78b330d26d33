"""A step in micro-batches: loss and gradients of the whole batch, one micro-batch alive at a time, sums sent once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from math import inf

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import PlanError, StrategyError, UsageError
from conjoin.frontends import capture
from conjoin.ir import (
    Plan,
    check_plan,
    computation_digest,
    cut_in_micro_batches,
    model_mark,
    operators_of,
    plan_from_json,
    plan_to_json,
    recompute_actions,
)
from conjoin.machine import parse_machine
from conjoin.report import explain
from conjoin.runtime.movement.carriers import carry_reshard
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_plan
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample
from tests.runtime.test_recompute import Transformer, convolutions, transformer_loss


@cache
def sample(name: str) -> Sample:
    torch.manual_seed(3)
    if name.startswith("transformer"):
        model: nn.Module = Transformer()
        if not name.endswith("dropout"):
            for module in model.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        inputs: tuple[Tensor, ...] = (torch.randint(12, (8, 5)), torch.randint(12, (8, 5)))
        inputs[1][0, :3] = -100  # samples do not count alike: the mean is over all of the batch
        return Sample(capture(model.train(), inputs, transformer_loss), model, inputs)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    inputs = torch.randn(8, 6), torch.randn(8, 3)
    return Sample(capture(model.train(), inputs, functional.mse_loss), model, inputs)


def plan_for(found: Sample, strategy: str, steps: int, ranks: int = 2, segments: int = 0) -> Plan:
    """A plan in micro-batches as a search makes it, read from its file's text."""
    graph, accumulation = cut_in_micro_batches(found.graph, steps)
    plan = make_plan(graph, parse_machine(f"local:{ranks}"), strategy)
    count = len(operators_of(plan.graph))
    some = [(i, i + segments - 1) for i in range(0, count - segments, segments)] if segments else []
    memory = (*plan.memory, *recompute_actions(plan.graph, some))
    computes = computation_digest(plan.graph, accumulation)
    made = replace(plan, model=model_mark(found.graph), accumulation=accumulation, memory=memory, computes=computes)
    return check_plan(plan_from_json(plan_to_json(made)))


CASES = [
    ("transformer", "data-parallel", 2, 0), ("transformer", "fsdp", 4, 0), ("transformer", "megatron:tp=2", 2, 9),
    ("transformer", "fsdp", 2, 7), ("transformer with dropout", "data-parallel", 2, 7),
    ("layers", "data-parallel", 4, 0), ("layers", "reduction", 2, 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "strategy", "steps", "segments"), CASES)
def test_training_is_as_on_one_device(name: str, strategy: str, steps: int, segments: int) -> None:
    found = sample(name)
    plan = plan_for(found, strategy, steps, segments=segments)
    assert verify_in_process(Case(plan, found.graph, found.model, found.inputs), 2).passed


@pytest.mark.parametrize("part", [False, True])
def test_a_rank_may_be_given_its_part_and_gradients_scale(part: bool) -> None:
    found = sample("layers")
    plan = plan_for(found, "data-parallel", 2)

    def program(communicator: Communicator) -> list[Tensor]:
        module = module_on(plan, found, communicator)
        rows = slice(4 * communicator.rank, 4 * communicator.rank + 4)
        inputs = [x[rows] for x in found.inputs] if part else found.inputs
        (3 * module(*inputs)).backward()
        return [p.grad for p in module.parameters() if p.grad is not None]

    (3 * functional.mse_loss(found.model(found.inputs[0]), found.inputs[1])).backward()
    wanted = [p.grad for p in found.model.parameters()]
    found.model.zero_grad()
    for got in run_ranks(plan.mesh, program):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron:tp=2"])
def test_what_is_sent_is_told_and_gradients_are_summed_up_once(strategy: str) -> None:
    found = sample("transformer")
    plan = plan_for(found, strategy, 2)

    def program(communicator: Communicator) -> int:
        module_on(plan, found, communicator)(*found.inputs).backward()
        return communicator.bytes_sent

    told = explain(plan)
    assert run_ranks(plan.mesh, program) == [told.bytes_of(rank) for rank in range(2)]
    if strategy == "data-parallel":
        plain = explain(make_plan(found.graph, parse_machine("local:2"), strategy))
        assert told.sent("all-reduce", "backward") == plain.sent("all-reduce", "backward")


def test_only_one_micro_batch_is_kept_at_a_time() -> None:
    found = sample("transformer")

    def kept(steps: int) -> int:
        plan = plan_for(found, "data-parallel", steps) if steps > 1 else None
        whole = plan or make_plan(found.graph, parse_machine("local:2"), "data-parallel")
        sizes: list[int] = []

        def program(communicator: Communicator) -> int:
            module = module_on(whole, found, communicator)
            stored = {x.untyped_storage().data_ptr() for x in module.parameters()}

            def pack(x: Tensor) -> Tensor:
                sizes.append(0 if x.untyped_storage().data_ptr() in stored else x.untyped_storage().nbytes())
                return x

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
                module(*found.inputs)
            return sum(sizes)

        return max(run_ranks(whole.mesh, program)) // steps

    assert kept(4) < 0.5 * kept(1)


def test_without_gradients_the_loss_is_the_same() -> None:
    found = sample("transformer")
    plan = plan_for(found, "data-parallel", 4)

    def program(communicator: Communicator) -> tuple[float, float]:
        module = module_on(plan, found, communicator)
        with torch.no_grad():
            alone = float(module(*found.inputs))
        loss = module(*found.inputs)
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        return alone, float(loss.detach())

    for alone, loss in run_ranks(plan.mesh, program):
        assert alone == pytest.approx(loss)


class Tiny(nn.Module):
    """Gradients that vanish in half precision unless they are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).float() * 1e-7


SCALES = (2.0**10, 2.0**10, 2.0**11, 2.0**40, 2.0**10)
"""Of step after step; with one of them gradients overflow."""


def half_sample(way: str) -> Sample:
    torch.manual_seed(5)
    model = Tiny().half() if way == "half" else Tiny()
    inputs = torch.randn(8, 6), 100 * torch.randn(8, 3)
    inputs = (inputs[0].half(), inputs[1]) if way == "half" else inputs
    return Sample(capture(model.train(), inputs, functional.mse_loss), model, inputs)


@pytest.mark.parametrize("way", ["half", "autocast", "whole"])
@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
def test_a_scaled_loss_scales_gradients_before_they_are_rounded(way: str, strategy: str) -> None:
    found = half_sample(way)
    plan = plan_for(found, strategy, 2)

    def steps(module: nn.Module, loss: Callable[[nn.Module], Tensor]) -> Iterator[dict[str, Tensor]]:
        for scale in SCALES:
            module.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=way == "autocast"):
                value = loss(module)
            (value * scale).backward()
            yield {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    def program(communicator: Communicator) -> tuple[list[dict[str, Tensor]], list[int]]:
        module, counts, gradients = module_on(plan, found, communicator), [0], []
        for made in steps(module, lambda module: module(*found.inputs)):
            whole = {name: as_whole(module, name, gradient) for name, gradient in made.items()}
            gradients.append(whole)
            counts.append(communicator.num_started)
        return gradients, counts

    wanted = list(steps(copy.deepcopy(found.model), lambda m: functional.mse_loss(m(found.inputs[0]), found.inputs[1])))
    assert all(0 < gradient.abs().max() < inf for i in (0, 1, 2, 4) for gradient in wanted[i].values())
    assert way == "whole" or not wanted[3]["first.weight"].isfinite().all()
    for got, counts in run_ranks(plan.mesh, program):
        for mine, theirs in zip(got, wanted, strict=True):
            for name, gradient in theirs.items():
                largest = gradient.nan_to_num(0, 0, 0).abs().max().item()
                assert mine[name].isfinite().all() == gradient.isfinite().all()
                if gradient.isfinite().all():
                    torch.testing.assert_close(mine[name], gradient, rtol=1e-2, atol=4e-3 * largest)
        first, second = counts[1] - counts[0], counts[2] - counts[1]
        assert first > second if way != "whole" else first == second, "only another scale costs a second run"


def as_whole(module: ParallelModule, name: str, gradient: Tensor) -> Tensor:
    carry = carry_reshard(module.store.shape(name, gradient), module.store.layout(name), (), module.communicator)
    return carry(gradient)


def test_hooks_of_parameters_see_the_gradient_of_the_step_once() -> None:
    found = sample("layers")
    plan = plan_for(found, "fsdp", 2)

    def program(communicator: Communicator) -> bool:
        module, seen = module_on(plan, found, communicator), []
        parameter = next(module.parameters())
        parameter.register_hook(seen.append)
        module(*found.inputs).backward()
        return len(seen) == 1 and torch.equal(seen[0], parameter.grad)

    assert run_ranks(plan.mesh, program) == [True, True]


def test_what_cannot_be_cut_is_refused() -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
    graph = capture(convolutions().train(), batch, functional.cross_entropy)
    with pytest.raises(StrategyError, match="statistics of a whole batch"):
        cut_in_micro_batches(graph, 2)
    with pytest.raises(StrategyError, match="no 3 equal parts"):
        cut_in_micro_batches(sample("layers").graph, 3)

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return (y - y.mean(0)).tanh()

    graph = capture(Centred().train(), (torch.randn(8, 6), torch.randn(8, 3)), functional.mse_loss)
    with pytest.raises(StrategyError, match="needs all samples at once"):
        cut_in_micro_batches(graph, 2)


def test_other_batches_and_other_plans_are_refused() -> None:
    found = sample("layers")
    plan = plan_for(found, "data-parallel", 2)

    def program(communicator: Communicator) -> str:
        module = module_on(plan, found, communicator)
        with pytest.raises(UsageError) as told:
            module(*(x[:6] for x in found.inputs))
        return str(told.value)

    assert all("micro-batches" in text for text in run_ranks(plan.mesh, program))
    data = plan_to_json(plan)
    for broken in ({"steps": 1}, {"steps": "2"}, {"cut": ["nobody"]}, {"whole": [{"input": "a", "of": "b"}]}):
        with pytest.raises(PlanError):
            plan_from_json({**data, "accumulate": {**data["accumulate"], **broken}})


def test_a_weight_that_is_frozen_later_has_no_gradient_and_others_have_theirs() -> None:
    found = sample("layers")
    model = copy.deepcopy(found.model)
    functional.mse_loss(model(found.inputs[0]), found.inputs[1]).backward()
    plan = plan_for(found, "data-parallel", 4)

    def rank(ranks: Communicator) -> None:
        step = module_on(plan, found, ranks)
        step.get_parameter("0.weight").requires_grad_(False)
        step(*found.inputs).backward()
        assert step.get_parameter("0.weight").grad is None
        for name, parameter in step.named_parameters():
            if name != "0.weight":
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad.detach(), model.get_parameter(name).grad)

    run_ranks(plan.mesh, rank)


def test_a_part_of_what_every_rank_takes_whole_is_refused_by_its_name() -> None:
    found = sample("transformer")
    plan = plan_for(found, "data-parallel", 2)

    def rank(ranks: Communicator) -> None:
        half = slice(4 * ranks.rank, 4 * ranks.rank + 4)
        with pytest.raises(UsageError, match=r": target is .* \(8, 5\), as a whole on every rank.* \(4, 5\) came"):
            module_on(plan, found, ranks)(*(x[half] for x in found.inputs))

    run_ranks(plan.mesh, rank)
