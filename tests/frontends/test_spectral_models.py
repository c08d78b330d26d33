"""Models that work on spectra, as Fourier neural operators: the plain model is the judge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.frontends import capture, run_plainly
from conjoin.machine import parse_machine
from conjoin.runtime.verification.plain_model import PlainModel
from conjoin.runtime.verification.plan_check import Case, verify_in_process
from conjoin.search import make_plan

WIDTH, MODES = 8, 3


class Operator(nn.Module):
    """Weights the lowest modes of an image's channels, which are written into a spectrum of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        self.low = nn.Parameter(torch.randn(WIDTH, WIDTH, MODES, MODES, 2) / WIDTH)
        self.edge = nn.Parameter(torch.randn(WIDTH, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x).permute(0, 3, 1, 2)
        spectrum = torch.fft.rfft2(h, norm="ortho")
        made = torch.zeros_like(spectrum)
        low = spectrum[:, :, :MODES, :MODES]
        made[:, :, -MODES:, :MODES] = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(self.low))
        made[:, :, 0, -1] = (spectrum[:, :, 1, 1] * torch.view_as_complex(self.edge)).conj()
        h = functional.gelu(h + torch.fft.irfft2(made, s=h.shape[-2:], norm="ortho"))
        return functional.mse_loss(self.down(h.permute(0, 2, 3, 1)), y)


class Mixer(nn.Module):
    """Mixes tokens and features by a transform, as FNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.fft.fft(self.layer(x), dim=-1), dim=1).real + torch.fft.fftn(x, dim=(1, 2)).imag
        return functional.mse_loss(mixed, y)


BATCHES = {Operator: ((4, 7, 8, 2), (4, 7, 8, 1)), Mixer: ((4, 5, 6), (4, 5, 6))}


@pytest.mark.parametrize("kind", BATCHES)
def test_spectra_are_made_sample_by_sample(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, batch = kind().double(), tuple(torch.randn(shape, dtype=torch.float64) for shape in BATCHES[kind])
    graph = capture(model, batch)
    plan = make_plan(graph, parse_machine("local:2"), "fsdp+micro=2")
    assert all(node.types[0].layout for node in plan.graph.nodes if node.op.startswith("fft_"))
    assert verify_in_process(Case(plan, graph, model, batch, PlainModel(model, None, run_plainly)), 2).passed
