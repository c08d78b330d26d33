"""Bytes on the wire: what the interface counted is what `explain` says, but for the headers of TCP and IP."""

from __future__ import annotations

import copy
import ctypes
import fcntl
import multiprocessing
import socket
import struct
import time
from typing import Any

import pytest
import torch.distributed as dist

from conjoin.report import explain
from conjoin.runtime import launch, load
from tests.runtime.models import mlp, plan_of

_NEW_USER, _NEW_NET, _SET_FLAGS, _UP = 0x10000000, 0x40000000, 0x8914, 0x1
STEPS = 4
STRATEGIES = ("data-parallel", "fsdp", "megatron", "reduction")


def _own_loopback() -> None:
    """Move into a network of our own, in which the loopback interface carries nothing but our ranks."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NET) != 0 and libc.unshare(_NEW_NET | _NEW_USER) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace can be made")
    with socket.socket() as handle:
        fcntl.ioctl(handle, _SET_FLAGS, struct.pack("16sh", b"lo", _UP))


def _transmitted() -> int:
    with open("/proc/self/net/dev") as table:
        fields = next(line for line in table if line.strip().startswith("lo:")).split(":")[1].split()
    return int(fields[8])


def _measure(rank: int, plans: dict[str, Any], model: Any, batch: Any) -> dict[str, tuple[float, float]]:
    """By strategy, the bytes of a step that the interface counted for all ranks, and those that this rank sent."""
    found = {}
    for name, plan in plans.items():
        step = load(plan, copy.deepcopy(model))
        step(batch).backward()
        dist.barrier()
        time.sleep(0.3)
        before, counted = _transmitted(), step.communicator.bytes_sent
        dist.barrier()  # nobody sends before everybody has looked
        for _ in range(STEPS):
            step(batch).backward()
        dist.barrier()
        time.sleep(0.3)
        found[name] = (_transmitted() - before) / STEPS, (step.communicator.bytes_sent - counted) / STEPS
    return found


def _in_own_network(answer: Any, plans: dict[str, Any], model: Any, batch: Any) -> None:
    _own_loopback()
    answer.send(launch(4, _measure, plans, model, batch))


@pytest.fixture(scope="module")
def measured() -> tuple[dict[str, Any], list[dict[str, tuple[float, float]]]]:
    """The plans, and what each rank found; in one process that has a network of its own."""
    model, batch = mlp(width=256, batch=64)
    plans = {strategy: plan_of(model, batch, 4, strategy) for strategy in STRATEGIES}
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_own_network, args=(theirs, plans, model, batch))
    process.start()
    theirs.close()
    found = mine.recv()
    process.join(30)
    return plans, found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_wire_carries_what_is_said(measured: Any, strategy: str) -> None:
    plans, ranks = measured
    wire, counted = ranks[0][strategy][0], sum(found[strategy][1] for found in ranks)
    assert counted == explain(plans[strategy]).sent().total
    assert 1.0 <= wire / counted < 1.10, (wire, counted)
