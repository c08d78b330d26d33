"""Bundles beside torch's own `fully_shard`: the same gradients, and no more bytes, whatever is split and however."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from conjoin.comm import ring_bytes
from conjoin.ir import Plan
from conjoin.machine import Machine
from conjoin.report import explain
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.process_groups import ProcessGroups
from conjoin.search import make_plan
from tests.runtime.gloo_ranks import run_processes
from tests.runtime.hand_plans import captured, module_on, sharded_inside
from tests.runtime.random_graphs import Sample


class Block(nn.Module):
    def __init__(self, width: int, rank: int = 0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.small = nn.ModuleList((nn.Linear(width, rank, False), nn.Linear(rank, 2 * width, False)) if rank else ())
        for layer in (self.norm, self.up, self.down) if rank else ():
            layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        wide = self.up(y) + self.small[1](self.small[0](y)) if self.small else self.up(y)
        return x + self.down(functional.gelu(wide))


class Blocks(nn.Module):
    def __init__(self, width: int, rank: int = 0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width, rank) for _ in range(3)))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


@dataclass(frozen=True)
class Setup:
    """A model, and how many nodes and devices in each it is trained on."""

    width: int
    num_nodes: int
    per_node: int
    rank: int = 0
    """Of adapters beside frozen layers; 0 where all is trained."""

    @property
    def plan(self) -> Plan:
        machine = Machine("some", self.num_nodes, self.per_node, "cpu")
        graph = sample(self).graph
        return sharded_inside(graph, machine) if self.num_nodes > 1 else make_plan(graph, machine, "fsdp")


@cache
def sample(setup: Setup) -> Sample:
    torch.manual_seed(1)
    model = Blocks(setup.width, setup.rank)
    return captured(model, (torch.randn(12, setup.width), torch.randn(12, 4)), functional.mse_loss)


class SentByTorch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what collectives send, as communicators here do."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d._allgather_base_"):
            self.num_bytes += args[0].nbytes - args[1].nbytes
        elif name.startswith("c10d._reduce_scatter_base_"):
            self.num_bytes += args[1].nbytes - args[0].nbytes
        elif name.startswith("c10d.allreduce_"):
            size = dist.ProcessGroup.unbox(args[1]).size()
            self.num_bytes += sum(ring_bytes(x.nbytes, size) for x in args[0])
        return func(*args, **(kwargs or {}))


def by_torch(communicator: Communicator, setup: Setup) -> tuple[int, dict[str, Tensor]]:
    found, rank, size = sample(setup), communicator.rank, communicator.mesh.size
    model, own = copy.deepcopy(found.model), [part.chunk(size)[rank] for part in found.inputs]
    if setup.num_nodes > 1:
        devices = init_device_mesh("cpu", (setup.num_nodes, setup.per_node), mesh_dim_names=("replicate", "shard"))
    else:
        devices = init_device_mesh("cpu", (size,))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=devices, reshard_after_forward=True)  # type: ignore[arg-type]
    module = fully_shard(model, mesh=devices, reshard_after_forward=True)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    with SentByTorch() as sent:
        functional.mse_loss(module(own[0]), own[1]).backward()  # type: ignore[operator]
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return sent.num_bytes, {name: grad.full_tensor() for name, grad in grads.items()}


def by_plan(communicator: Communicator, setup: Setup) -> tuple[int, dict[str, Tensor]]:
    found, plan = sample(setup), setup.plan
    module = module_on(plan, found, communicator)
    before = communicator.bytes_sent
    module(*found.inputs).backward()
    sent = communicator.bytes_sent - before
    whole = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            shape = tuple(found.model.get_parameter(name).shape)
            whole[name] = torch.zeros(shape, dtype=torch.float64)
            region = tuple(slice(*span) for span in module.store.blocks(name, shape)[0])
            whole[name][region] = parameter.grad.as_subclass(Tensor)
            copies = torch.zeros_like(whole[name])
            copies[region] = 1
            for tensor in (whole[name], copies):
                dist.all_reduce(tensor)
            whole[name] /= copies
    return sent, whole


SETUPS = {
    "hybrid": Setup(8, 2, 2),
    "uneven": Setup(7, 1, 3),
    "hybrid, uneven": Setup(9, 2, 2),
    "frozen": Setup(8, 1, 4, rank=2),
}


Sent = tuple[int, dict[str, Tensor]]


@cache
def on_processes(num_ranks: int) -> list[dict[str, tuple[Sent, Sent]]]:
    """By rank and setup, what plan and torch send and have: all setups of as many ranks on the same processes."""
    setups = {name: setup for name, setup in SETUPS.items() if setup.num_nodes * setup.per_node == num_ranks}
    plans = {name: setup.plan for name, setup in setups.items()}

    def program(_: Communicator) -> dict[str, tuple[Sent, Sent]]:
        groups = {name: ProcessGroups(plan.mesh) for name, plan in plans.items()}
        return {name: (by_plan(groups[name], setup), by_torch(groups[name], setup)) for name, setup in setups.items()}

    with TemporaryDirectory() as folder:
        return run_processes(next(iter(plans.values())).mesh, program, Path(folder))


@pytest.mark.parametrize("name", SETUPS)
def test_gradients_and_bytes(name: str) -> None:
    plan = SETUPS[name].plan
    told = explain(plan)
    for rank, found in enumerate(on_processes(plan.mesh.size)):
        (sent, mine), (theirs_sent, theirs) = found[name]
        assert mine.keys() == theirs.keys() and mine
        for grad in mine:
            torch.testing.assert_close(mine[grad], theirs[grad], rtol=1e-10, atol=1e-12, msg=grad)
        loss = sum(c.sent[rank] for c in told.collectives if not c.of_gradient and c.kind == "all-reduce")
        assert sent == told.bytes_of(rank) and 0 < sent - loss <= theirs_sent, (sent, theirs_sent)
