"""One set of weights, several shapes and both modes: each step is that of the plain model."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import conjoin
from conjoin.errors import PlanError, RankError, UsageError
from conjoin.ir import Graph, LeafKind, Pipeline, Plan, model_mark, operators_of
from conjoin.machine import Machine, parse_machine
from conjoin.rules import Index, Library
from conjoin.runtime import Loader, launch, run_ranks
from conjoin.runtime.program.other_plans import Key, OtherPlans, check_stored_alike
from conjoin.runtime.program.other_programs import MAX_PROGRAMS
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.search import make_pipeline, make_plan
from conjoin.search.entries import make_variant
from conjoin.search.rewrites import rewritten, ways_of
from tests.ir.wording import assert_three_sentences
from tests.runtime.side_by_side import Call, Case, check, module_of, others_of


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, length, width = x.shape
        q, k, v = (t.view(b, length, 4, width // 4).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, length, width))
        return x + self.drop(self.down(torch.relu(self.up(x))))


class Words(nn.Module):
    """A small transformer over words, with dropout."""

    def __init__(self, dropout: float, depth: int, width: int = 8, words: int = 12, length: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks, self.head = nn.ModuleList(Block(width, dropout) for _ in range(depth)), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def word_loss(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


class Pictures(nn.Module):
    """Convolutions with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.25), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).mean((2, 3))))


