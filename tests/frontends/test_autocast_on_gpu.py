"""Autocast on CUDA, where there is one: a captured model computes in the dtypes of the plain one, to their rounding.

What is computed in half precision is the same to the bit. Kernels that read half precision and write float32 may sum in
another order than those that read float32; computed in half precision instead, it would be a hundred times as far off.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.runtime import to_module
from tests.frontends.autocast_cases import FULL, HALF, ON_CUDA, Cast

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")


def x_on(device: str) -> Tensor:
    return torch.linspace(-1, 1, 16).reshape(4, 4).to(device)


def alike(mine: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6) if mine.dtype == FULL else torch.equal(mine, theirs)


def differences(graph: Graph, model: nn.Module, plain: nn.Module) -> list[str]:
    got, want = to_module(graph, model)(x_on("cuda")), plain(x_on("cuda"))
    found = [name for name in want if got[name].dtype != want[name].dtype or not alike(got[name], want[name])]
    for outputs in (got, want):
        torch.stack([output.double().sum() for output in outputs.values()]).sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        found += [] if torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4) else [name]
    return found


def test_torch_does_what_its_reference_says() -> None:
    outputs = Cast("cuda").cuda()(x_on("cuda"))
    assert {name: output.dtype for name, output in outputs.items()} == {n: dtype for n, (_, dtype) in ON_CUDA.items()}


def test_a_model_on_cuda_keeps_its_mixed_precision() -> None:
    model = Cast("cuda").cuda()
    plain = copy.deepcopy(model)
    assert differences(capture(model, x_on("cuda")), model, plain) == []


def test_a_model_on_meta_is_captured_as_on_cuda() -> None:
    with torch.device("meta"):
        graph = capture(Cast("cuda"), torch.zeros(4, 4))
    model = Cast("cuda").cuda()
    assert differences(graph, model, copy.deepcopy(model)) == []


def test_a_region_around_the_capture_counts_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1), nn.Linear(4, 4)).cuda()
    with torch.autocast("cuda", dtype=HALF):
        graph, want = capture(model, x_on("cuda")), model(x_on("cuda"))
    assert [node.types[0].dtype for node in graph.nodes if node.op != "_to_copy"] == [HALF, torch.float32, HALF]
    assert torch.equal(to_module(graph, model)(x_on("cuda")), want)
