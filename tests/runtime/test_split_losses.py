"""Losses, softmax and norms along dims that are split: partial maxima and sums, never the whole.

The judges are the plain model, and torch's own loss parallelism over its tensor-parallel layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

import conjoin
from conjoin.frontends import capture
from conjoin.ir import find_layout_faults, parse_graph
from conjoin.machine import Mesh, parse_machine
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.blocks import Blocks, cut_out
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_plan
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample

WIDTH, CLASSES, ROWS = 8, 14, 6
Loss = Callable[[Tensor, Tensor], Tensor]
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES)


class Scorer(nn.Module):
    """A pair of layers, and scores of classes."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(self.between(self.up(x))))  # type: ignore[no-any-return]


def labels(*space: int) -> Tensor:
    return torch.randint(CLASSES, (ROWS, *space)).index_fill(0, torch.tensor([1, 4]), -100)


def chances() -> Tensor:
    return torch.randn(ROWS, CLASSES).softmax(-1)


def with_z_loss(scores: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(scores, wanted) + 1e-2 * scores.logsumexp(-1).square().mean()


LOSSES: dict[str, tuple[Loss, Callable[[], Tensor]]] = {
    "mean": (functional.cross_entropy, labels),
    "sum": (lambda s, t: functional.cross_entropy(s, t, reduction="sum"), labels),
    "each": (lambda s, t: functional.cross_entropy(s, t, reduction="none").square().mean(), labels),
    "smoothed": (lambda s, t: functional.cross_entropy(s, t, label_smoothing=0.1), labels),
    "weighed": (lambda s, t: functional.cross_entropy(s, t, WEIGHTS.to(s), label_smoothing=0.2), labels),
    "chances": (lambda s, t: functional.cross_entropy(s, t.to(s), WEIGHTS.to(s), label_smoothing=0.1), chances),
    "likelihood": (lambda s, t: functional.nll_loss(s.log_softmax(-1), t, WEIGHTS.to(s)), labels),
    "divergence": (lambda s, t: functional.kl_div(s.log_softmax(-1), t.to(s), reduction="batchmean"), chances),
    "softmax": (lambda s, t: (s.softmax(-1) - t.to(s)).square().sum(), chances),
    "z": (with_z_loss, labels),
}


def sample_of(loss: Loss, target: Tensor, model: nn.Module | None = None) -> Sample:
    torch.manual_seed(3)
    model, batch = model or Scorer(), (torch.randn(ROWS, WIDTH), target)
    return Sample(capture(model, batch, loss), model, batch)


@cache
def sample_with(name: str) -> Sample:
    torch.manual_seed(1)
    loss, target = LOSSES[name]
    return sample_of(loss, target())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_classes_are_split_and_training_is_as_on_one_device(name: str, ranks: int) -> None:
    """Fourteen classes on three and four ranks are uneven pieces."""
    found = sample_with(name)
    plan = make_plan(found.graph, parse_machine(f"local:{ranks}"), f"megatron:tp={ranks}")
    split = next(leaf for leaf in plan.graph.leaves if leaf.name == "head.weight").type.layout
    assert len(split) == len(plan.mesh.names)
    assert verify_in_process(Case(plan, found.graph, found.model, found.inputs), 2).passed
    assert "combine" not in str(plan.graph), "scores are never put together"


NORMS = (nn.LayerNorm(16), nn.RMSNorm(16, eps=1e-6), nn.LayerNorm(16, bias=False), nn.Softmax(-1))


@pytest.mark.parametrize("norm", NORMS)
def test_norms_of_split_features_leave_a_pair_of_layers_split(norm: nn.Module) -> None:
    found = sample_of(functional.cross_entropy, labels(), Scorer(norm))
    plan = make_plan(found.graph, parse_machine("local:4"), "megatron:tp=4")
    layouts = {leaf.name: leaf.type.layout for leaf in plan.graph.leaves}
    assert layouts["up.weight"] and layouts["down.weight"]
    assert "combine" not in str(plan.graph)
    assert verify_in_process(Case(plan, found.graph, found.model, found.inputs), 2).passed


def test_scores_that_are_infinite_count_as_in_torch() -> None:
    """Classes that are masked out, a whole rank's too, and targets that are ignored whatever their scores."""

    def masked(scores: Tensor, wanted: Tensor) -> Tensor:
        hidden = torch.arange(CLASSES) < CLASSES // 2
        return functional.cross_entropy(scores.masked_fill(hidden, -torch.inf), wanted)

    torch.manual_seed(2)
    found = sample_of(masked, torch.tensor([7, -100, 9, 13, -100, 8]))
    plan = make_plan(found.graph, parse_machine("local:2"), "megatron:tp=2")
    assert "P(max)" in str(plan.graph)
    assert verify_in_process(Case(plan, found.graph, found.model, found.inputs), 2).passed


def test_the_greatest_of_parts_is_given_to_nobody_and_kept_by_nobody() -> None:
    graph = parse_graph(
        'graph "peaks" train\ninput:x f32[4,8]{d0:S(1)}\ninput:y f32[4,1]{d0:P(max)}\n'
        "takes [input:x, input:y] in null\n"
        "%0: f32[4,1]{d0:P(max)} = conjoin::peak(input:x, dim=[1])\n"
        "returns [%0] in null\n"
    )
    faults = [str(fault) for fault in find_layout_faults(graph, Mesh.of_nodes(1, 2))]
    assert [fault.partition(":")[0] for fault in faults] == ["input", "output 0"]
    assert "nobody keeps partial results" in faults[0] and "P(max)" in faults[0]
    assert "partial results cannot be given to the caller" in faults[1]


def loss_by_torch(rank: Communicator, model: Scorer, batch: tuple[Tensor, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """The same model under torch's tensor and loss parallelism."""
    mesh = init_device_mesh("cpu", (2,))
    own = copy.deepcopy(model)
    head = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(own, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel(), "head": head})
    with loss_parallel():
        loss = functional.cross_entropy(own(batch[0]), batch[1])
        loss.backward()
    whole = {name: p.grad.redistribute(mesh, [Replicate()]).to_local() for name, p in own.named_parameters()}
    return loss.item(), whole


def test_loss_and_gradients_are_those_of_torchs_loss_parallelism(tmp_path: Path) -> None:
    torch.manual_seed(4)
    found = sample_of(functional.cross_entropy, torch.randint(CLASSES, (ROWS,)))
    theirs = run_processes(Mesh.of_nodes(1, 2), lambda rank: loss_by_torch(rank, found.model, found.inputs), tmp_path)
    plan = make_plan(found.graph, parse_machine("local:2"), "megatron:tp=2")

    def ours(communicator: Communicator) -> tuple[float, dict[str, tuple[Blocks, Tensor]]]:
        module = module_on(plan, found, communicator)
        loss = module(*found.inputs)
        loss.backward()
        named = [(name, p.grad) for name, p in module.named_parameters() if p.grad is not None]
        blocks = {name: module.store.blocks(name, tuple(theirs[0][1][name].shape)) for name, _ in named}
        return loss.item(), {name: (blocks[name], grad.as_subclass(Tensor)) for name, grad in named}

    for value, pieces in run_ranks(plan.mesh, ours):
        assert value == pytest.approx(theirs[0][0], rel=1e-6)
        assert len(pieces) == 6
        for name, (blocks, piece) in pieces.items():
            torch.testing.assert_close(piece, cut_out(theirs[0][1][name], blocks), rtol=1e-5, atol=1e-7)
    (sums,) = explain(plan).totals
    assert sums.forward.total == 2 * 4 * ROWS * (WIDTH + 3), "a pair's sum; of the loss peaks, exponentials and scores"


class Transposed(nn.Module):
    """A softmax over what lies transposed in memory, and dropout behind it: what is drawn follows the order there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(10, 14), nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.first(x).transpose(-2, -1).softmax(-2)
        return self.last(nn.functional.dropout(shares, 0.3)).square().mean()


def test_behind_a_softmax_by_parts_is_drawn_what_one_device_draws() -> None:
    model, batch = Transposed().train(), (torch.randn(2, 4, 10),)
    plan = conjoin.plan(model, batch, "local:4", strategy="sbp3d:m=1,n=2,k=2")
    assert "expand-softmax.int" in {substitution.name for substitution in plan.substitutions}
    assert conjoin.verify_plan(plan, model, batch, num_steps=2).passed
