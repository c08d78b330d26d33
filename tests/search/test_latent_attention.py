"""Attention whose heads are made of a latent (DeepSeek's): layers to latents are left, those behind them are split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.machine import parse_machine
from conjoin.search import make_plan
from tests.runtime.thread_modules import module_on, run_ranks

BATCH, LENGTH, WIDTH, HEADS, SIZE, TURNED, LATENT = 4, 6, 16, 4, 4, 2, 6


class Latent(nn.Module):
    """Keys have a part of their own in every head, made of the latent, and one that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_norm, self.kv_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(LATENT), nn.RMSNorm(LATENT)
        self.q_a, self.q_b = nn.Linear(WIDTH, LATENT), nn.Linear(LATENT, HEADS * (SIZE + TURNED), bias=False)
        self.kv_a, self.kv_b = nn.Linear(WIDTH, LATENT + TURNED), nn.Linear(LATENT, HEADS * 2 * SIZE, bias=False)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q_b(self.q_norm(self.q_a(y))).view(*x.shape[:2], HEADS, -1).transpose(1, 2)
        latent, shared = self.kv_a(y).split([LATENT, TURNED], dim=-1)
        keys, values = self.kv_b(self.kv_norm(latent)).view(*x.shape[:2], HEADS, -1).transpose(1, 2).chunk(2, dim=-1)
        k = keys.new_empty(*keys.shape[:-1], SIZE + TURNED)
        k[..., :SIZE].copy_(keys)
        k[..., SIZE:].copy_(shared[:, None].sin().expand(-1, HEADS, -1, -1))
        mixed = F.scaled_dot_product_attention(q, k, values, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("strategy", ["megatron:tp=2", "megatron:tp=2,sp+micro=2"])
def test_heads_are_split_and_training_is_as_on_one_device(strategy: str) -> None:
    model, x = Latent().double(), torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    graph = capture(model, (x, torch.zeros_like(x)), F.mse_loss)
    plan = make_plan(graph, parse_machine("local:2"), strategy)

    def program(ranks: Any) -> tuple[float, dict[str, Tensor]]:
        step = module_on(plan, model, ranks)
        loss = step(x, torch.zeros_like(x))
        loss.backward()
        return loss.item(), {name: p.grad.as_subclass(Tensor) for name, p in step.named_parameters()}

    (loss, gradients), (other, _) = run_ranks(plan.mesh, program)
    plain = F.mse_loss(model(x), torch.zeros_like(x))
    plain.backward()
    assert loss == other == pytest.approx(plain.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        whole, mine = parameter.grad, gradients[name]
        assert whole is not None
        torch.testing.assert_close(mine, whole[tuple(slice(n) for n in mine.shape)], rtol=1e-9, atol=1e-12)
        assert mine.numel() * (2 if name in ("q_b.weight", "kv_b.weight", "out.weight") else 1) == whole.numel()
