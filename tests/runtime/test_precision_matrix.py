"""Kinds of models in precisions that a CPU has, by strategies, on four ranks: each follows one device under one policy.

Layouts are judged in float64, in which a plan in any precision gives what one device gives. In the precision itself
gradients may be off from those in float64 by twice what plain torch is under the same policy on one device, and by the
roundings of what was summed up in another order: eight of the dtype that it was rounded to.
"""

from __future__ import annotations

import copy
import inspect
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import conjoin
from conjoin.ir import Plan
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample
from zoo import Workload, build

NARROW = {"bf16": torch.bfloat16, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
ROUNDINGS, SCALE = 8, 256.0
"""A loss is scaled, as by a `GradScaler`, so that float16 holds its gradients."""
CASES = [
    ("gpt-125m", "bf16-mixed", "megatron:tp=2,dp=2,sp"), ("gpt-125m", "fp16-mixed", "zero1"),
    ("llama-8b", "bf16-mixed", "context:cp=2,dp=2,ring"), ("llama-8b", "bf16", "megatron:tp=2,dp=2,fsdp"),
    ("bert-base", "bf16-mixed", "fsdp"), ("bert-base", "fp16-mixed", "megatron:tp=4"),
    ("vit-b-16", "bf16-mixed", "megatron:tp=2,dp=2"), ("vit-b-16", "bf16", "hsdp:shard=2,replicate=2"),
    ("resnet-50", "bf16-mixed", "fsdp"),
    ("moe-8x7b", "bf16-mixed", "fsdp+expert:ep=4"), ("moe-8x7b", "fp16-mixed", "expert:ep=2+megatron:tp=2"),
]  # fmt: skip


@cache
def workload(name: str) -> Workload:
    made = build(f"{name}:tiny", batch_size=8, seed=1)
    for module in made.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    made.model.train()
    return made


def cast(batch: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)


def gradients_of(name: str, dtype: torch.dtype, region: AbstractContextManager[Any]) -> dict[str, Tensor]:
    """By plain torch on one device."""
    made = workload(name)
    model, batch = copy.deepcopy(made.model).to(dtype), cast(made.batch, dtype)
    with region:
        count = len(inspect.signature(model.forward).parameters)
        loss = made.loss(model(*batch[:count]), *batch[count:])
    (loss * SCALE).backward()
    return {key: p.grad.double() / SCALE for key, p in model.named_parameters() if p.grad is not None}


def gradients_by(plan: Plan, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """By a plan on threads, put together of all ranks' pieces."""
    made = workload(name)
    model = copy.deepcopy(made.model).to(dtype)
    sample, batch = Sample(plan.graph, model, ()), cast(made.batch, dtype)

    def program(ranks: Communicator) -> dict[str, tuple[Any, Tensor]]:
        module = module_on(plan, sample, ranks)
        (module(*batch) * SCALE).backward()
        found = {key: p.grad for key, p in module.named_parameters() if p.grad is not None}
        shapes = {key: tuple(p.shape) for key, p in model.named_parameters()}
        return {key: (module.store.region(key, shapes[key]), g.as_subclass(Tensor)) for key, g in found.items()}

    whole: dict[str, Tensor] = {}
    for pieces in run_ranks(plan.mesh, program):
        for key, (region, piece) in pieces.items():
            into = whole.setdefault(key, torch.zeros(model.get_parameter(key).shape, dtype=torch.float64))
            into[tuple(slice(*span) for span in region)] = piece.double() / SCALE
    return whole


@pytest.mark.parametrize(("name", "precision", "strategy"), CASES)
def test_training_follows_one_device(name: str, precision: str, strategy: str) -> None:
    made = workload(name)
    options: dict[str, Any] = {"loss": made.loss, "strategy": strategy, "precision": precision}
    plan = conjoin.plan(made.model, made.batch, "local:4", **options)
    assert plan.precision == f"{precision}@cpu"
    narrow, is_mixed = NARROW[precision], precision.endswith("mixed")
    if precision == "bf16-mixed":
        assert conjoin.verify_plan(plan, made.model, made.batch, loss=made.loss, num_steps=1).passed, "in float64"
    dtype, region = (torch.float32, torch.autocast("cpu", narrow)) if is_mixed else (narrow, nullcontext())
    exact, plain = gradients_of(name, torch.float64, nullcontext()), gradients_of(name, dtype, region)
    found = gradients_by(plan, name, dtype)
    assert found.keys() == exact.keys()
    total = sum(gradient.square().sum() for gradient in exact.values()).sqrt()
    usual = sum((plain[key] - exact[key]).square().sum() for key in exact).sqrt()
    off = sum((found[key] - exact[key]).square().sum() for key in exact).sqrt()
    assert 0 < off <= 2 * usual + ROUNDINGS * torch.finfo(narrow).eps * total
    assert usual < 0.5 * total, "it is training, not noise, that is compared"
