"""A plan's module as a module: how it is called, what it returns, and what may be done to it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from conjoin.errors import UsageError
from conjoin.frontends import capture
from conjoin.ir import Plan, Value, flatten_tree, parse_graph
from conjoin.machine import parse_machine
from conjoin.runtime import ParallelModule, full_state_dict, load, to_module
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.search import make_plan
from tests.ir.wording import assert_three_sentences
from tests.runtime.hand_plans import module_on
from tests.runtime.models import mlp, plan_of
from tests.runtime.random_graphs import Sample


def made(
    model: nn.Module, batch: Any, loss: Any = None, strategy: str = "data-parallel", ranks: int = 2
) -> tuple[Plan, Sample]:
    graph = capture(model.train(), batch, loss)
    return make_plan(graph, parse_machine(f"local:{ranks}"), strategy), Sample(graph, model, batch)


def on_all(plan: Plan, sample: Sample, use: Callable[[ParallelModule], Any]) -> list[Any]:
    def program(communicator: Communicator) -> Any:
        return use(module_on(plan, sample, communicator))

    return run_ranks(plan.mesh, program)


def one_rank() -> tuple[ParallelModule, tuple[Tensor, Tensor]]:
    model, batch = mlp()
    return load(plan_of(model, batch, 1, "single"), model, device="cpu"), batch


# How it is called.


class Labelled(nn.Module):
    """Takes names and returns a dictionary, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> dict[str, Any]:
        logits = self.out(self.fc(x).tanh()) * scale
        loss = functional.cross_entropy(logits, labels) if labels is not None else None
        return {"loss": loss, "logits": logits, "hidden": (x.sum(), [logits.argmax(-1)]), "name": "labelled"}


def labelled() -> tuple[Labelled, dict[str, Any]]:
    torch.manual_seed(0)
    return Labelled(), {"x": torch.randn(8, 6), "labels": torch.randint(4, (8,)), "scale": 0.5}


def test_a_batch_by_name_as_keywords_or_as_one_object() -> None:
    model, batch = labelled()
    plan, sample = made(model, batch)
    want = model(**batch)["loss"].item()

    def use(step: ParallelModule) -> list[float]:
        turned = dict(reversed(batch.items()))
        return [step(**batch)["loss"].item(), step(batch)["loss"].item(), step(**turned)["loss"].item()]

    for found in on_all(plan, sample, use):
        assert found == pytest.approx([want] * 3)


@pytest.mark.parametrize(
    "call",
    [
        lambda step, batch: step(batch["x"], batch["labels"], 0.5),
        lambda step, batch: step(x=batch["x"], labels=batch["labels"]),
        lambda step, batch: step(**{**batch, "scale": 1.0}),
        lambda step, batch: step(**batch, more=1),
        lambda step, batch: step(),
        lambda step, batch: step(**{**batch, "labels": None}),
        lambda step, batch: step(**{**batch, "x": batch["x"].double()}),
        lambda step, batch: step(**{**batch, "x": batch["x"][:3]}),
    ],
    ids=["by position", "one missing", "another number", "one too many", "nothing", "None", "dtype", "shape"],
)
def test_other_inputs_are_refused(call: Any) -> None:
    model, batch = labelled()
    plan, _ = made(model, batch, strategy="single", ranks=1)
    step = load(plan, model, device="cpu")
    with pytest.raises(UsageError, match="was called with other inputs") as told:
        call(step, batch)
    assert_three_sentences(told.value)


def test_positional_inputs_one_after_the_other_or_as_one_batch() -> None:
    step, (x, target) = one_rank()
    losses = [step(x, target), step((x, target)), step([x, target])]
    assert len({loss.item() for loss in losses}) == 1


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def test_nested_inputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, given: dict[str, Any]) -> Tensor:
            return (self.fc(given["a"][0]) * given["pair"].second).sum()  # type: ignore[no-any-return]

    given = {"a": [torch.randn(4, 4)], "pair": Pair(torch.randn(4, 4), torch.randn(4, 4))}
    model = Nested()
    plan, sample = made(model, (given,), strategy="single", ranks=1)
    assert load(plan, model, device="cpu")(given).item() == pytest.approx(model(given).item(), rel=1e-6)
    assert sample.graph.name == "Nested"


