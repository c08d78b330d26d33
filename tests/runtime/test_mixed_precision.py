"""Parameters that are used in another dtype than stored: cast where they lie, gathered narrow, summed up as asked.

The judges are the plain model under the same autocast, and torch's own DistributedDataParallel and FSDP2.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from conjoin.frontends import capture
from conjoin.ir import (
    Plan,
    Rounding,
    check_plan,
    computation_digest,
    cut_in_micro_batches,
    model_mark,
    operators_of,
    recompute_actions,
)
from conjoin.machine import Mesh, parse_machine
from conjoin.report import explain
from conjoin.runtime.movement.bundles import make_bundles
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.blocks import cut_out
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_plan
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import module_on
from tests.runtime.random_graphs import Sample

HALF = torch.bfloat16
WIDTH, CLASSES, ROWS = 16, 12, 8
STRATEGIES = ("data-parallel", "zero1", "fsdp", "megatron:tp=2,dp=2,fsdp", "megatron:tp=4,sp")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@cache
def sample(narrow: bool = True, sums: torch.dtype | None = None) -> Sample:
    torch.manual_seed(5)
    model, batch = Tower().train(), (torch.randn(ROWS, 4, WIDTH), torch.randint(CLASSES, (ROWS, 4)))
    with torch.autocast("cpu", HALF, enabled=narrow):
        return Sample(replace(capture(model, batch, wrong), rounding=Rounding(sums=sums)), model, batch)


def wrong(scores: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())


def plan_for(strategy: str, ranks: int = 4, narrow: bool = True, sums: torch.dtype | None = None) -> Plan:
    return make_plan(sample(narrow, sums).graph, parse_machine(f"local:{ranks}"), strategy)


def gradients_of(model: nn.Module, narrow: bool) -> dict[str, Tensor]:
    own, (x, wanted) = copy.deepcopy(model), sample().inputs
    with torch.autocast("cpu", HALF, enabled=narrow):
        loss = wrong(own(x), wanted)
    loss.backward()
    return {name: p.grad for name, p in own.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_is_as_on_one_device(strategy: str) -> None:
    found = sample()
    assert verify_in_process(Case(plan_for(strategy), found.graph, found.model, found.inputs), 2).passed


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sums", [None, HALF])
def test_gradients_are_as_near_to_full_precision_as_those_of_one_device_and_bytes_as_told(
    strategy: str, sums: torch.dtype | None
) -> None:
    plan, found = plan_for(strategy, sums=sums), sample()
    exact, plain = gradients_of(found.model, False), gradients_of(found.model, True)

    def program(communicator: Communicator) -> tuple[int, dict[str, tuple[Any, Tensor]]]:
        module = module_on(plan, found, communicator)
        module(*found.inputs).backward()
        pieces = {name: p.grad.as_subclass(Tensor) for name, p in module.named_parameters() if p.grad is not None}
        blocks = {name: module.store.blocks(name, tuple(exact[name].shape)) for name in pieces}
        return communicator.bytes_sent, {name: (blocks[name], piece) for name, piece in pieces.items()}

    ranks = run_ranks(plan.mesh, program)
    told = explain(plan)
    assert [sent for sent, _ in ranks] == [told.bytes_of(rank) for rank in range(4)]
    for _, pieces in ranks:
        for name, (blocks, piece) in pieces.items():
            assert piece.dtype == torch.float32, name
            off = (piece - cut_out(exact[name], blocks)).norm()
            usual = (plain[name] - exact[name]).norm()
            rounded = 1e-6 if sums is None else 2 * torch.finfo(sums).eps
            assert off <= 2 * usual + rounded * exact[name].norm(), name


@pytest.mark.parametrize("strategy", ["data-parallel", "zero1", "fsdp"])
def test_sums_in_half_precision_send_half_as_much(strategy: str) -> None:
    wide, narrow = (explain(plan_for(strategy, sums=sums)).totals for sums in (None, HALF))
    for one, other in zip(wide, narrow, strict=True):
        assert one.kind == other.kind and one.forward.total == other.forward.total
        if one.kind != "all-gather":
            assert 2 * other.backward.total == one.backward.total
    found = sample(sums=HALF)
    case = Case(plan_for(strategy, sums=HALF), found.graph, found.model, found.inputs)
    assert verify_in_process(case, 2).passed


def test_what_is_cast_travels_in_as_few_bundles_and_half_the_bytes() -> None:
    def kinds(narrow: bool) -> dict[str, tuple[int, int]]:
        return {t.kind: (t.forward.total, t.backward.total) for t in explain(plan_for("fsdp", narrow=narrow)).totals}

    wide, narrow = kinds(False), kinds(True)
    norms = 4 * sum(p.numel() for name, p in sample().model.named_parameters() if "norm" in name)
    assert 2 * narrow["all-gather"][0] == wide["all-gather"][0] + 3 * norms, "norms are used in float32"
    assert narrow["reduce-scatter"] == wide["reduce-scatter"], "gradients are summed up in float32"

    def count(communicator: Communicator, plan: Plan) -> tuple[int, int]:
        bundles = make_bundles(plan, communicator)
        return len(bundles), sum(len(bundle.entries) for bundle in bundles)

    for strategy in ("data-parallel", "fsdp"):
        plan = plan_for(strategy)
        (found,) = {tuple(each) for each in run_ranks(plan.mesh, lambda c, plan=plan: count(c, plan))}
        assert found == (2, len(list(sample().model.parameters()))), "one bundle for each dtype that is used"


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
def test_segments_that_are_run_again(strategy: str) -> None:
    plan, found = plan_for(strategy), sample()
    count = len(operators_of(plan.graph))
    segments = [(i, min(i + 7, count) - 1) for i in range(0, count, 7)]
    again = check_plan(replace(plan, memory=(*plan.memory, *recompute_actions(plan.graph, segments))))
    assert verify_in_process(Case(again, found.graph, found.model, found.inputs), 2).passed


class Tied(nn.Module):
    """One table that is looked up in float32 and multiplied by in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.table(tokens)))


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
def test_a_parameter_that_is_used_in_two_dtypes(strategy: str) -> None:
    torch.manual_seed(5)
    model, batch = Tied().train(), (torch.randint(CLASSES, (ROWS, 4)), torch.randint(CLASSES, (ROWS, 4)))
    with torch.autocast("cpu", HALF):
        found = Sample(capture(model, batch, wrong), model, batch)
    plan = make_plan(found.graph, parse_machine("local:4"), strategy)
    assert verify_in_process(Case(plan, found.graph, model, batch), 2).passed

    def program(communicator: Communicator) -> int:
        module_on(plan, found, communicator)(*batch).backward()
        return communicator.bytes_sent

    assert run_ranks(plan.mesh, program) == [explain(plan).bytes_of(rank) for rank in range(4)]


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp"])
@pytest.mark.parametrize("sums", [None, HALF])
def test_micro_batches(strategy: str, sums: torch.dtype | None) -> None:
    found = sample(sums=sums)
    graph, accumulation = cut_in_micro_batches(found.graph, 2)
    plan = make_plan(graph, parse_machine("local:2"), strategy)
    computes = computation_digest(plan.graph, accumulation)
    plan = check_plan(replace(plan, model=model_mark(found.graph), accumulation=accumulation, computes=computes))
    assert verify_in_process(Case(plan, found.graph, found.model, found.inputs), 2).passed

    def program(communicator: Communicator) -> tuple[int, set[torch.dtype]]:
        module = module_on(plan, found, communicator)
        module(*found.inputs).backward()
        return communicator.bytes_sent, {p.grad.dtype for p in module.parameters() if p.grad is not None}

    told = explain(plan)
    assert run_ranks(plan.mesh, program) == [(told.bytes_of(rank), {torch.float32}) for rank in range(2)]


