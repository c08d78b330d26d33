"""The norm of gradients on many ranks where pieces are uneven or missing."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.frontends import capture
from conjoin.ir import Plan, region_of
from conjoin.machine import Machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.program.norms import clip_grad_norm
from conjoin.runtime.ranks.communicator import Communicator, World
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.search import make_pipeline
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import MESH, by_hand, by_strategy, captured, layout_of, module_on
from tests.runtime.random_graphs import Sample


def norms(plan: Plan, sample: Sample, norm_type: float, max_norm: float) -> tuple[Tensor, list[tuple[Tensor, Any]]]:
    """On one device, and on every rank with what became of its gradients."""

    def program(communicator: Communicator) -> tuple[Tensor, Any]:
        step = module_on(plan, sample, communicator)
        step(*sample.inputs).backward()
        norm = step.clip_grad_norm_(max_norm, norm_type)
        return norm, {name: p.grad.as_subclass(Tensor) for name, p in step.named_parameters() if p.grad is not None}

    found = run_ranks(plan.mesh, program)
    model = sample.model
    functional.mse_loss(model(sample.inputs[0]), sample.inputs[1]).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type), found


def small() -> Sample:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return captured(model, (torch.randn(8, 4), torch.randn(8, 1)), functional.mse_loss)


STORED = {"0.weight": "x:S(0) y:S(0)", "0.bias": "x:S(0)", "2.weight": "y:S(1)"}


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 2.5, inf])
def test_pieces_that_are_uneven(norm_type: float) -> None:
    sample = small()
    want, found = norms(by_hand(sample.graph, STORED, {}), sample, norm_type, 0.01)
    assert len({pieces["0.weight"].shape for _, pieces in found}) > 1
    for norm, _ in found:
        torch.testing.assert_close(norm, want, rtol=1e-9, atol=1e-12)
    whole = sample.model.get_parameter("0.bias").grad
    torch.testing.assert_close(torch.cat([found[0][1]["0.bias"], found[2][1]["0.bias"]]), whole)


def test_gradients_within_the_limit_are_left_alone() -> None:
    sample = small()
    want, found = norms(by_strategy(sample, "fsdp"), sample, 2.0, 1e6)
    whole = torch.cat([pieces["0.weight"].flatten() for _, pieces in found])
    assert whole.numel() >= 20 and found[0][0].item() == pytest.approx(want.item(), rel=1e-9)
    unclipped, _ = norms(by_strategy(sample, "fsdp"), Sample(sample.graph, small().model, sample.inputs), 2.0, 1e6)
    assert unclipped.item() == pytest.approx(want.item())


def test_no_gradients_have_no_norm() -> None:
    sample = small()
    plan = by_strategy(sample, "fsdp")
    assert run_ranks(plan.mesh, lambda c: module_on(plan, sample, c).clip_grad_norm_(1.0).item()) == [0.0] * 4


LAYOUTS = ["x:S(0) y:S(0)", "x:S(0)", "y:S(1)", "", "x:At(1)", "x:At(0) y:S(1)"]
ORDERS = [1.0, 2.0, 2.5, inf, -inf, 0.0, -2.0]


def gradients_of(dtype: torch.dtype, size: float) -> list[Tensor]:
    made = torch.Generator().manual_seed(3)
    wholes = [size * torch.randn(5, 3, generator=made, dtype=torch.float64) for _ in LAYOUTS]
    return [torch.complex(w, w.flip(0)).to(dtype) if dtype.is_complex else w.to(dtype) for w in wholes]


def clipped(
    communicator: Communicator, wholes: list[Tensor], max_norm: float, order: float
) -> tuple[Tensor, list[Tensor]]:
    """Clip this rank's pieces of whole gradients."""
    pieces = []
    for text, whole in zip(LAYOUTS, wholes, strict=True):
        layout = layout_of(text)
        part = whole[tuple(slice(*span) for span in region_of((5, 3), layout, MESH, communicator.rank))].clone()
        pieces.append((nn.Parameter(torch.zeros_like(part)), layout))
        if part.numel():  # who has nothing of a parameter may have no gradient of it either
            pieces[-1][0].grad = part
    norm = clip_grad_norm([(communicator, list(pieces))], max_norm, order, communicator)
    return norm, [p.grad for p, _ in pieces if p.grad is not None]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float64, 1.0), (torch.float32, 1.0), (torch.float16, 8e3), (torch.float16, 1e-4), (torch.bfloat16, 3.0),
     (torch.complex64, 1.0)],
)  # fmt: skip
def test_norms_of_all_orders_in_all_dtypes(dtype: torch.dtype, size: float, order: float) -> None:
    """The judge is torch's own on whole tensors, in double precision from the same numbers."""
    wholes = gradients_of(dtype, size)
    wide = [nn.Parameter(torch.zeros_like(w.to(torch.promote_types(dtype, torch.float64)))) for w in wholes]
    for parameter, whole in zip(wide, wholes, strict=True):
        parameter.grad = whole.to(parameter.dtype, copy=True)
    max_norm = 0.3 * size
    want = nn.utils.clip_grad_norm_(wide, max_norm, order)
    close = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-5)
    found = run_ranks(MESH, lambda c: clipped(c, wholes, max_norm, order))
    for rank, (norm, pieces) in enumerate(found):
        assert norm.item() == pytest.approx(want.item(), rel=1e-5) and norm.dtype.itemsize >= 4
        kept = [
            parameter.grad[tuple(slice(*span) for span in region_of((5, 3), layout_of(text), MESH, rank))]
            for text, parameter in zip(LAYOUTS, wide, strict=True)
        ]
        for piece, part in zip(pieces, [part for part in kept if part.numel()], strict=True):
            tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
            torch.testing.assert_close(piece.to(part.dtype), part, rtol=close, atol=tiny)


