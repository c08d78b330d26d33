"""The errors of distributed training that nobody notices: each is absent here, and would be seen were it there.

Where a wrong version can be made cheaply (a dual read wrongly, a step left out, a sum over the wrong part), the same
comparison must fail for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from conjoin.comm import Step, StepKind
from conjoin.errors import PlanError, RankError
from conjoin.ir import LeafKind, Plan, region_of
from conjoin.ops import Placement
from conjoin.runtime import to_module
from conjoin.runtime.movement import carriers
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from tests.ir.wording import assert_three_sentences
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import MESH, by_hand, by_strategy, captured, module_on
from tests.runtime.random_graphs import Sample, differences, on_one_device, on_ranks


def wrong(plan: Plan, sample: Sample) -> list[str]:
    """Where the plan computes something else than one device."""
    return differences(plan, on_ranks(plan, sample), on_one_device(sample))


def mlp(bias: bool = True) -> Sample:
    model = nn.Sequential(nn.Linear(6, 8, bias), nn.Tanh(), nn.Linear(8, 4, bias))
    return captured(model, (torch.randn(8, 6), torch.randn(8, 4)), functional.mse_loss)


@pytest.fixture
def copies_read_as_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong algebra: the gradient of a copy is taken for the gradient of the value."""

    def same(placement: Placement) -> Placement:
        return placement

    monkeypatch.setattr("conjoin.comm.route.dual", same)


