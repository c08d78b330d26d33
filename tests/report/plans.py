"""Plans for the tests of explanations: small models, every strategy, and runs of them on ranks that are threads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from conjoin.errors import StrategyError
from conjoin.ir import Graph, Plan, check_plan, parse_graph
from conjoin.ir import Mark as Made
from conjoin.machine import Mesh, parse_machine
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.threads import ThreadRanks, run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.search import make_plan
from tests.zoo.graphs import captured
from zoo import Workload, build

SUM = """graph "sum" train
param:w f32[4] trainable
input:x f32[8,4]{d0:S(0)}
takes [input:x] in null
%0: f32[4]{d0:B} = conjoin::replicate(param:w, axes=["d0"])
%1: f32[8,4]{d0:S(0)} = mul.Tensor(input:x, %0)  @ "/home/me/net.py":7 "scale"
%2: f32[]{d0:P} = sum(%1)  @ "/home/me/net.py":8
%3: f32[] = conjoin::reduce(%2, axes=["d0"])
returns [%3] in null loss 0
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A model of the zoo, captured in training mode."""

    workload: Workload
    graph: Graph

    def plan(self, machine: str, strategy: str) -> Plan | None:
        """The plan of a strategy; None when it does not fit the model."""
        try:
            return make_plan(self.graph, parse_machine(machine), strategy)
        except StrategyError:
            return None


def make_case(name: str, batch_size: int) -> Case:
    """A tiny model of the zoo."""
    workload = build(f"{name}:tiny", batch_size=batch_size)
    workload.model.train()
    return Case(workload, captured(name, batch_size))


def plan_of(text: str, num_ranks: int = 2, strategy: str = "by hand") -> Plan:
    """The plan that a parallel graph is."""
    graph = parse_graph(text)
    return check_plan(Plan(graph, Mesh.of_nodes(1, num_ranks), Made("net", "1" * 64), Made("two", "2" * 64), strategy))


def measure_bytes(plan: Plan, workload: Workload) -> tuple[int, ...]:
    """What the communicator of every rank counts for one forward and one backward pass."""

    def run(communicator: ThreadRanks) -> int:
        store = Store(plan, communicator.rank, torch.device("cpu"))
        store.fill(workload.model)
        module = ParallelModule(plan, store, communicator)
        batch = workload.batch
        result = module(**batch) if isinstance(batch, dict) else module(*batch)
        _loss_of(result).backward()  # type: ignore[no-untyped-call]
        return communicator.bytes_sent

    torch.manual_seed(0)
    return tuple(run_ranks(plan.mesh, run))


def _loss_of(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]