def by_plan(communicator: Communicator, plan: Plan) -> dict[str, Tensor]:
    """Loss and weights after two steps, whole."""
    found = sample()
    module = module_on(plan, found, communicator)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = module(*found.inputs)
        loss.backward()
        optimizer.step()
    whole = {}
    for name, parameter in module.named_parameters():
        shape = tuple(found.model.get_parameter(name).shape)
        (region,) = module.store.blocks(name, shape)
        whole[name] = torch.zeros(shape)
        whole[name][tuple(slice(*span) for span in region)] = parameter.detach()
        if tuple(parameter.shape) != shape:
            dist.all_reduce(whole[name])
    return {"loss": loss.detach(), **whole}


def by_torch(communicator: Communicator, kind: str, mesh: Mesh, sums: torch.dtype | None) -> dict[str, Tensor]:
    """The same by torch's own wrapper."""
    found = sample()
    model, rank = copy.deepcopy(found.model), communicator.rank
    own = [part.chunk(mesh.size)[rank] for part in found.inputs]
    if kind == "ddp":
        module: nn.Module = DistributedDataParallel(model)
        if sums is not None:
            by_another_name = lambda state, bucket: bf16_compress_hook(state, bucket)  # which DDP wants NCCL for
            module.register_comm_hook(None, by_another_name)  # type: ignore[operator]
    else:
        policy = MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=sums or torch.float32)
        devices = init_device_mesh("cpu", (mesh.size,))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=devices, mp_policy=policy)  # type: ignore[arg-type]
        module = fully_shard(model, mesh=devices, mp_policy=policy)  # type: ignore[assignment]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # that what it returns must not be written to
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", HALF, enabled=kind == "ddp"):
            loss = wrong(module(own[0]).float(), own[1])
        loss.backward()
        optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    named = ((name.removeprefix("module."), p.detach()) for name, p in module.named_parameters())
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named}
    return {"loss": mean / mesh.size, **whole}


@pytest.mark.parametrize(("strategy", "kind"), [("data-parallel", "ddp"), ("fsdp", "fsdp2")])
def test_weights_are_those_of_torch_s_own_wrappers(strategy: str, kind: str, tmp_path: Path) -> None:
    """To what bfloat16 rounds, with sums of gradients in single precision and in bfloat16: FSDP2 casts norms too,
    which autocast does not."""
    plans = {sums: plan_for(strategy, 2, sums=sums) for sums in (None, HALF)}
    mesh = plans[None].mesh

    def program(communicator: Communicator) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        return [(by_plan(communicator, plan), by_torch(communicator, kind, mesh, s)) for s, plan in plans.items()]

    start = dict(sample().model.named_parameters())
    for mine, theirs in (both for found in run_processes(mesh, program, tmp_path) for both in found):
        assert mine.keys() == theirs.keys()
        torch.testing.assert_close(mine["loss"], theirs["loss"], rtol=1e-6 if kind == "ddp" else 5e-3, atol=0)
        for name in start:
            moved = (theirs[name] - start[name]).norm()
            assert (mine[name] - theirs[name]).norm() <= (1e-5 if kind == "ddp" else 0.05) * moved, name