def words(batch: int, length: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(12, (2, batch, length), generator=generator)
    return ids[0], ids[1]


def pictures(batch: int, size: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, size, size, generator=generator).double(), torch.arange(batch) % 3


def case_of(kind: str, ranks: int, strategy: str) -> Case:
    model, loss, graph = captured(kind)
    return Case(model, loss, make_plan(graph, parse_machine(f"local:{ranks}"), strategy))


_WORDS = {"words": (0.25, 1), "more words": (0.25, 2), "words without dropout": (0.0, 2)}
"""Dropout and depth: segments are found where blocks are repeated, and stages need several."""


@cache
def captured(kind: str) -> tuple[nn.Module, Any, Graph]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made: nn.Module = Pictures() if kind == "pictures" else Words(*_WORDS[kind])
    model, batch = made.double().train(), pictures(8) if kind == "pictures" else words(8)
    loss = functional.cross_entropy if kind == "pictures" else word_loss
    return model, loss, conjoin.capture(model, batch, loss, check=False)


TEXT = [
    Call(True, words(8)),
    Call(True, words(5, seed=1)),
    Call(False, words(8, seed=2)),
    Call(True, words(3, 8, seed=3)),
    Call(False, words(1, 5, seed=4)),
    Call(True, words(8, seed=5)),
]


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


def plan_for(case: Case, batch: tuple[Tensor, Tensor]) -> Plan | Pipeline:
    dealt = [batch[:1], {}, batch[1:], {}]
    return others_of(case).find(Key.of(True, dealt), dealt).plan


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


class TwoHeads(nn.Module):
    """Two layers on one input, which a rule makes one of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.a(x)) + self.b(x))


def numbers(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(size, 6, generator=torch.Generator().manual_seed(seed)).double()
    return drawn[:, :4], drawn[:, 4:]


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


# Parts of batches.


def test_parts_of_smaller_batches_are_parts_where_batches_came_in_parts() -> None:
    case = case_of("words", 2, "data-parallel")
    wanted = [word_loss(copy.deepcopy(case.model).eval()(ids), target).item() for ids, target in (words(8), words(4))]
    wanted.append(wanted[0])

    def program(ranks: Communicator) -> list[float]:
        step, found = module_of(case, others_of(case), ranks).eval(), []
        for size in (8, 4):
            half = slice(ranks.rank * size // 2, (ranks.rank + 1) * size // 2)
            found.append(step(*(x[half] for x in words(size))).item())
        return [*found, step(*words(8)).item()]  # as large as the plan's batch, and so it

    for found in run_ranks(case.plan.mesh, program):
        assert found == pytest.approx(wanted, rel=1e-9)


def test_a_small_batch_is_no_part_where_batches_came_whole() -> None:
    """Half of the plan's batch is what a rank holds of it; given whole, it is a batch of its own."""
    case = case_of("words without dropout", 2, "data-parallel")
    sizes = (8, 4)
    check(case, [Call(True, words(size, seed=size)) for size in sizes])


@pytest.mark.parametrize("strategy", ["data-parallel", "context:cp=2"])
def test_a_small_batch_is_no_part_where_it_is_the_first(strategy: str) -> None:
    """It is the same on all ranks, so it is not what each of them holds of a larger one."""
    case = case_of("words without dropout", 2, strategy)
    small = tuple(x[:, :4] if strategy.startswith("context") else x[:4] for x in words(8))
    check(case, [Call(True, small), Call(True, words(8)), Call(False, small)])


def test_parts_that_are_alike_to_warm_up_do_not_tell_how_batches_come() -> None:
    """All ranks make up the same zeros; what they bring afterwards are parts of a batch, and none of it is left out."""
    case = case_of("words without dropout", 2, "data-parallel")
    wanted = word_loss(copy.deepcopy(case.model)(words(8)[0]), words(8)[1]).item()

    def program(ranks: Communicator) -> list[float]:
        step, half = module_of(case, others_of(case), ranks), slice(ranks.rank * 4, ranks.rank * 4 + 4)
        for _ in range(2):
            step(*(torch.zeros_like(x[half]) for x in words(8)))
        return [step(*(x[half] for x in words(8))).item() for _ in range(2)]

    for found in run_ranks(case.plan.mesh, program):
        assert found == pytest.approx([wanted, wanted], rel=1e-9)


def sum_loss(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="sum")


@pytest.mark.parametrize("left", [4, 3])
def test_what_is_left_of_an_epoch_is_whole_where_batches_came_in_parts(left: int) -> None:
    """Also where it is as large as a part: no sample counts twice."""
    model, _, _ = captured("words without dropout")
    graph = conjoin.capture(model, words(8), sum_loss, check=False)
    case = Case(model, sum_loss, make_plan(graph, parse_machine("local:2"), "data-parallel"))
    ids, target = words(8 + left)
    wanted = [sum_loss(model(ids[part]), target[part]).item() for part in (slice(8), slice(8, None))]

    def program(ranks: Communicator) -> list[float]:
        step = module_of(case, others_of(case), ranks)
        return [step(*batch).item() for batch in Loader(TensorDataset(ids, target), step, drop_last=False)]

    for found in run_ranks(case.plan.mesh, program):
        assert found == pytest.approx(wanted, rel=1e-9)


# Limits and refusals.


def test_few_programs_are_held_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conjoin.runtime.program.other_programs.MAX_PROGRAMS", 3)
    assert MAX_PROGRAMS == 16
    case = case_of("words", 1, "single")

    def program(ranks: Communicator) -> list[str]:
        step = module_of(case, others_of(case), ranks)
        for size in (5, 6, 5, 7, 8):
            step(*words(size))
        return [key.call for key in step._others._programs]

    (held,) = run_ranks(case.plan.mesh, program)
    assert held == ["i64[5,6], i64[5,6]", "i64[7,6], i64[7,6]"]


def test_garbage_is_collected_before_and_after_a_shape_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = nn.Linear(4, 4), []
    plan = conjoin.plan(model, torch.ones(8, 4), "local:1", strategy="single")
    step, find = conjoin.load(plan, model, device="cpu"), OtherPlans.find

    def watched(self: OtherPlans, key: Key, dealt: Any) -> Any:
        seen.append(gc.isenabled())
        return find(self, key, dealt)

    monkeypatch.setattr(OtherPlans, "find", watched)
    step(torch.ones(6, 4))
    assert seen == [False] and gc.isenabled()
    gc.disable()
    try:
        step(torch.ones(5, 4))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_without_the_loss_another_shape_is_refused() -> None:
    case = case_of("words", 1, "single")
    step = conjoin.load(case.plan, case.model, device="cpu")
    assert step(*words(8)).requires_grad
    with pytest.raises(UsageError, match=r"training on i64\[5,6\], i64\[5,6\] was asked for.* Pass the loss") as told:
        step(*words(5))
    assert_three_sentences(told.value)
    with pytest.raises(UsageError, match="Pass the loss"):
        step.eval()(*words(8))


def test_a_model_that_cannot_be_copied_is_told_when_it_is_needed() -> None:
    case = case_of("words", 1, "single")
    model = copy.deepcopy(case.model)
    model.handle = (value for value in ())  # a generator
    step = conjoin.load(case.plan, model, loss=word_loss, device="cpu")
    step(*words(8))
    with pytest.raises(UsageError, match="could not be copied without its values: TypeError") as told:
        step(*words(5))
    assert_three_sentences(told.value)


def test_the_model_is_kept_without_its_values() -> None:
    case = case_of("words", 1, "single")
    model = copy.deepcopy(case.model)
    held = weakref.ref(model.head.weight)
    step = conjoin.load(case.plan, model, loss=word_loss, device="cpu")
    assert all(x.is_meta for x in (*step._others.plans.model.parameters(), *step._others.plans.model.buffers()))
    del model
    gc.collect()
    assert held() is None
    assert step(*words(5)).requires_grad


def test_a_plan_is_told_of_where_it_has_to_differ(caplog: pytest.LogCaptureFixture) -> None:
    case = case_of("words", 2, "data-parallel")
    with caplog.at_level(logging.INFO, "conjoin"):
        run_ranks(case.plan.mesh, lambda ranks: module_of(case, others_of(case), ranks)(*words(5)).item())
        run_ranks(case.plan.mesh, lambda ranks: module_of(case, others_of(case), ranks)(*words(1)).item())
    told = [record for record in caplog.records if "planned" in record.message]
    assert [record.levelname for record in told] == ["INFO", "WARNING"]
    assert "are split over fewer devices than in the plan" in told[1].message


def test_plans_are_kept_beside_the_file_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("words without dropout", 1, "single")
    case.plan.save(tmp_path / "plan.json")
    first = conjoin.load(tmp_path / "plan.json", case.model, loss=word_loss, device="cpu")(*words(5))
    (kept,) = (tmp_path / "plan.json.shapes").iterdir()
    conjoin.load_plan(kept)
    monkeypatch.setattr("conjoin.api.capture_graph", None)  # nothing is captured again
    again = conjoin.load(tmp_path / "plan.json", case.model, loss=word_loss, device="cpu")
    assert again(*words(5)).item() == first.item()


def test_a_copy_has_weights_of_its_own_in_every_shape() -> None:
    case = case_of("words without dropout", 1, "single")
    step = conjoin.load(case.plan, case.model, loss=word_loss, device="cpu")
    before = step(*words(5)).item()
    twin = copy.deepcopy(step)
    with torch.no_grad():
        for parameter in step.parameters():
            parameter.mul_(1.5)
    assert twin(*words(5)).item() == before != step(*words(5)).item()


def two_heads(strategy: str) -> Case:
    torch.manual_seed(2)
    model = TwoHeads().double()
    graph = conjoin.capture(model, numbers(8), functional.mse_loss, check=False)
    return Case(model, functional.mse_loss, make_plan(graph, parse_machine("local:2"), strategy))


def _call(rank: int, case: Case, sizes: list[list[int]]) -> list[float]:
    step = conjoin.load(case.plan, case.model, loss=case.loss)
    found = []
    for size in sizes[rank]:
        loss = step(*numbers(size, size))
        loss.backward()
        found.append(loss.item())
    return found


def test_ranks_that_are_processes() -> None:
    case = two_heads("fsdp")
    given = [numbers(size, size) for size in (8, 5, 1, 8)]
    wanted = [functional.mse_loss(case.model(x), y).item() for x, y in given]
    for found in launch(2, _call, case, [[8, 5, 1, 8]] * 2):
        assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([[8, 5], [8, 3]], r"rank 0 to training on f64\[5,4\], f64\[5,2\], rank 1 to training on f64\[3,4\]"),
        ([[8, 5], [8, 8]], "Rank 1 went on with another shape or mode than those who wait for it, noticed by rank 0"),
    ],
    ids=["both new", "one new"],
)
def test_ranks_with_different_shapes_are_told(sizes: list[list[int]], said: str) -> None:
    with pytest.raises(RankError, match=said) as told:
        launch(2, _call, two_heads("fsdp"), sizes)
    assert_three_sentences(told.value)


