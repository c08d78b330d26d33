"""Autocast casts other operators on CUDA than on the CPU: a graph has the casts of the device that its model is for."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from conjoin.frontends import capture
from conjoin.ir import Graph, Value
from conjoin.runtime import to_module
from tests.frontends.autocast_cases import FULL, FULLER, HALF, ON_CUDA, Cast

X = torch.linspace(-1, 1, 16).reshape(4, 4)
PROMOTED = ("add, by promotion", "cat, the widest", "stack, the widest")
"""Which take mixed dtypes as they are, on CUDA."""


def output_dtypes(graph: Graph) -> dict[str, torch.dtype]:
    values = [output for output in graph.outputs if isinstance(output, Value)]
    return {name: value.type.dtype for name, value in zip(ON_CUDA, values, strict=True)}


def test_a_model_on_meta_is_cast_as_on_cuda() -> None:
    with torch.device("meta"):
        graph = capture(Cast("cuda"), torch.zeros(4, 4))
    assert output_dtypes(graph) == {name: dtype for name, (_, dtype) in ON_CUDA.items()}
    model = Cast("cuda")
    assert {n: y.dtype for n, y in to_module(graph, model)(X).items()} == output_dtypes(graph), "it runs anywhere"
    with torch.autocast("cpu", dtype=HALF):
        assert X.to(HALF).softmax(-1).dtype == HALF, "the CPU's lists are as they were"


def test_what_is_cast_to_full_precision_is_given_nothing_else() -> None:
    """A loss of mixed dtypes gives float32 uncast too, but has no backward on CUDA."""
    with torch.device("meta"):
        graph = capture(Cast("cuda"), torch.zeros(4, 4))
    values = [output for output in graph.outputs if isinstance(output, Value)]
    for name, value in zip(ON_CUDA, values, strict=True):
        if name in FULLER and name not in PROMOTED:
            given = [x.type.dtype for x in value.owner.inputs if x.type.dtype.is_floating_point]
            assert set(given) == {FULL}, f"{name} of {given}"


def test_cross_entropy_on_cuda_takes_logarithms_in_half_precision() -> None:
    """CUDA's lists have no cross entropy: torch makes it of a softmax with its dtype stated, and a loss of that."""
    with torch.device("meta"):
        graph = capture(Cast("cuda"), torch.zeros(4, 4))
    model = Cast("cuda")
    half = nn.functional.linear(X.to(HALF), model.layer.weight.to(HALF), model.layer.bias.to(HALF))
    want = nn.functional.nll_loss(half.log_softmax(1).float(), zeros())
    found = to_module(graph, model)(X)["cross_entropy"]
    assert torch.equal(found, want) and not torch.equal(found, nn.functional.cross_entropy(half.float(), zeros()))


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layer = layer(4, 4)

    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cuda", dtype=HALF):
            return self.layer(x)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_layers_on_cuda_compute_in_half_precision(layer: type[nn.Module]) -> None:
    """What CUDA's lists have of them is the kernel inside."""
    with torch.device("meta"):
        graph = capture(Recurrent(layer), torch.zeros((2, 4, 4) if issubclass(layer, nn.RNNBase) else (4, 4)))
    (node,) = (node for node in graph.nodes if node.op not in ("zeros", "_to_copy"))
    assert {value.type.dtype for value in node.inputs} == {type.dtype for type in node.types} == {HALF}


def zeros() -> Tensor:
    return torch.zeros(4, dtype=torch.long)


def test_a_model_of_fake_tensors_on_cuda_is_cast_as_there() -> None:
    with torch.device("meta"):
        model = Cast("cuda")
    with FakeTensorMode():
        x = torch.empty(4, 4, device="cuda")
        for part in (model, model.layer):
            for name, parameter in list(part.named_parameters(recurse=False)):
                part.register_parameter(name, nn.Parameter(torch.empty(parameter.shape, device="cuda")))
    assert output_dtypes(capture(model, x)) == {name: dtype for name, (_, dtype) in ON_CUDA.items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_region_for_the_cpu_casts_as_the_cpu_does(device: str) -> None:
    with torch.device(device):
        model, x = Cast("cpu"), torch.zeros(4, 4)
    dtypes = output_dtypes(capture(model, x))
    assert dtypes == {name: output.dtype for name, output in Cast("cpu")(X).items()}
    assert dtypes["softmax"] == HALF and ON_CUDA["softmax"][1] == FULL, "the lists differ"


class Nested(nn.Module):
    """Regions for two kinds of device, one inside the other."""

    def __init__(self, outer: str, inner: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.outer, self.inner = outer, inner

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.outer, dtype=HALF), torch.autocast(self.inner, enabled=False):
            return self.layer(x)


@pytest.mark.parametrize(("outer", "inner", "dtype"), [("cpu", "cuda", HALF), ("cpu", "cpu", FULL)])
def test_a_region_for_another_device_changes_nothing(outer: str, inner: str, dtype: torch.dtype) -> None:
    model = Nested(outer, inner)
    graph = capture(model, X)
    assert graph.outputs[0].type.dtype == dtype == model(X).dtype  # type: ignore[union-attr]
    assert torch.equal(to_module(graph, model)(X), model(X))


def test_a_region_without_effect_is_told_and_not_pinned(caplog: pytest.LogCaptureFixture) -> None:
    model = Cast("cuda")
    graph = capture(model, X)
    assert "autocast for cuda at" in caplog.text and "capture it on cuda, or on the meta device" in caplog.text
    assert not any(node.pinned for node in graph.nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, where it has no CUDA
        got, want = to_module(graph, model)(X), model(X)
    assert all(torch.equal(got[name], want[name]) for name in want)