@pytest.mark.parametrize("order", [2.0, inf])
@pytest.mark.parametrize("bad", [inf, nan])
def test_what_is_not_finite_on_one_rank_is_seen_by_all(bad: float, order: float, tmp_path: Path) -> None:
    wholes = gradients_of(torch.float32, 1.0)
    wholes[1][4, 2] = bad

    def program(communicator: Communicator) -> float:
        return clipped(communicator, wholes, 1.0, order)[0].item()

    for norm in (*run_ranks(MESH, program), *run_processes(MESH, program, tmp_path)):
        assert norm == inf if bad == inf else norm != norm

    def strict(communicator: Communicator) -> None:
        piece = nn.Parameter(torch.zeros(2))
        piece.grad = torch.full((2,), bad if communicator.rank == 3 else 1.0)
        with pytest.raises(RuntimeError, match="cannot be clipped"):
            pieces = [(piece, layout_of("x:S(0) y:S(0)"))]
            clip_grad_norm([(communicator, pieces)], 1.0, order, communicator, error_if_nonfinite=True)

    run_ranks(MESH, strict)


@pytest.mark.parametrize("order", [2.0, inf, -inf])
def test_a_stage_without_gradients_is_told_the_norm_as_the_others_are(order: float) -> None:
    """Of one pipeline all ranks have one norm, to the last bit, whatever they have gradients of themselves."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))).double()
    batch = torch.randn(8, 4).double(), torch.randn(8, 4).double()
    pipeline = make_pipeline(capture(layers, batch, functional.mse_loss), Machine("two", 1, 2, "cpu"), "pipeline:pp=2")

    def program(world: World) -> tuple[Tensor, bool]:
        store = Store(pipeline, world.rank, torch.device("cpu"))
        store.fill(layers)
        step = ParallelModule(pipeline, store, world)
        if world.rank == 0:
            for parameter in step.parameters():
                parameter.requires_grad_(False)
        step(*batch).backward()
        return step.clip_grad_norm_(1e-3, order), any(p.grad is not None for p in step.parameters())

    (first, has_any), (last, has_others) = run_ranks(pipeline.mesh, program)
    assert not has_any and has_others
    assert first.dtype == last.dtype == torch.float64 and first.item() == last.item()