def test_a_plan_that_stores_weights_otherwise_cannot_share_them() -> None:
    one, other = (case_of("words", 2, strategy).plan for strategy in ("data-parallel", "fsdp"))
    with pytest.raises(PlanError, match=r"stores words\.weight as") as told:
        check_stored_alike(one, other)
    assert_three_sentences(told.value)


def test_a_precision_holds_for_every_shape() -> None:
    model, loss, _ = captured("words without dropout")
    model = copy.deepcopy(model).float()
    plan = conjoin.plan(model, words(8), "local:1", loss=loss, strategy="single", precision="bf16-mixed")
    step = conjoin.load(plan, model, loss=loss, device="cpu")
    for call in (words(8), words(5)):
        with torch.autocast("cpu", torch.bfloat16):
            wanted = loss(model(call[0]), call[1]).item()
        assert step(*call).item() == pytest.approx(wanted, rel=1e-3)
        assert step.eval()(call[0]).dtype == torch.bfloat16 and step.train()


def test_the_casts_of_an_unnamed_autocast_are_taken_over_or_the_other_mode_is_refused() -> None:
    """Where the model does the same in both modes they are for both; else they would have to be captured."""
    for name in ("words without dropout", "words"):
        model, loss, _ = captured(name)
        model = copy.deepcopy(model).float()
        with torch.autocast("cpu", torch.bfloat16):
            plan = conjoin.plan(model, words(8), "local:1", loss=loss, strategy="single")
        step = conjoin.load(plan, model, loss=loss, device="cpu")
        if name == "words":
            with pytest.raises(UsageError, match="made in an autocast of the caller") as told:
                step.eval()(*words(5))
            assert_three_sentences(told.value)
            continue
        with torch.autocast("cpu", torch.bfloat16):
            plain = loss(model(words(5)[0]), words(5)[1])
        assert torch.equal(step(*words(5)), plain) and torch.equal(step.eval()(*words(5)), plain)


