"""One set of weights, several shapes and both modes: each step is that of the plain model."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import conjoin
from conjoin.ir import model_mark, operators_of
from conjoin.machine import parse_machine
from conjoin.rules import Index, Library
from conjoin.runtime import run_ranks
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.search import make_plan
from conjoin.search.entries import make_variant
from conjoin.search.rewrites import rewritten, ways_of
from tests.runtime.shape_cases import TEXT, Pictures, TwoHeads, captured, case_of, numbers, pictures, plan_for, words
from tests.runtime.side_by_side import Call, Case, check, module_of, others_of


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (1, "single"), (2, "data-parallel"), (4, "fsdp+recompute=full"), (4, "megatron:tp=2,dp=2,sp"), (3, "zero1"),
    ],
)  # fmt: skip
def test_every_shape_and_mode_is_that_of_the_plain_model(ranks: int, strategy: str) -> None:
    check(case_of("more words" if "recompute" in strategy else "words", ranks, strategy), TEXT)


def test_micro_batches_become_no_larger() -> None:
    case = case_of("words without dropout", 2, "data-parallel+micro=2")  # each would draw for itself
    assert {size: alike_steps(case, size) for size in (6, 5, 4)} == {6: 2, 5: 5, 4: 1}
    check(case, [*TEXT[:3], Call(True, words(6, seed=7)), TEXT[5]])


def alike_steps(case: Case, size: int) -> int:
    found = plan_for(case, words(size)).accumulation
    return 1 if found is None else found.steps


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "data-parallel"), (4, "fsdp")])
def test_batch_norm_and_dropout_between_training_and_evaluation(ranks: int, strategy: str) -> None:
    calls = [
        Call(False, pictures(8, seed=1)),
        Call(True, pictures(8, seed=2)),
        Call(False, pictures(8, seed=1)),
        Call(True, pictures(5, 6, seed=3)),
        Call(False, pictures(3, seed=4)),
        Call(True, pictures(8, seed=5)),
    ]
    check(case_of("pictures", ranks, strategy), calls)


def test_a_shape_may_first_come_in_inference_mode_and_be_trained_then() -> None:
    case = case_of("pictures", 2, "data-parallel")
    others, model = others_of(case), copy.deepcopy(case.model)
    with torch.inference_mode():
        given = pictures(6, seed=4)  # tensors that autograd does not take
        wanted = functional.cross_entropy(model.eval()(given[0]), given[1]).item()

    def program(ranks: Communicator) -> list[float]:
        step = module_of(case, others, ranks)
        step.eval()
        with torch.inference_mode():
            found = step(*given).item()
        again = step(*pictures(6, seed=4))
        again.backward()
        return [found, again.item()]

    for found in run_ranks(case.plan.mesh, program):
        assert found == pytest.approx([wanted, wanted], rel=1e-9)


def test_a_plan_in_evaluation_mode_trains() -> None:
    model, loss, _ = captured("pictures")
    model = copy.deepcopy(model).eval()
    graph = conjoin.capture(model, pictures(8), loss, check=False)
    case = Case(model, loss, make_plan(graph, parse_machine("local:2"), "data-parallel"))
    check(case, [Call(False, pictures(8)), Call(True, pictures(8, seed=1)), Call(False, pictures(4, seed=2))])


class Frozen(Pictures):
    """Keeps its batch norm as it was learned, and its dropout on."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        self.drop.train()
        return self


