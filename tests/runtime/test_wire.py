"""Bytes on the wire: what the interface counted is what `explain` says, but for the headers of TCP and IP."""

from __future__ import annotations

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
STEPS = 10


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


def _measure(rank: int, plan: Any, model: Any, batch: Any) -> tuple[float, float]:
    step = load(plan, model)
    step(batch).backward()
    dist.barrier()
    time.sleep(0.3)
    before, counted = _transmitted(), step.communicator.bytes_sent
    dist.barrier()  # nobody sends before everybody has looked
    for _ in range(STEPS):
        step(batch).backward()
    dist.barrier()
    time.sleep(0.3)
    return (_transmitted() - before) / STEPS, (step.communicator.bytes_sent - counted) / STEPS


def _in_own_network(answer: Any, plan: Any, model: Any, batch: Any) -> None:
    _own_loopback()
    results = launch(4, _measure, plan, model, batch)
    answer.send((results[0][0], sum(sent for _, sent in results)))


@pytest.mark.parametrize("strategy", ["data-parallel", "fsdp", "megatron", "reduction"])
def test_the_wire_carries_what_is_said(strategy: str) -> None:
    model, batch = mlp(width=256, batch=64)
    plan = plan_of(model, batch, 4, strategy)
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_in_own_network, args=(theirs, plan, model, batch))
    process.start()
    theirs.close()
    wire, counted = mine.recv()
    process.join(30)
    assert counted == explain(plan).sent().total
    assert 1.0 <= wire / counted < 1.10, (wire, counted)
