"""In how many chunks something is passed on: judged by all numbers there are, on the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn

from conjoin.comm import Grid, TransferPlan, plan_of_transfer, plan_transfer
from conjoin.frontends import capture
from conjoin.ir import Pipeline
from conjoin.machine import DeviceType, Link, Machine, NodeKind
from conjoin.ops import Split
from conjoin.search import make_pipeline
from conjoin.sim import chunk_counts, crossing_seconds, fastest_chunks, transfer_seconds, with_fastest_chunks

MACHINES = {"dgx-h100": 8, "summit": 6, "p3.8xlarge": 4, "piz-daint": 1, "g5.48xlarge": 8}


def planned(seed: int) -> tuple[TransferPlan, Machine]:
    """From one to three hosts to two or three others, of which each wants all or its devices want parts."""
    draw = random.Random(seed)
    name = draw.choice([*MACHINES])
    hosts = draw.randint(1, 3), draw.randint(2, 3)
    first, second = (Grid.of_hosts(count, MACHINES[name]) for count in hosts)
    devices = tuple(first.mesh.size + device for device in second.devices)
    second = Grid(second.mesh, devices, tuple(hosts[0] + host for host in second.hosts))
    inside = [(axis.name, Split(1)) for axis in second.mesh.axes if not axis.between_nodes]
    rows = [(axis.name, Split(0)) for axis in first.mesh.axes]
    source, target = draw.choice([(), tuple(rows)]), draw.choice([(), tuple(inside)])
    shape = draw.choice([(250, 1024), (2000, 1024)])
    return plan_transfer(shape, 2, (source, first), (target, second)), Machine.preset(name, nodes=sum(hosts))


@pytest.mark.parametrize("seed", range(12))
def test_no_number_of_chunks_is_much_faster_than_the_one_that_is_chosen(seed: int) -> None:
    plan, machine = planned(seed)
    assert plan.longest_chain > 1
    seconds = {
        count: crossing_seconds(replace(plan, chunks=count), 2, machine) for count in (*range(1, 9), 12, 16, 24, 48, 96)
    }
    chosen = crossing_seconds(replace(plan, chunks=fastest_chunks(plan, machine)), 2, machine)
    assert chosen <= 1.05 * min(seconds.values())


def line(latency: float) -> Machine:
    """Six nodes of one device behind cards of a gigabyte a second."""
    device = DeviceType("slow", "cuda", 2**33, 1e10, (("float32", 5e10),))
    links = (Link(("0", "card"), 1e12, 0.0), Link(("card", "network"), 1e9, latency))
    return Machine("line", 6, 1, "cuda", nodes=(NodeKind("node", 6, (device,), links, ("card",)),))


def test_more_latency_asks_for_fewer_chunks_and_none_for_as_many_as_there_may_be() -> None:
    plan = plan_transfer((1 << 20,), 4, ((), Grid.of_hosts(1, 1)), ((), Grid.of_hosts(4, 1, 1, 1)))
    counts = [fastest_chunks(plan, line(latency)) for latency in (0.0, 1e-4, 1e-3, 1.0)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 64 and counts[-1] == 1
    assert (
        fastest_chunks(plan_transfer((64,), 4, ((), Grid.of_hosts(1, 1)), ((), Grid.of_hosts(1, 1, 1, 1))), line(0))
        == 1
    )


def test_where_it_takes_too_long_to_find_the_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_counts, "_MOST_FOLLOWED", 0)
    plan, machine = planned(0)
    assert fastest_chunks(replace(plan, chunks=7), machine) == 7


def pipeline(machine: Machine) -> Pipeline:
    """The first stage on two nodes, the second on the other four, of which two each take the same rows."""
    blocks = [[nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)] for _ in range(3)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    batch = torch.zeros(2048, 1024), torch.zeros(2048, 1024)
    graph = capture(model, batch, nn.functional.mse_loss)
    return make_pipeline(graph, machine, "pipeline:micro=2,tp=2", sizes=(2, 4))


def test_a_pipeline_says_how_many_and_is_priced_and_carried_out_so() -> None:
    machine = line(1e-5)
    found = pipeline(machine)
    transfer = next(found.transfers())
    assert transfer.chunks is not None and transfer.chunks[0] > 1
    assert plan_of_transfer(found, transfer).chunks == transfer.chunks[0]
    whole = replace(transfer, chunks=(1, 1))
    assert plan_of_transfer(found, whole).chunks == 1
    assert transfer_seconds(found, transfer, machine) < transfer_seconds(found, whole, machine) * 0.8
    assert with_fastest_chunks(found, machine) == found
    assert with_fastest_chunks(found, Machine("unknown", 6, 1, "cuda")) == found
