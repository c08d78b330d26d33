"""How fast the host of a GPU launches calls: a training step that keeps only the host busy, timed and predicted."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from conjoin.cost import CostModel
from conjoin.frontends import capture
from conjoin.machine import DeviceType, Machine, NodeKind
from conjoin.runtime import to_module
from conjoin.search import make_plan
from conjoin.sim import predict

_BLOCKS, _WIDTH, _HEADS, _BATCH, _LENGTH = 12, 64, 4, 2, 32
_WARMUP, _STEPS = 3, 5


class _Block(nn.Module):
    """What layers of today's models call, on tensors so small that every device is done sooner than its host."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.heads, self.joined = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.wide, self.narrow = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.scale = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.heads(self.before(x)).view(*x.shape[:2], 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*heads.unbind(0))
        x = x + self.joined(found.transpose(1, 2).reshape(x.shape))
        made: Tensor = x + self.scale * self.narrow(F.gelu(self.wide(self.between(x))))
        return made


class HostSpeed:
    """A host whose speed can be read again and again, each time in some hundredths of a second.

    Rows of equal calls do not tell: how much longer than those the calls of a whole model take differs from host to
    host, and whole models are what is predicted.
    """

    def __init__(self, device: DeviceType, place: torch.device) -> None:
        model = nn.Sequential(*(_Block() for _ in range(_BLOCKS))).to(place)
        shape = _BATCH, _LENGTH, _WIDTH
        self._batch = torch.randn(shape, device=place), torch.randn(shape, device=place)
        graph = capture(model, self._batch, F.mse_loss)
        self._step, self._parameters, self._place = to_module(graph, model), list(model.parameters()), place
        machine = Machine(device.name, 1, 1, device.kind, nodes=(NodeKind("node", 1, (device,)),))
        parts = predict(make_plan(graph, machine, "single"), machine, CostModel([]), "sgd").breakdown
        self.predicted = parts.step - parts.update
        """Seconds of its forward and backward pass."""
        for _ in range(_WARMUP):
            self._seconds()

    def read(self) -> float:
        """How much longer the host takes than is predicted for the device, whose own host factor counts."""
        return median(self._seconds() for _ in range(_STEPS)) / self.predicted

    def _seconds(self) -> float:
        for parameter in self._parameters:
            parameter.grad = None
        torch.cuda.synchronize(self._place)
        begun = time.perf_counter()
        self._step(*self._batch).backward()
        torch.cuda.synchronize(self._place)
        return time.perf_counter() - begun
