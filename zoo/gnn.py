"""Graph neural networks on whole graphs, in the gather-scatter form people write: ROC's models and three more.

V vertices, E edges, F features, H heads. Messages go along edges, from `edge_index[0]` to `edge_index[1]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.workload import Entry


@dataclass(frozen=True, slots=True)
class GnnConfig:
    """A graph and the widths of the layers on it."""

    features: int
    classes: int
    degree: int
    """Edges that come to a vertex, on average."""
    hidden: int = 256
    layers: int = 2
    heads: int = 1
    several: bool = False
    """A vertex may be of several classes."""


def add_up(h_VF: Tensor, edge_index_2E: Tensor, weight_E: Tensor | None = None) -> Tensor:
    """The features of every vertex's neighbours, weighted, added up."""
    messages_EF = h_VF.index_select(0, edge_index_2E[0])
    if weight_E is not None:
        messages_EF = messages_EF * weight_E.unsqueeze(-1)
    return messages_EF.new_zeros(h_VF.shape).index_add(0, edge_index_2E[1], messages_EF)


def average(h_VF: Tensor, edge_index_2E: Tensor) -> Tensor:
    """The mean of the features of every vertex's neighbours."""
    messages_EF = h_VF[edge_index_2E[0]]
    at_EF = edge_index_2E[1].unsqueeze(-1).expand_as(messages_EF)
    return torch.zeros_like(h_VF).scatter_reduce(0, at_EF, messages_EF, "mean", include_self=False)


def widths(config: GnnConfig) -> list[tuple[int, int]]:
    """Of the inputs and outputs of each layer."""
    return list(pairwise((config.features, *(config.hidden,) * (config.layers - 1), config.classes)))


