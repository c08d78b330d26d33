"""Models on the meta device: captured without memory, and run on a materialised model of the same shapes."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.frontends import capture
from conjoin.ir import LeafKind
from conjoin.runtime import to_module
from zoo.llama import Llama, LlamaConfig, llama_batch
from zoo.tokens import next_token_loss


class Model(nn.Module):
    """A layer, statistics, and a tensor that is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = torch.linspace(0, 1, 6)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[0], device=x.device)
        return nn.functional.dropout(self.norm(self.layer(x)), 0.2) * self.scale + positions[:, None]


def on_meta() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return Model(), torch.zeros(5, 4)


def test_a_graph_captured_on_meta_runs_on_a_real_model(unequal: Callable[..., list[str]]) -> None:
    graph = capture(*on_meta())
    model, plain = Model(), Model()
    plain.load_state_dict(model.state_dict())
    module = to_module(graph, model)
    x = torch.randn(5, 4)
    outputs = []
    for net in (module, plain):
        torch.manual_seed(1)
        outputs.append(net(x))
        outputs[-1].square().sum().backward()
    assert torch.equal(*outputs)
    assert unequal(module, plain) == []


def test_capture_on_meta_differs_only_in_the_values_of_constants() -> None:
    graph, real = capture(*on_meta()), capture(Model(), torch.zeros(5, 4))
    assert [str(leaf) for leaf in graph.leaves] == [str(leaf) for leaf in real.leaves]
    assert [(node.op, node.types) for node in graph.nodes] == [(node.op, node.types) for node in real.nodes]
    assert [leaf.data for leaf in graph.leaves_of(LeafKind.CONSTANT)] == [None]
    assert real.leaves_of(LeafKind.CONSTANT)[0].data is not None


def test_a_model_on_meta_stays_there() -> None:
    model, x = on_meta()
    before = dict(model.named_parameters())
    capture(model, x)
    assert all(parameter is before[name] and parameter.is_meta for name, parameter in model.named_parameters())
    assert type(model.scale) is Tensor and model.scale.is_meta and x.is_meta


def test_a_real_batch_for_a_model_on_meta_and_the_other_way_round() -> None:
    model, x = on_meta()
    assert capture(model, torch.zeros(5, 4)) == capture(model, x)
    assert capture(Model(), x).leaves_of(LeafKind.INPUT) == capture(model, x).leaves_of(LeafKind.INPUT)


def test_tied_weights_on_meta_stay_one() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
        ids = torch.zeros(2, 3, dtype=torch.long)
    model[1].weight = model[0].weight
    (leaf,) = capture(model, ids).leaves_of(LeafKind.PARAMETER)
    assert (leaf.name, leaf.aliases) == ("0.weight", ("1.weight",))


def test_a_model_of_70_billion_parameters_takes_no_memory(record_property: Callable[[str, Any], None]) -> None:
    """In few and wide layers: as many parameters as in eighty of the usual width."""
    config = LlamaConfig(8, 8 * 3072, 8 * 11264, 64, 8, 128256, 8192)
    with torch.device("meta"):
        model, batch = Llama(config), llama_batch(8, config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graph = capture(model, batch, next_token_loss)
    grown_gib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    record_property("grown_gib", grown_gib)
    assert grown_gib < 1
    assert sum(leaf.type.bytes for leaf in graph.leaves_of(LeafKind.PARAMETER)) > 2 * 70e9
    assert graph.loss == 0 and len(graph.nodes) > 100
