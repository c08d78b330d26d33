"""Plans in eight bits on several ranks: as near to one device in eight bits as their scales let them be.

The judges: the plain model in double precision, and one device whose layers are computed in eight bits by hand.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.api import capture
from conjoin.ir import Plan
from conjoin.machine import parse_machine
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.blocks import Blocks, cut_out
from conjoin.runtime.state.checkpoint import save_checkpoint
from conjoin.runtime.state.checkpoint_loading import load_checkpoint
from conjoin.search import make_plan
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample

STRATEGIES = ("data-parallel", "zero1", "fsdp", "megatron:tp=2,dp=2", "megatron:tp=4,sp")


class ByHand(torch.autograd.Function):
    """Eight bits as a few lines of torch say it: each operand rounded, all products in float32."""

    @staticmethod
    def forward(ctx, x, weight, bias):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            made = rounded(x, torch.float8_e4m3fn) @ rounded(weight, torch.float8_e4m3fn).t()
            return (made + bias).bfloat16()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        g = rounded(gradient, torch.float8_e5m2)
        g_weight = g.flatten(0, -2).t() @ rounded(x, torch.float8_e4m3fn).flatten(0, -2)
        g_x = g @ rounded(weight, torch.float8_e4m3fn)
        return g_x.bfloat16(), g_weight.bfloat16(), gradient.flatten(0, -2).sum(0)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    top = {torch.float8_e4m3fn: 7, torch.float8_e5m2: 14}[dtype]
    unit = 2.0 ** (x.abs().max().float().log2().floor() - top)
    return (x.float() / unit).to(dtype).float() * unit


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def wrong(found: Tensor, wanted: Tensor) -> Tensor:
    return functional.mse_loss(found.float(), wanted)


@cache
def sample(precision: str = "fp8-mixed") -> Sample:
    torch.manual_seed(3)
    model = nn.Sequential(Block(), Block(), nn.Linear(32, 16)).train()
    batch = torch.randn(8, 4, 32), torch.randn(8, 4, 16)
    return Sample(capture(model, batch, wrong, precision=precision), model, batch)


def plan_for(strategy: str, ranks: int = 4, precision: str = "fp8-mixed") -> Plan:
    return make_plan(sample(precision).graph, parse_machine(f"local:{ranks}"), strategy)


@cache
def gradients(way: str) -> dict[str, Tensor]:
    """Of one device: in double precision, or in eight bits by hand under torch's own autocast."""
    found = sample()
    model, (x, wanted) = copy.deepcopy(found.model), found.inputs
    if way == "exact":
        model, x, wanted = model.double(), x.double(), wanted.double()
        functional.mse_loss(model(x), wanted).backward()
    else:
        for block in model[:2]:  # type: ignore[index]
            for layer in (block.up, block.down):
                layer.forward = lambda x, layer=layer: ByHand.apply(  # type: ignore[no-untyped-call]
                    x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16()
                )
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrong(model(x), wanted)
        loss.backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES])
def test_gradients_and_bytes(strategy: str) -> None:
    found, plan = sample(), plan_for(strategy, 1 if strategy == "single" else 4)

    def program(communicator: Communicator) -> tuple[int, dict[str, tuple[Blocks, Tensor]]]:
        module = module_on(plan, found, communicator)
        module(*found.inputs).backward()
        pieces = {name: p.grad.as_subclass(Tensor) for name, p in module.named_parameters() if p.grad is not None}
        shapes = {name: tuple(found.model.get_parameter(name).shape) for name in pieces}
        blocks = {name: module.store.blocks(name, shapes[name]) for name in pieces}
        return communicator.bytes_sent, {name: (blocks[name], piece) for name, piece in pieces.items()}

    ranks, exact, by_hand = run_ranks(plan.mesh, program), gradients("exact"), gradients("by hand")
    assert [sent for sent, _ in ranks] == [explain(plan).bytes_of(rank) for rank in range(plan.mesh.size)]
    for _, pieces in ranks:
        for name, (blocks, piece) in pieces.items():
            assert piece.dtype == torch.float32
            wanted, right = cut_out(by_hand[name], blocks), cut_out(exact[name], blocks)
            usual = (wanted - right).norm() + 0.05 * right.norm()
            assert (piece.double() - right).norm() <= 1.5 * usual, name
            assert (piece.double() - wanted).norm() <= (1e-6 * right.norm() if strategy == "single" else usual), name


def test_it_is_eight_bits() -> None:
    """Further from double precision than bfloat16 is, by about what three bits of mantissa round more than seven."""
    exact, by_hand = gradients("exact"), gradients("by hand")
    off = [((by_hand[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact if "weight" in name]
    assert max(off) > 0.01


def test_a_checkpoint_goes_on_in_bfloat16_and_back(tmp_path: Path) -> None:
    """There is no state of scales to save."""

    def program(communicator: Communicator) -> list[float]:
        losses = []
        for turn, (precision, strategy) in enumerate([("fp8-mixed", "fsdp"), ("bf16-mixed", "data-parallel")] * 2):
            found = sample(precision)
            module = module_on(plan_for(strategy, 2, precision), found, communicator)
            optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
            if turn:
                assert load_checkpoint(tmp_path / "checkpoint", module, optimizer) == {"turn": turn - 1}
            for _ in range(3):
                optimizer.zero_grad()
                loss = module(*found.inputs)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            save_checkpoint(tmp_path / "checkpoint", module, optimizer, extra={"turn": turn})
        return losses

    one, other = run_processes(plan_for("fsdp", 2).mesh, program, tmp_path)
    assert one == other
    model, (x, wanted) = copy.deepcopy(sample().model), sample().inputs
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(12):
        optimizer.zero_grad()
        loss = wrong(model(x), wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert one == pytest.approx(losses, rel=0.02) and losses[-1] < 0.9 * losses[0]