@pytest.fixture
def every_rank_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong I -> P: the value is kept at every place, not at one."""
    right = carriers.carry_step

    def keep(step: Step, shape: tuple[int, ...], communicator: Communicator) -> Callable[[Tensor], Tensor]:
        return (lambda x: x) if step.kind is StepKind.KEEP else right(step, shape, communicator)

    monkeypatch.setattr(carriers, "carry_step", keep)


# Gradients of replicated parameters.


@pytest.mark.parametrize("strategy", ["data-parallel", "zero1", "fsdp", "megatron"])
def test_gradients_of_replicated_parameters_are_summed_once(strategy: str) -> None:
    sample = mlp()
    assert wrong(by_strategy(sample, strategy), sample) == []


def test_a_missing_sum_would_be_seen(copies_read_as_copies: None) -> None:
    sample = mlp()
    found = wrong(by_strategy(sample, "data-parallel"), sample)
    assert found and all("gradient" in line for line in found), "the loss is right, which is why nobody notices"


LINEAR = "x B, B, B -> B"
COPIED = {0: LINEAR, 1: "x B -> B", 2: LINEAR, 3: "x B, B -> B"}


def test_work_done_alike_on_all_ranks_counts_once() -> None:
    sample = mlp()
    assert wrong(by_hand(sample.graph, {}, COPIED), sample) == []


def test_a_doubled_gradient_would_be_seen(every_rank_keeps: None) -> None:
    sample = mlp()
    found = wrong(by_hand(sample.graph, {}, COPIED), sample)
    assert found and all("gradient" in line for line in found)


# A bias where partial sums are made.

ROW_SPLIT = {2: "x S(1), S(1), P -> P"}


def test_a_bias_is_added_once_to_a_partial_sum() -> None:
    sample = mlp()
    plan = by_hand(sample.graph, {"2.weight": "x:S(1)"}, ROW_SPLIT)
    assert "conjoin::assign(param:2.bias" in str(plan.graph)
    assert wrong(plan, sample) == []


def test_a_bias_added_by_every_rank_would_be_seen(every_rank_keeps: None) -> None:
    sample = mlp()
    found = wrong(by_hand(sample.graph, {"2.weight": "x:S(1)"}, ROW_SPLIT), sample)
    assert any("output 0" in line for line in found)
    without = mlp(bias=False)
    assert wrong(by_hand(without.graph, {"2.weight": "x:S(1)"}, {2: "x S(1), S(1) -> P"}), without) == []


def test_a_bias_as_copies_beside_partial_sums_is_refused() -> None:
    with pytest.raises(KeyError, match="B"):
        by_hand(mlp().graph, {}, {2: "x S(1), S(1), B -> P"})


# One weight in two places.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.out = nn.Linear(6, 10, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(words)))  # type: ignore[no-any-return]


def words_loss(scores: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def tied() -> Sample:
    return captured(Tied(), (torch.randint(10, (3, 5)), torch.randint(10, (3, 5))), words_loss)


@pytest.mark.parametrize("stored", ["", "x:S(0)", "x:S(1)", "y:S(0) x:S(0)", "x:S(0) y:S(1)"])
@pytest.mark.parametrize("embed", ["x S(0), B -> P", "x S(1), B -> S(2)", "x B, S(0) -> S(0); y S(0), B -> P"])
@pytest.mark.parametrize("out", ["x B, S(0) -> S(2)", "x S(2), S(1) -> P; y B, S(0) -> S(2)"])
def test_a_tied_embedding_in_different_layouts(stored: str, embed: str, out: str) -> None:
    sample = tied()
    (weight,) = sample.graph.leaves_of(LeafKind.PARAMETER)
    assert weight.aliases == ("out.weight",)
    assert [node.op for node in sample.graph.nodes[:3]] == ["embedding", "tanh", "linear"]
    assert wrong(by_hand(sample.graph, {"embed.weight": stored}, {0: embed, 2: out}), sample) == []


def test_a_parameter_used_in_two_layouts() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(functional.linear(x, self.weight).tanh(), self.weight)

    sample = captured(Twice(), (torch.randn(4, 6), torch.randn(4, 6)), functional.mse_loss)
    rules = {0: "x S(0), B -> S(0); y B, S(0) -> S(1)", 2: "x S(1), S(1) -> P; y S(0), B -> S(0)"}
    for stored in ("", "x:S(0)", "x:S(1) y:S(1)", "y:S(0) x:S(0)"):
        assert wrong(by_hand(sample.graph, {"weight": stored}, rules), sample) == []


# The norm of all gradients.


@pytest.mark.parametrize("strategy", ["fsdp", "megatron", "data-parallel"])
@pytest.mark.parametrize("norm_type", [2.0, inf, 1.0, 3.0])
def test_clipping_takes_the_norm_over_all_ranks(strategy: str, norm_type: float) -> None:
    sample = mlp()
    plan = by_strategy(sample, strategy)
    plain = to_module(sample.graph, copy.deepcopy(sample.model))
    plain(*sample.inputs).backward()
    want = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    layouts = {leaf.name: leaf.type.layout for leaf in plan.graph.leaves}

    def program(communicator: Communicator) -> tuple[Tensor, Tensor]:
        module = module_on(plan, sample, communicator)
        module(*sample.inputs).backward()
        local = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], norm_type)
        norm = module.clip_grad_norm_(0.01, norm_type)
        for name, parameter in module.named_parameters():
            whole, mine = gradients[name], parameter.grad
            assert whole is not None and mine is not None
            region = region_of(tuple(whole.shape), layouts[name], plan.mesh, communicator.rank)
            torch.testing.assert_close(mine, whole[tuple(slice(*span) for span in region)], rtol=1e-9, atol=1e-12)
        return norm, local

    found = run_ranks(plan.mesh, program)
    for norm, by_torch in found:
        torch.testing.assert_close(norm, want, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(by_torch, want, rtol=1e-9, atol=1e-12)


# Dropout. Ranks are processes: threads of one process share a generator.


def draw_masks(communicator: Communicator) -> dict[str, Tensor]:
    sample = captured(nn.Dropout(0.3), (torch.ones(40, 50),))
    plans = {
        "copied": by_hand(sample.graph, {}, {0: "x S(0) -> S(0); y B -> B"}, {0: "x:S(0) y:B"}),
        "split": by_hand(sample.graph, {}, {0: "x S(0) -> S(0); y S(1) -> S(1)"}, {0: "x:S(0) y:S(1)"}),
    }
    found = {}
    for name, plan in plans.items():
        module = module_on(plan, sample, communicator)
        torch.manual_seed(5)
        found[name] = module(*sample.inputs)
        found[f"{name}, next"] = module(*sample.inputs)
        torch.manual_seed(5)
        found[f"{name}, again"] = module(*sample.inputs)
        found[f"{name}, state"] = torch.get_rng_state()
    found = {name: tensor.as_subclass(Tensor) for name, tensor in found.items()}  # this rank's pieces
    return {name: tensor != 0 if "state" not in name else tensor for name, tensor in found.items()}


def test_dropout_is_independent_across_pieces_and_equal_across_copies(tmp_path: Path) -> None:
    masks = run_processes(MESH, draw_masks, tmp_path)
    assert [tuple(mask["copied"].shape) for mask in masks] == [(20, 50)] * 4
    assert torch.equal(masks[0]["copied"], masks[1]["copied"]) and torch.equal(masks[2]["copied"], masks[3]["copied"])
    _assert_independent(masks[0]["copied"], masks[2]["copied"])
    for one in range(4):
        for other in range(one):
            _assert_independent(masks[one]["split"], masks[other]["split"])
    for mask in masks:
        for name in ("copied", "split"):
            assert torch.equal(mask[name], mask[f"{name}, again"]), "the seed says what is drawn"
            _assert_independent(mask[name], mask[f"{name}, next"])
            assert torch.equal(mask[f"{name}, state"], masks[0][f"{name}, state"]), "generators stay in step"


def _assert_independent(one: Tensor, other: Tensor) -> None:
    """Each keeps 0.7, both together 0.49, within five standard deviations."""
    for mask, rate in ((one, 0.7), (other, 0.7), (one & other, 0.49)):
        deviation = (rate * (1 - rate) / mask.numel()) ** 0.5
        assert abs(mask.double().mean().item() - rate) < 5 * deviation


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x)).square().sum()  # type: ignore[no-any-return]


def dropping(communicator: Communicator) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    sample = captured(Dropping(), (torch.randn(8, 6),))
    plan = by_hand(sample.graph, {}, {0: "x S(0), B, B -> S(0)", 1: "x S(0) -> S(0)"})
    return module_on(plan, sample, communicator), sample.inputs


def recompute(communicator: Communicator) -> list[Tensor]:
    module, inputs = dropping(communicator)
    found = []
    for run in (module, lambda x: checkpoint(module, x, use_reentrant=False)):
        torch.manual_seed(3)
        run(*inputs).backward()
        found += [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        module.zero_grad()
    return found


def test_recomputing_draws_the_same_masks(tmp_path: Path) -> None:
    for gradients in run_processes(MESH, recompute, tmp_path):
        half = len(gradients) // 2
        assert half == 2
        for one, other in zip(gradients[:half], gradients[half:], strict=True):
            assert torch.equal(one, other) and one.abs().max() > 0


def disagree(communicator: Communicator) -> str:
    module, inputs = dropping(communicator)
    torch.manual_seed(1 if communicator.rank == 3 else 0)
    module(*inputs)
    try:
        module(*inputs)
    except RankError as error:
        return str(error)
    return ""


def test_generators_that_disagree_are_found_out(tmp_path: Path) -> None:
    for message in run_processes(MESH, disagree, tmp_path):
        assert "The ranks drew different random numbers" in message
        assert_three_sentences(message)


# Means over pieces of different sizes.


def test_a_mean_over_uneven_pieces_counts_every_sample_once() -> None:
    """Seven samples over four ranks, of which some do not count."""
    labels = torch.tensor([0, 1, 2, 2, 2, 0, 2])

    def loss(scores: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(scores, labels, ignore_index=2)

    sample = captured(nn.Linear(5, 3), (torch.randn(7, 5), labels), loss)
    plan = by_strategy(sample, "data-parallel")
    assert any(leaf.type.layout for leaf in plan.graph.leaves_of(LeafKind.INPUT)), "the batch is split"
    assert wrong(plan, sample) == []
    scores = sample.model(sample.inputs[0])
    parts = [loss(s, y) for s, y in zip(scores.split([4, 3]), labels.split([4, 3]), strict=True)]
    assert not torch.isclose(torch.stack(parts).mean(), loss(scores, labels)), "the mean of the means is another"


def test_a_plain_mean_over_uneven_pieces() -> None:
    sample = captured(nn.Linear(5, 3), (torch.randn(7, 5), torch.randn(7, 3)), functional.mse_loss)
    rules = "S(0), B, B -> S(0)", "S(0), S(0) -> P"
    plan = by_hand(sample.graph, {}, {i: f"x {rule}; y {rule}" for i, rule in enumerate(rules)})
    assert wrong(plan, sample) == []


# Statistics of the whole batch.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).tanh().mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("batch", [8, 7])
@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
def test_batch_norm_takes_the_statistics_of_the_whole_batch(strategy: str, batch: int) -> None:
    images = torch.randn(batch, 2, 5, 5) * torch.linspace(0.5, 3, batch)[:, None, None, None]
    sample = captured(Normed(), (images, torch.randint(3, (batch,))), functional.cross_entropy)
    plan = by_strategy(sample, strategy)
    assert any(leaf.type.layout for leaf in plan.graph.leaves_of(LeafKind.INPUT)), "the batch is split"
    assert [name for name, _ in plan.graph.updates if "running" in name] != []
    assert wrong(plan, sample) == []
    normed = sample.model.norm(sample.inputs[0].repeat(1, 2, 1, 1))  # type: ignore[operator]
    halves = [sample.model.norm(part.repeat(1, 2, 1, 1)) for part in sample.inputs[0].split(batch // 2)]  # type: ignore[operator]
    assert not torch.allclose(torch.cat(halves), normed, rtol=1e-2), "those of a part of the batch are others"


def test_a_buffer_that_is_stored_in_pieces_is_updated_in_pieces() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(5))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.detach().sum(0))  # type: ignore[operator, union-attr]
            return (x * self.seen).sum()  # type: ignore[no-any-return, operator]

    sample = captured(Counting(), (torch.randn(4, 5),))
    assert len(sample.graph.updates) == 1
    sums = next(i for i, node in enumerate(sample.graph.nodes) if node.op.startswith("sum.dim"))
    plan = by_hand(sample.graph, {"seen": "x:S(0) y:S(0)"}, {sums: "x S(0) -> P"})
    assert wrong(plan, sample) == []


# Several passes, and parameters without gradients.


@pytest.mark.parametrize("together", [False, True], ids=["one after the other", "two forward, then backward"])
@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
def test_gradients_of_two_micro_batches_add_up(strategy: str, together: bool) -> None:
    sample = mlp()
    plan = by_strategy(sample, strategy)
    batches = [sample.inputs, tuple(torch.randn_like(x) for x in sample.inputs)]
    layouts = {leaf.name: leaf.type.layout for leaf in plan.graph.leaves}

    def accumulate(module: nn.Module) -> dict[str, Any]:
        if together:
            torch.stack([module(*batch) for batch in batches]).sum().backward()
        else:
            for batch in batches:
                module(*batch).backward()
        return {name: parameter.grad for name, parameter in module.named_parameters()}

    want = accumulate(to_module(sample.graph, copy.deepcopy(sample.model)))
    for rank, got in enumerate(run_ranks(plan.mesh, lambda c: accumulate(module_on(plan, sample, c)))):
        for name, whole in want.items():
            region = region_of(tuple(whole.shape), layouts[name], plan.mesh, rank)
            torch.testing.assert_close(got[name], whole[tuple(slice(*s) for s in region)], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron"])
def test_frozen_parameters_have_no_gradient_and_the_others_theirs(strategy: str) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    sample = captured(model, (torch.randn(8, 6), torch.randn(8, 4)), functional.mse_loss)
    plan = by_strategy(sample, strategy)
    assert wrong(plan, sample) == []
    for outcome in on_ranks(plan, sample):
        assert [name for name, gradient in outcome.gradients.items() if gradient is None] == ["0.weight", "2.bias"]


def test_a_model_in_which_something_else_is_frozen_is_refused() -> None:
    sample = mlp()
    plan = by_strategy(sample, "data-parallel")
    other = copy.deepcopy(sample.model)
    other[0].weight.requires_grad_(False)  # type: ignore[index]
    with pytest.raises(PlanError, match=r"0\.weight is frozen, which it was not"):
        on_ranks(plan, Sample(sample.graph, other, sample.inputs))
