"""Layers of PyTorch Geometric that give every vertex an edge to itself, traced with shapes that no edge decides.

They take the loops that a graph has out of its edges and put one in for each vertex, and so have as many edges as the
values say. While a model is traced, the loops that it has stay where they are and count for nothing: their weight is 0,
or, where a softmax goes over the edges, their score is that of no edge at all. Where edges have no weights, GCN's sums
go along the edges as they are, and the loops are put right for every vertex by itself: it adds its own row, less as
often as it came along an edge. What comes out is the same where what edges bring is added up; a layer that takes a
mean of it or the greatest would count them, and is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import CaptureError
from conjoin.frontends.calls_here import FunctionName, calls_here, plain_call
from conjoin.frontends.problems import MODEL_PREFIX

_CONV = "torch_geometric.nn.conv."
_GCN = f"{_CONV}gcn_conv"
_NORMED = tuple(
    f"{_CONV}{name}" for name in ("appnp", "dna_conv", "fa_conv", "gcn2_conv", "mixhop_conv", "pdn_conv", "sg_conv",
                                  "ssg_conv")
)  # fmt: skip
"""Whose messages are multiplied with the weights that GCN's norm gives edges."""
_ATTENDING = tuple(f"{_CONV}{name}" for name in ("gat_conv", "gatv2_conv", "agnn_conv"))
"""Whose messages are multiplied with a softmax over the edges of each vertex."""


@contextmanager
def loops_of_fixed_shape(step: nn.Module) -> Iterator[None]:
    """Trace such layers of a step inside so; whoever has not imported them has none."""
    for name, layer in step.named_modules():
        _check_adds_up(name.removeprefix(MODEL_PREFIX), layer)
    replacing = {_GCN: _for_gcn, **dict.fromkeys(_NORMED, _for_normed), **dict.fromkeys(_ATTENDING, _for_attending)}
    calls: _Replaced = {}
    for name, replaced in replacing.items():
        module = sys.modules.get(name)
        calls |= {} if module is None else replaced(module)
    with calls_here(calls):
        yield


def _check_adds_up(name: str, layer: Any) -> None:
    """Refuse a layer to which a loop of weight 0 is not the same as none."""
    known = (_GCN, *_NORMED, *_ATTENDING)
    base = next((kind for kind in type(layer).__mro__ if kind.__module__ in known), None)
    if base is None or not getattr(layer, "add_self_loops", False):
        return
    own = [part for part in ("message", "aggregate") if getattr(type(layer), part) is not getattr(base, part)]
    adds_up = type(layer.aggr_module).__name__ == "SumAggregation"
    if own or not adds_up:
        how = f"has a {own[0]} of its own" if own else f"aggregates by {type(layer.aggr_module).__name__}"
        raise CaptureError(
            f"The layer {name} ({base.__name__}) was to be captured, which {how} and gives every vertex one edge to "
            f"itself. How many edges it takes out before depends on the graph, and only where messages with weights "
            f"are added up may these stay with weight 0. Give it add_self_loops=False, and a graph that went through "
            f"add_remaining_self_loops of torch_geometric.utils."
        )


def _is_plain(edge_index: Any) -> bool:
    """Whether edges are two rows of vertices, and not one of the library's own classes."""
    is_own = type(edge_index).__module__.startswith("torch_geometric")
    return isinstance(edge_index, Tensor) and edge_index.layout is torch.strided and not is_own


def _with_loops(edges_2E: Tensor, count: int) -> Tensor:
    loops = torch.arange(count, dtype=edges_2E.dtype, device=edges_2E.device)
    return torch.cat((edges_2E, torch.stack((loops, loops))), dim=1)


_Replaced = dict[FunctionName, Callable[..., Any]]


def _norm_of_fixed_shape(plain: Callable[..., Any]) -> Callable[..., Any]:
    """GCN's norm, with the loops that a graph has left where they are."""

    def gcn_norm(  # noqa: PLR0913 - as the library has it
        edge_index: Any,
        edge_weight: Any = None,
        num_nodes: Any = None,
        improved: bool = False,
        add_self_loops: bool = True,
        flow: str = "source_to_target",
        dtype: Any = None,
    ) -> Any:
        rest = num_nodes, improved
        if not _is_plain(edge_index) or not add_self_loops or num_nodes is None:
            return plain(edge_index, edge_weight, *rest, add_self_loops, flow, dtype)
        source, target = edge_index[0], edge_index[1]
        ones = torch.ones(edge_index.shape[1], dtype=dtype, device=edge_index.device)
        weight, is_loop = ones if edge_weight is None else edge_weight, source == target
        own = weight.new_full((num_nodes + 1,), 2.0 if improved and edge_weight is not None else 1.0)
        own = own.scatter(0, torch.where(is_loop, source, num_nodes), weight)[:num_nodes]
        weights = torch.cat((torch.where(is_loop, 0.0, weight), own))
        return plain(_with_loops(edge_index, num_nodes), weights, *rest, False, flow, dtype)

    return gcn_norm