# What it returns.


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
def test_outputs_beside_the_loss_keep_their_containers_and_layouts(strategy: str) -> None:
    model, batch = labelled()
    plan, sample = made(model, batch, strategy=strategy)
    want = model(**batch)
    layouts = [value.type.layout for value in plan.graph.outputs if isinstance(value, Value)]
    assert layouts[0] == () and any(layouts) == (strategy != "megatron")

    def use(step: ParallelModule) -> Any:
        made = step(batch)
        return {**made, "logits": made["logits"].clone()}

    for one in on_all(plan, sample, use):
        assert list(one) == ["loss", "logits", "hidden", "name"] and one["name"] == "labelled"
        assert type(one["hidden"]) is tuple and type(one["hidden"][1]) is list
        torch.testing.assert_close(one["loss"], want["loss"])
        torch.testing.assert_close(one["hidden"][0], want["hidden"][0])
        torch.testing.assert_close(one["logits"], want["logits"], rtol=1e-4, atol=1e-6)


def test_an_output_class_of_transformers() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Classifier(Labelled):
        def forward(self, x: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> Any:
            found = super().forward(x, labels, scale)
            return outputs.SequenceClassifierOutput(loss=found["loss"], logits=found["logits"])

    model, batch = Classifier(), labelled()[1]
    plan, sample = made(model, batch)
    for one in on_all(plan, sample, lambda step: step(**batch)):
        assert type(one) is outputs.SequenceClassifierOutput and one.logits.shape == model(**batch).logits.shape
        torch.testing.assert_close(one.loss, model(**batch).loss)


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
def test_without_a_loss_outputs_are_whole_and_the_callers_own_loss_trains(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    x, target = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    plan, sample = made(model, (x,), strategy=strategy)

    def train(module: nn.Module) -> list[float]:
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        losses = []
        for _ in range(4):
            out = module(x)
            assert out.shape == (8, 4)
            loss = functional.l1_loss(out, target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    found = on_all(plan, sample, train)
    want = train(copy.deepcopy(model))
    for losses in found:
        assert losses == pytest.approx(want, rel=1e-9)


# What a model may have.


class Odd(nn.Module):
    """A buffer that is not saved, tied weights, a frozen one and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 6), nn.Linear(6, 10, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(6), requires_grad=False)
        self.spare = nn.Parameter(torch.rand(3))
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.register_buffer("kept", torch.ones(6))

    def forward(self, words: Tensor) -> Tensor:
        self.seen.add_(1.0)  # type: ignore[operator]
        return self.out((self.embed(words) * self.scale * self.kept).tanh())  # type: ignore[no-any-return]


def words_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "zero1"])
def test_tied_frozen_unused_and_unsaved(strategy: str) -> None:
    torch.manual_seed(0)
    model = Odd()
    words = torch.randint(10, (4, 5))
    plan, sample = made(model, (words, words.flip(0)), words_loss, strategy)

    def use(step: ParallelModule) -> dict[str, Any]:
        for _ in range(2):
            loss = step(words, words.flip(0))
        loss.backward()
        named = dict(step.named_parameters(remove_duplicate=False))
        return {
            "loss": loss.item(),
            "tied": named["embed.weight"] is named["out.weight"],
            "gradients": sorted(name for name, p in named.items() if p.grad is not None),
            "trained": sorted(name for name, p in named.items() if p.requires_grad),
            "saved": sorted(step.state_dict()),
            "seen": dict(step.named_buffers())["seen"].item(),
            "whole": sorted(full_state_dict(step, everywhere=True)),
            "count": len(list(step.parameters())),
        }

    expected = functional.cross_entropy(copy.deepcopy(model)(words).flatten(0, 1), words.flip(0).flatten()).item()
    for found in on_all(plan, sample, use):
        assert found["loss"] == pytest.approx(expected, rel=1e-5) and found["tied"] and found["count"] == 3
        assert found["gradients"] == ["embed.weight", "out.weight"]
        assert found["trained"] == ["embed.weight", "out.weight", "spare"]
        assert found["saved"] == found["whole"] == sorted(model.state_dict()) and "seen" not in found["saved"]
        assert found["seen"] == 2.0


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_pass_without_gradients(strategy: str, mode: Any) -> None:
    model, batch = mlp()
    plan, sample = made(model, batch, functional.mse_loss, strategy)

    def use(step: ParallelModule) -> tuple[Tensor, bool]:
        with mode():
            quiet = step(batch)
        loss = step(batch)
        loss.backward()
        return quiet.clone(), bool(loss.detach() == quiet) and all(p.grad is not None for p in step.parameters())

    for quiet, same in on_all(plan, sample, use):
        assert same and not quiet.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_buffers_updated_without_gradients_can_be_trained_with(mode: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    x = torch.randn(8, 4)
    plan, sample = made(model, (x,), lambda out: out.square().mean())

    def use(step: ParallelModule) -> float:
        with mode():
            step(x)
        step(x).backward()
        return float(step.state_dict()["1.num_batches_tracked"])

    assert on_all(plan, sample, use) == [2.0, 2.0]


# Copies, files, dtypes, devices.


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
def test_a_copy_trains_by_itself(strategy: str) -> None:
    """As for an average of the weights."""
    torch.manual_seed(0)
    model = Odd()
    words = torch.randint(10, (4, 5))
    plan, sample = made(model, (words, words), words_loss, strategy)

    def use(step: ParallelModule) -> tuple[float, ...]:
        step.note = "mine"  # type: ignore[assignment]
        seen: list[str] = []
        step.register_forward_hook(lambda *_: seen.append("hook"))
        step(words, words).backward()
        other = copy.deepcopy(step)
        named = dict(other.named_parameters(remove_duplicate=False))
        assert named["embed.weight"] is named["out.weight"] and other.plan is step.plan and other.note == "mine"
        assert {id(p) for p in other.parameters()}.isdisjoint(id(p) for p in step.parameters())
        assert sorted(other.state_dict()) == sorted(step.state_dict())
        optimizer = torch.optim.SGD(step.parameters(), lr=1.0)
        before = other(words, words).item()
        optimizer.step()
        after, kept = step(words, words).item(), other(words, words).item()
        other(words, words).backward()
        return before, after, kept

    for before, after, kept in on_all(plan, sample, use):
        assert before == kept != after


def test_an_average_of_the_weights() -> None:
    model, batch = mlp()
    plan, sample = made(model, batch, functional.mse_loss, "fsdp")

    def use(step: ParallelModule) -> tuple[float, float]:
        average = AveragedModel(step, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            step(batch).backward()
            optimizer.step()
            average.update_parameters(step)
        return step(batch).item(), average(batch).item()

    found = on_all(plan, sample, use)
    assert found[0] == found[1] and found[0][0] < found[0][1]


def test_a_copy_of_random_numbers_draws_like_the_original() -> None:
    model, batch = mlp(dropout=0.5)
    step = load(plan_of(model, batch, 1, "single"), model, device="cpu")
    other = copy.deepcopy(step)
    torch.manual_seed(3)
    first = step(batch).item()
    torch.manual_seed(3)
    assert other(batch).item() == first


def test_one_device_draws_what_the_plain_model_draws_and_leaves_the_generator_there() -> None:
    model, batch = mlp(dropout=0.5)
    step = load(plan_of(model, batch, 1, "single"), copy.deepcopy(model), device="cpu")
    losses = (lambda: functional.mse_loss(model(batch[0]), batch[1])), (lambda: step(batch))
    found = []
    for module, loss in zip((model, step), losses, strict=True):
        torch.manual_seed(3)
        both = [loss(), loss()]
        both[0].backward()
        found.append([*both, torch.rand(3), *(p.grad for p in module.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("save", [pickle.dumps, copy.copy, lambda step: torch.save(step, "/dev/null")])
def test_a_file_cannot_hold_it(save: Callable[[Any], Any]) -> None:
    step, _ = one_rank()
    with pytest.raises(UsageError, match="was asked to be pickled") as told:
        save(step)
    assert_three_sentences(told.value)


@pytest.mark.parametrize(
    "change",
    [
        lambda step: step.double(),
        lambda step: step.half(),
        lambda step: step.bfloat16(),
        lambda step: step.to(torch.float16),
        lambda step: step.to("cpu", torch.float64),
        lambda step: step.type(torch.float64),
    ],
)
def test_another_dtype_is_refused_and_nothing_is_changed(change: Callable[[nn.Module], Any]) -> None:
    step, batch = one_rank()
    before = step(batch).item()
    with pytest.raises(UsageError, match=r"asked to change from torch\.float32 to torch\.") as told:
        change(step)
    assert_three_sentences(told.value)
    assert {p.dtype for p in step.parameters()} == {torch.float32} and step(batch).item() == before


def test_moving_without_another_dtype_is_allowed() -> None:
    step, batch = one_rank()
    parameters = list(step.parameters())
    before = step(batch).item()
    for moved in (step.to("cpu"), step.float(), step.to(torch.float32), step.cpu()):
        assert moved is step
    assert all(a is b for a, b in zip(parameters, step.parameters(), strict=True))
    assert step(batch).item() == before and step.store.device == torch.device("cpu")


def test_moving_to_where_weights_would_be_lost_is_refused() -> None:
    step, _ = one_rank()
    with pytest.raises(UsageError, match="would lose its weights") as told:
        step.to("meta")
    assert_three_sentences(told.value)
    assert step.store.device == torch.device("cpu") and not any(p.is_meta for p in step.parameters())


# Without tensors to begin with.

FREE = """\
graph "free" train
param:w f32[4] trainable
takes [] in {"kind":"list","keys":[],"children":[{"kind":"tuple","keys":[],"children":[]},\
{"kind":"dict","keys":[],"children":[]},{"kind":"tuple","keys":[],"children":[]},\
{"kind":"dict","keys":[],"children":[]}]}
%0: f32[4] = ones(size=[4])
%1: f32[4] = mul.Tensor(param:w, %0)
%2: f32[] = sum(%1)
returns [%2] in null loss 0
"""


class Free(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.arange(4.0))


def test_a_graph_without_inputs_runs() -> None:
    graph, model = parse_graph(FREE), Free()
    module = to_module(graph, model)
    loss = module()
    loss.backward()
    assert loss.item() == 6.0 and model.w.grad is not None and model.w.grad.tolist() == [1.0] * 4
    step = load(make_plan(graph, parse_machine("local:1"), "single"), Free(), device="cpu")
    assert step().item() == 6.0
    assert flatten_tree(step())[0][0].requires_grad


def test_a_graph_with_nothing_but_numbers_runs() -> None:
    text = FREE.replace("param:w f32[4] trainable\n", "").replace("mul.Tensor(param:w, %0)", "mul.Tensor(%0, %0)")
    assert to_module(parse_graph(text), nn.Module())().item() == 4.0


def test_the_mode_is_that_of_the_plan() -> None:
    step, _ = one_rank()
    assert step.training and step.train() is step
    with pytest.raises(UsageError) as told:
        step.eval()
    assert_three_sentences(told.value)


def test_inputs_on_another_device_are_told() -> None:
    model, batch = mlp()
    step = load(plan_of(model, batch, 1, "single"), model, device="cpu")
    with pytest.raises(UsageError, match="Its weights are on cpu") as told:
        step(batch[0], batch[1].to("meta"))
    assert_three_sentences(told.value)
