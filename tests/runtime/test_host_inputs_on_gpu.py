"""Inputs on the host of a GPU: blocks come by its copy engines, and nothing is read before it is there, or after."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import conjoin
from conjoin.comm import offloads
from conjoin.ir import host_inputs
from tests.runtime.test_host_inputs import on_host, sample
from zoo.gnn import DeepGcn, Gcn, Gin, GnnConfig, GraphSage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
STEPS = 3


def trained(step: Callable[[], Tensor], module: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = step()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("make", [Gcn, DeepGcn, Gin, GraphSage])
def test_training_is_as_with_all_on_the_gpu(
    make: Callable[[GnnConfig], nn.Module], pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some dozens of blocks in double precision, against the plain model on the GPU."""
    monkeypatch.setattr(offloads, "BLOCK_BYTES", 2**16)
    model, batch, graph = sample(make, 3000, 60_000)
    plain, there = copy.deepcopy(model).cuda(), [x.cuda() for x in batch]
    wanted = trained(lambda: F.cross_entropy(plain(*there[:-1]), there[-1]), plain)
    plan = on_host(graph)
    module = conjoin.load(plan, model, device="cuda")
    given = module.placed(tuple(x.pin_memory() for x in batch) if pinned else batch)
    assert sum(not x.is_cuda for x in given) == len(host_inputs(plan)) > 0
    assert trained(lambda: module(*given), module) == pytest.approx(wanted, rel=1e-9)
    for one, other in zip(plain.parameters(), module.parameters(), strict=True):
        assert (one - other).abs().max() <= 1e-9 * one.abs().max()


def test_what_comes_is_whole_while_the_device_is_late() -> None:
    """Wide rows in blocks whose memory is used again, while much is yet to be computed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 256), nn.Tanh(), nn.Linear(256, 8)).double()
    batch = (torch.randn(20_000, 4096, dtype=torch.float64), torch.randint(8, (20_000,)))
    plain = copy.deepcopy(model).cuda()
    wanted = trained(lambda: F.cross_entropy(plain(batch[0].cuda()), batch[1].cuda()), plain)
    plan = on_host(conjoin.capture(model, batch, F.cross_entropy))
    assert host_inputs(plan)
    module = conjoin.load(plan, model, device="cuda")
    given = module.placed(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert trained(lambda: module(*given), module) == pytest.approx(wanted, rel=1e-9)
    made = 20_000 * 256 * 8
    assert torch.cuda.max_memory_allocated() - before < 4 * made + 4 * 2**26 < batch[0].nbytes