def test_a_model_on_the_meta_device_is_run_in_every_shape_and_saved(tmp_path: Path) -> None:
    case = case_of("words without dropout", 1, "single")
    step = conjoin.load(case.plan, copy.deepcopy(case.model).to("meta"), loss=word_loss, device="cpu", seed=5)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    for size in (8, 5):
        step(*words(size)).backward()
        optimizer.step()
    conjoin.save_checkpoint(tmp_path / "saved", step, optimizer)
    other = conjoin.load(case.plan, case.model, loss=word_loss, device="cpu")
    conjoin.load_checkpoint(tmp_path / "saved", other)
    plain = copy.deepcopy(case.model)
    plain.load_state_dict(conjoin.full_state_dict(step))
    ids, target = words(3)
    wanted = word_loss(plain(ids), target).item()
    assert step(ids, target).item() == pytest.approx(wanted, rel=1e-12)
    assert other.eval()(ids, target).item() == pytest.approx(wanted, rel=1e-12)


# Pipelines.


def pipeline_case(ranks: int, strategy: str) -> Case:
    model, loss, graph = captured("words without dropout")
    return Case(model, loss, make_pipeline(graph, Machine("here", 1, ranks, "cpu"), strategy))


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "pipeline:pp=2,micro=4"), (4, "pipeline:pp=2,tp=2,micro=2,schedule=zero-bubble"),
        (2, "pipeline:pp=2,micro=4,schedule=interleaved"), (3, "pipeline:pp=3,micro=2,schedule=gpipe"),
    ],
)  # fmt: skip
def test_every_shape_and_mode_of_a_pipeline_is_that_of_the_plain_model(ranks: int, strategy: str) -> None:
    check(pipeline_case(ranks, strategy), TEXT)


class Helped(nn.Module):
    """Layers, the last of which is there for training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.helper = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + self.helper(x) if self.training else x


def test_a_weight_of_a_later_stage_that_is_not_evaluated_stays_there() -> None:
    torch.manual_seed(1)
    model, batch = Helped().double().train(), (torch.randn(8, 4).double(), torch.randn(8, 4).double())
    graph = conjoin.capture(model, batch, functional.mse_loss)
    case = Case(model, functional.mse_loss, make_pipeline(graph, Machine("here", 1, 2, "cpu"), "pipeline:pp=2,micro=2"))
    check(case, [Call(True, batch), Call(False, batch), Call(True, batch)])


def test_micro_batches_of_a_pipeline_become_no_larger_and_weights_stay_where_they_lie() -> None:
    case = pipeline_case(2, "pipeline:pp=2,micro=4,schedule=eager-1f1b")
    for size, steps in ((12, 6), (6, 3), (5, 5), (2, 1)):
        found = plan_for(case, words(size))
        assert isinstance(found, Pipeline) and isinstance(case.plan, Pipeline)
        assert found.num_micro_batches == found.schedule.num_micro_batches == steps
        assert found.schedule.name == "eager-1f1b"
        for mine, other in zip(found.stages, case.plan.stages, strict=True):
            held = [{leaf for leaf in s.plan.graph.leaves if leaf.kind is LeafKind.PARAMETER} for s in (mine, other)]
            assert held[0] == held[1] and mine.ranks == other.ranks


def test_a_pipeline_says_what_it_takes_where_no_other_can_be_planned() -> None:
    case = pipeline_case(2, "pipeline:pp=2,micro=4")

    def program(ranks: Communicator) -> str:
        with pytest.raises(UsageError) as told:
            module_of(case, None, ranks)(*words(5))
        return str(told.value)

    for told in run_ranks(case.plan.mesh, program):
        assert "is torch.int64 of shape (8, 6), and torch.int64 of shape (5, 6) came" in told and "stage 0" not in told
        assert "here of 4 micro-batches" in told
        assert_three_sentences(told)