class Merged(nn.Module):
    """Doubles what comes in, or for evaluation its weights, as LoRA merges its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.is_merged = nn.Linear(2, 3), False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if self.is_merged is mode:
            self.layer.weight.data.mul_(0.5 if mode else 2.0)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean((2, 3)) * (1 if self.is_merged else 2))


def switching(made: type[nn.Module], mode: bool) -> Case:
    torch.manual_seed(1)
    model = made().double().train(mode)
    graph = conjoin.capture(model, pictures(8), functional.cross_entropy, check=False)
    return Case(model, functional.cross_entropy, make_plan(graph, parse_machine("local:2"), "data-parallel"))


@pytest.mark.parametrize("mode", [True, False])
def test_a_model_that_says_which_of_its_parts_train_is_asked(mode: bool) -> None:
    calls = [Call(True, pictures(8)), Call(False, pictures(6)), Call(True, pictures(5)), Call(False, pictures(8))]
    check(switching(Frozen, mode), calls)


def test_what_a_model_does_beside_that_to_its_weights_is_left() -> None:
    calls = [Call(True, pictures(8)), Call(False, pictures(6)), Call(True, pictures(5))]
    check(switching(Merged, True), calls)


def test_parts_that_train_would_switch_and_the_plan_keeps_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model, loss, _ = captured("pictures")
    model = copy.deepcopy(model).train()
    model.norm.eval()
    plan = conjoin.plan(model, pictures(8), "local:1", loss=loss, strategy="single")
    step = conjoin.load(plan, model, loss=loss, device="cpu")
    with caplog.at_level(logging.WARNING, "conjoin"):
        assert step.eval() is step.train().train()
    (told,) = (record.message for record in caplog.records if "norm" in record.message)
    assert "stays in evaluation mode" in told


# A plan with a substitution.


def substituted(ranks: int, strategy: str) -> Case:
    torch.manual_seed(2)
    model = TwoHeads().double()
    graph = conjoin.capture(model, numbers(8), functional.mse_loss, check=False)
    index = Index(graph)
    for way in ways_of(Library.shipped()):
        found = rewritten(make_variant(graph), way, index) if way.may_match(index) else None
        if found is not None and sum(node.op == "linear" for node in found.variant.graph.nodes) == 2:
            made = make_plan(found.variant.graph, parse_machine(f"local:{ranks}"), strategy)
            done = (*found.variant.substitutions, *made.substitutions)
            return Case(model, functional.mse_loss, replace(made, substitutions=done, model=model_mark(graph)))
    raise AssertionError("the library has no rule that joins two layers")


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "data-parallel"), (4, "megatron:tp=2,dp=2")])
def test_a_substitution_is_done_again(ranks: int, strategy: str) -> None:
    case = substituted(ranks, strategy)
    sizes = ((True, 8), (True, 3), (False, 8), (True, 7))
    check(case, [Call(training, numbers(size, seed)) for seed, (training, size) in enumerate(sizes)])
    plan = plan_for(case, numbers(5))
    assert [each.name for each in plan.substitutions] == [each.name for each in case.plan.substitutions]
    assert [node.op for node in operators_of(plan.graph)] == [node.op for node in operators_of(case.plan.graph)]


# Libraries' models, and ways to call.


def test_a_library_model_with_labels_is_called_by_name_and_by_position() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=12, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=0,
        eos_token_id=0, use_cache=False, loss_type="ForCausalLM")  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).double().train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.1
    ids = words(4)[0]
    graph = conjoin.capture(model, {"input_ids": ids, "labels": ids}, check=False)
    case = Case(model, None, make_plan(graph, parse_machine("local:2"), "megatron"))
    small, long = words(3, seed=1)[0], words(4, 8, seed=2)[0]
    calls = [
        Call(True, (), {"input_ids": ids, "labels": ids}),
        Call(True, (), {"input_ids": small, "labels": small}),
        Call(False, (long,), {"labels": long}),
        Call(True, (ids,), {"labels": ids}),
    ]
    check(case, calls, 1e-6)  # the library computes losses in single precision

    def predict(ranks: Communicator) -> Tensor:
        step = module_of(case, others_of(case), ranks).eval()
        with torch.no_grad():
            return torch.stack([step(input_ids=small).logits, step(small, labels=small).logits])

    wanted = copy.deepcopy(model).eval()(input_ids=small).logits
    for found in run_ranks(case.plan.mesh, predict):  # whole on every rank, beside the loss or without
        assert torch.allclose(found[0], wanted, atol=1e-9) and torch.allclose(found[1], wanted, atol=1e-9)


def test_inputs_by_name_run_the_program_of_those_by_position() -> None:
    case = case_of("words", 1, "single")
    ids, target = words(5)

    def program(ranks: Communicator) -> list[float]:
        step = module_of(case, others_of(case), ranks).eval()
        calls = [step(ids, target), step(ids=ids, target=target), step(ids, target=target), step((ids, target))]
        assert len(step._others._programs) == 1
        return [found.item() for found in calls]

    (losses,) = run_ranks(case.plan.mesh, program)
    assert len(set(losses)) == 1


def test_without_what_the_loss_takes_the_model_alone_answers() -> None:
    case = case_of("words", 2, "fsdp")
    ids = words(5)[0]
    wanted = copy.deepcopy(case.model).eval()(ids)

    def program(ranks: Communicator) -> Tensor:
        step = module_of(case, others_of(case), ranks).eval()
        with torch.no_grad():
            return step(ids)

    for found in run_ranks(case.plan.mesh, program):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