class Convolution(nn.Module):
    """A layer of each vertex, then a weighted sum of neighbours, then a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(inputs, outputs, bias=False), nn.Parameter(torch.zeros(outputs))

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor, weight_E: Tensor) -> Tensor:
        return add_up(self.layer(x_VF), edge_index_2E, weight_E) + self.bias


class Gcn(nn.Module):
    """Graph convolutions (Kipf and Welling, 2017) with a ReLU after each but the last."""

    def __init__(self, config: GnnConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Convolution(*pair) for pair in widths(config))

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor, weight_E: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x_VF = layer(x_VF, edge_index_2E, weight_E)
            x_VF = F.relu(x_VF) if i + 1 < len(self.layers) else x_VF
        return x_VF


class DeepGcn(nn.Module):
    """Graph convolutions with residual connections and layer norms between a layer in and a layer out."""

    def __init__(self, config: GnnConfig) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(config.features, config.hidden), nn.Linear(config.hidden, config.classes)
        self.layers = nn.ModuleList(nn.Linear(config.hidden, config.hidden) for _ in range(config.layers))
        self.norms = nn.ModuleList(nn.LayerNorm(config.hidden) for _ in range(config.layers))

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor, weight_E: Tensor) -> Tensor:
        x_VF = F.relu(self.inward(x_VF))
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x_VF = x_VF + F.relu(add_up(layer(norm(x_VF)), edge_index_2E, weight_E))
        return self.outward(x_VF)


class Gin(nn.Module):
    """Graph isomorphism networks (Xu et al., 2019): a network of two layers on each vertex and its neighbours."""

    def __init__(self, config: GnnConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(ins, config.hidden), nn.ReLU(), nn.Linear(config.hidden, outs))
            for ins, outs in widths(config)
        )
        self.epsilon = nn.Parameter(torch.zeros(config.layers))

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x_VF = layer((1 + self.epsilon[i]) * x_VF + add_up(x_VF, edge_index_2E))
            x_VF = F.relu(x_VF) if i + 1 < len(self.layers) else x_VF
        return x_VF


class CommNet(nn.Module):
    """Communicating agents (Sukhbaatar et al., 2016): a layer of a vertex's own, and one of its neighbours' mean."""

    def __init__(self, config: GnnConfig) -> None:
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(*pair) for pair in widths(config))
        self.others = nn.ModuleList(nn.Linear(*pair, bias=False) for pair in widths(config))

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor) -> Tensor:
        ones_E = torch.ones_like(edge_index_2E[1], dtype=x_VF.dtype)
        degree_V = x_VF.new_zeros(x_VF.shape[0]).index_add(0, edge_index_2E[1], ones_E).clamp(min=1)
        for own, others in zip(self.own, self.others, strict=True):
            x_VF = torch.tanh(own(x_VF) + others(add_up(x_VF, edge_index_2E) / degree_V.unsqueeze(-1)))
        return x_VF


class GraphSage(nn.Module):
    """GraphSAGE with means (Hamilton et al., 2017) of all neighbours, none left out."""

    def __init__(self, config: GnnConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * ins, outs) for ins, outs in widths(config))

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x_VF = layer(torch.cat((x_VF, average(x_VF, edge_index_2E)), dim=-1))
            x_VF = F.normalize(F.relu(x_VF), dim=-1) if i + 1 < len(self.layers) else x_VF
        return x_VF


class Attention(nn.Module):
    """One layer of graph attention (Velickovic et al., 2018, equations 1 to 4)."""

    def __init__(self, inputs: int, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.values = nn.Linear(inputs, heads * width, bias=False)
        self.by_source = nn.Parameter(torch.randn(heads, width) * width**-0.5)
        self.by_target = nn.Parameter(torch.randn(heads, width) * width**-0.5)

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor) -> Tensor:
        source_E, target_E = edge_index_2E[0], edge_index_2E[1]
        h_VHF = self.values(x_VF).view(-1, self.heads, self.width)
        ours_VH, theirs_VH = (h_VHF * self.by_target).sum(-1), (h_VHF * self.by_source).sum(-1)
        scores_EH = F.leaky_relu(theirs_VH[source_E] + ours_VH[target_E], 0.2)
        at_EH = target_E.unsqueeze(-1).expand_as(scores_EH)
        peaks_VH = torch.zeros_like(ours_VH).scatter_reduce(0, at_EH, scores_EH.detach(), "amax", include_self=False)
        powers_EH = torch.exp(scores_EH - peaks_VH[target_E])
        sums_VH = torch.zeros_like(ours_VH).index_add(0, target_E, powers_EH)
        weight_EH = powers_EH / (sums_VH[target_E] + 1e-16)
        messages_EHF = h_VHF[source_E] * weight_EH.unsqueeze(-1)
        return messages_EHF.new_zeros(h_VHF.shape).index_add(0, target_E, messages_EHF)


class Gat(nn.Module):
    """Graph attention: heads side by side in all layers but the last, which takes their mean."""

    def __init__(self, config: GnnConfig) -> None:
        super().__init__()
        heads, wide = config.heads, config.hidden
        ins = (config.features, *(wide,) * (config.layers - 1))
        outs = (*(wide // heads,) * (config.layers - 1), config.classes)
        self.layers = nn.ModuleList(Attention(i, heads, o) for i, o in zip(ins, outs, strict=True))

    def forward(self, x_VF: Tensor, edge_index_2E: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x_VF = F.elu(layer(x_VF, edge_index_2E).flatten(1))
        return self.layers[-1](x_VF, edge_index_2E).mean(1)


def random_edges(count: int, config: GnnConfig) -> Tensor:
    """Edges between random vertices, some of which have many; every vertex has one to itself."""
    total = count * max(config.degree - 1, 0) // 2
    one, other = ((torch.rand(total) ** power * count).long() for power in (2, 1))
    loops = torch.arange(count)
    return torch.stack((torch.cat((one, other, loops)), torch.cat((other, one, loops))))


def symmetric_weights(edge_index_2E: Tensor, count: int) -> Tensor:
    """1 / sqrt(degree of source * degree of target), as graph convolutions weigh edges."""
    ones_E = torch.ones(edge_index_2E.shape[1], device=edge_index_2E.device)
    roots_V = ones_E.new_zeros(count).index_add(0, edge_index_2E[1], ones_E).rsqrt()
    return roots_V[edge_index_2E[0]] * roots_V[edge_index_2E[1]]


def graph_batch(count: int, config: GnnConfig, weighted: bool) -> tuple[Tensor, ...]:
    """Features, edges (with weights) and labels of a graph of so many vertices."""
    edges = random_edges(count, config)
    weights = (symmetric_weights(edges, count),) if weighted else ()
    if config.several:
        labels = (torch.rand(count, config.classes) < 0.3).float()
    else:
        labels = torch.randint(config.classes, (count,))
    return torch.randn(count, config.features), edges, *weights, labels


@dataclass(frozen=True, slots=True)
class _Dataset:
    vertices: int
    features: int
    classes: int
    degree: int
    several: bool = False


_DATASETS = {
    "reddit": _Dataset(232_965, 602, 41, 493),
    "amazon": _Dataset(9_430_088, 300, 24, 25),
    "ppi": _Dataset(56_944, 700, 121, 28, several=True),
    "pubmed": _Dataset(19_717, 500, 3, 6),
}
"""ROC, table 4.3: vertices, features, labels, and edges for each vertex."""


@dataclass(frozen=True, slots=True)
class _Family:
    model: Callable[[GnnConfig], nn.Module]
    source: str
    weighted: bool = False
    hidden: int = 256
    layers: int = 2
    heads: int = 1


_MODELS = {
    "gcn": _Family(Gcn, "ROC, section 4.6: GCN, two layers of 256", weighted=True),
    "gin": _Family(Gin, "ROC, section 4.6: GIN, two layers of 256"),
    "commnet": _Family(CommNet, "ROC, section 4.6: CommNet, two layers of 256"),
    "graphsage": _Family(GraphSage, "Hamilton et al. 2017, section 4: two layers, all neighbours"),
    "gat": _Family(Gat, "Velickovic et al. 2018, section 3.3: two layers, eight heads", heads=8),
    "deep-gcn": _Family(DeepGcn, "ROC, section 4.6.3: residual connections, eight layers", weighted=True, layers=8),
}


def _entry(family: _Family, dataset: _Dataset) -> Entry:
    shape = (dataset.features, dataset.classes, dataset.degree, family.hidden, family.layers, family.heads)
    config = GnnConfig(*shape, several=dataset.several)
    layers, heads = min(family.layers, 3), min(family.heads, 2)
    tiny = GnnConfig(5, 4, 4, hidden=8, layers=layers, heads=heads, several=config.several)
    return Entry(
        model=partial(family.model, config),
        data=partial(graph_batch, config=config, weighted=family.weighted),
        tiny_model=partial(family.model, tiny),
        tiny_data=partial(graph_batch, config=tiny, weighted=family.weighted),
        batch_size=dataset.vertices,
        tiny_batch_size=4,
        loss=F.binary_cross_entropy_with_logits if dataset.several else F.cross_entropy,
        source=f"{family.source}; table 4.3 for the graph",
    )


_NAMES = {
    **{name: (name, "reddit") for name in _MODELS},
    **{f"{name}-{data}": (name, data) for name in _MODELS for data in _DATASETS},
}
MODELS: dict[str, Entry] = {name: _entry(_MODELS[model], _DATASETS[data]) for name, (model, data) in _NAMES.items()}