def _for_normed(module: Any) -> _Replaced:
    return {(module, "gcn_norm"): _norm_of_fixed_shape(plain_call(module, "gcn_norm"))}


def _for_gcn(module: Any) -> _Replaced:
    layer = module.GCNConv
    forward, message = plain_call(layer, "forward"), layer.message

    def forward_apart(self: Any, x: Any, edge_index: Any, edge_weight: Any = None) -> Any:
        as_it_is = type(self).message is message and (self.flow, self.aggr) == ("source_to_target", "add")
        adds_loops = self.normalize and self.add_self_loops and not self.cached and edge_weight is None
        if not as_it_is or not adds_loops or not _is_plain(edge_index) or not isinstance(x, Tensor) or x.dim() != 2:
            return forward(self, x, edge_index, edge_weight)
        x_VF = self.lin(x)
        is_loop_E, none_V = (edge_index[0] == edge_index[1]).to(x_VF.dtype), x_VF.new_zeros(x_VF.shape[0])
        loops_V = none_V.index_add(0, edge_index[1], is_loop_E)
        degree_V = none_V.index_add(0, edge_index[1], 1 - is_loop_E) + 1
        scale_V1 = degree_V.pow(-0.5).unsqueeze(-1)
        x_VF = x_VF * scale_V1
        made_VF = self.propagate(edge_index, x=x_VF, edge_weight=None) + (1 - loops_V).unsqueeze(-1) * x_VF
        made_VF = made_VF * scale_V1
        return made_VF if self.bias is None else made_VF + self.bias

    return {**_for_normed(module), (layer, "forward"): forward_apart}


def _for_attending(module: Any) -> _Replaced:
    remove, add, plain = (plain_call(module, name) for name in ("remove_self_loops", "add_self_loops", "softmax"))
    kept: list[Tensor] = []
    """Which edges count, of the layer that is being traced."""

    def remove_self_loops(edge_index: Any, edge_attr: Any = None) -> Any:
        kept.clear()
        if not _is_plain(edge_index):
            return remove(edge_index, edge_attr)
        kept.append(edge_index[0] != edge_index[1])
        return edge_index, edge_attr

    def add_self_loops(edge_index: Any, edge_attr: Any = None, fill_value: Any = None, num_nodes: Any = None) -> Any:
        if not kept:
            return add(edge_index, edge_attr, fill_value, num_nodes)
        if edge_attr is not None:
            edge_attr = torch.cat((edge_attr, _of_loops(edge_index[1], edge_attr, fill_value, num_nodes, kept[0])))
        loops = torch.ones(num_nodes, dtype=torch.bool, device=edge_index.device)
        kept.append(torch.cat((kept.pop(), loops)))
        return _with_loops(edge_index, num_nodes), edge_attr

    def softmax(src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if kept and kept[0].shape[0] == src.shape[0]:
            src = src.masked_fill(~kept.pop().view(-1, *(1,) * (src.dim() - 1)), -torch.inf)
        found: Tensor = plain(src, *args, **kwargs)
        return found

    made = (("remove_self_loops", remove_self_loops), ("add_self_loops", add_self_loops), ("softmax", softmax))
    return {(module, name): function for name, function in made}


def _of_loops(target_E: Tensor, said_EF: Tensor, fill: Any, count: int, kept_E: Tensor) -> Tensor:
    """What is said of every vertex's edge to itself: a value, or the sum or mean of what is said of the others."""
    if not isinstance(fill, str):
        told = fill if isinstance(fill, Tensor) else said_EF.new_tensor(1.0 if fill is None else fill)
        return told.to(said_EF.dtype).expand(count, *said_EF.shape[1:])
    if fill not in ("add", "sum", "mean"):
        raise CaptureError(
            f"A layer was to be captured that says of each loop the {fill[:20]} of what is said "
            f"of its others. Only for sums and means may loops that the graph has stay where they are and count for "
            f"nothing. Take fill_value='mean', or add_self_loops=False and a graph that has its loops."
        )
    weight_E = kept_E.to(said_EF.dtype)
    made = said_EF.new_zeros(count, *said_EF.shape[1:])
    made = made.index_add(0, target_E, said_EF * weight_E.view(-1, *(1,) * (said_EF.dim() - 1)))
    if fill != "mean":
        return made
    num = weight_E.new_zeros(count).index_add(0, target_E, weight_E).clamp(min=1)
    return made / num.view(-1, *(1,) * (said_EF.dim() - 1))
