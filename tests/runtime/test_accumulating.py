"""A step in micro-batches: loss and gradients of the whole batch, one micro-batch alive at a time, sums sent once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import PlanError, StrategyError, UsageError
from conjoin.frontends import capture
from conjoin.ir import (
    Plan,
    check_plan,
    cut_in_micro_batches,
    model_mark,
    operators_of,
    plan_from_json,
    plan_to_json,
    recompute_actions,
)
from conjoin.machine import parse_machine
from conjoin.report import explain
from conjoin.runtime.checking import Case, verify_in_process
from conjoin.runtime.communicator import Communicator
from conjoin.runtime.threads import run_ranks
from conjoin.search import make_plan
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample
from tests.runtime.test_recomputing import Transformer, convolutions, transformer_loss


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
    made = replace(plan, model=model_mark(found.graph), accumulation=accumulation, memory=memory)
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
        with pytest.raises(RuntimeError, match="twice"):
            loss.backward()
        return alone, float(loss.detach())

    for alone, loss in run_ranks(plan.mesh, program):
        assert alone == pytest.approx(loss)


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
