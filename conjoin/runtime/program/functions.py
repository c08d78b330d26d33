"""What the calls of a program run, where that is more than torch's own function: apart from autocast; batch norm, also
of pieces; convolutions with weights that are turned."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from conjoin.ir import Graph, Leaf, LeafKind, Node, Value
from conjoin.ops import laid_plainly, with_gradient_laid_plainly

Function = Callable[..., Any]
BATCH_NORM = "_native_batch_norm_legit_functional"
BATCH_NORMS = (BATCH_NORM, "_native_batch_norm_legit_no_training", "batch_norm", "instance_norm")


def pinned(function: Function) -> Function:
    """The function with autocast switched off."""

    def run_pinned(*args: Any, **kwargs: Any) -> Any:
        every = (x for arg in args for x in (arg if isinstance(arg, list | tuple) else (arg,)))
        device = next((x.device.type for x in every if isinstance(x, Tensor)), "cpu")
        if not torch.is_autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    run_pinned.function = function  # type: ignore[attr-defined]
    return run_pinned


def as_written(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What a pinned call reads, in the dtype written, whatever an autocast around the program has made of it."""
    return x.to(dtype)


def without_autocast(program: fx.Graph) -> fx.Graph:
    """A copy of the program for callers who run it under no autocast: nothing has to be kept from it."""
    made, env = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.nodes:
        if node.target is as_written:
            env[node] = env[node.args[0]]
            continue
        env[node] = made.node_copy(node, env.__getitem__)
        env[node].target = getattr(node.target, "function", node.target)
    return made


@cache
def with_weight_as_torch_lays_it(convolution: Function) -> Function:
    """A convolution with any weight. Where dims of one element leave open whether channels lie last, torch's kernels
    and what they make for gradients take it for different things (2.11, 2.13), and backward fails."""

    def run_convolution(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
        made: Tensor = convolution(x, weight if _is_laid_out(weight) else weight.contiguous(), *args)
        return made

    return run_convolution


def _is_laid_out(weight: Tensor) -> bool:
    if weight.is_contiguous():
        return True
    out, features, *window = weight.shape
    return weight.stride() == torch.empty(out, *window, features, device="meta").movedim(-1, 1).stride()


def is_plain_weight(weight: Value) -> bool:
    """Whether a weight lies as torch makes new tensors: it is no view, nor made by one."""
    return isinstance(weight.owner, Leaf) and not weight.owner.channels_last


def run_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *attributes: Any,
) -> tuple[Tensor, None, None, Tensor, Tensor]:
    """Batch norm by the operator users call, which takes the device's own kernels; new statistics beside its output."""
    return update_batch_norm(x, weight, bias, mean.clone(), var.clone(), *attributes)


def update_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    *attributes: Any,
) -> tuple[Tensor, None, None, Tensor, Tensor]:
    """Batch norm that writes its new statistics over the old ones, as the user's module does."""
    training, momentum, eps = attributes
    y = torch.batch_norm(x, weight, bias, mean, var, training, momentum, eps, torch.backends.cudnn.enabled)
    return y, None, None, mean, var


def of_pieces(norm: Function) -> Function:
    """A batch norm of a piece of a tensor, which may have one sample or row where the whole has more, with pieces of
    weights, which torch's kernels read as if they were in one piece of memory."""

    def run_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *args: Any) -> Any:
        weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
        made = norm(laid_plainly(x), weight, bias, *args)
        if isinstance(made, tuple):
            return with_gradient_laid_plainly(made[0]), *made[1:]
        return with_gradient_laid_plainly(made)

    run_norm.__name__ = getattr(norm, "__name__", run_norm.__name__)
    return run_norm


def updates_in_place(graph: Graph, node: Node) -> bool:
    """Whether a batch norm may write over the statistics that it reads: nobody else reads the old ones or the new."""
    if node.op != BATCH_NORM:
        return False
    new, updates = tuple(node.outputs())[3:5], dict(graph.updates)
    for old, value in zip(node.args[3:5], new, strict=True):
        if not (isinstance(old, Value) and isinstance(old.owner, Leaf) and old.owner.kind is LeafKind.BUFFER):
            return False
        if tuple(graph.users.get(old, ())) != (node,) or updates.get(old.owner.name) != value or old in graph.outputs:
            return False
        written = [other for other in updates.values() if other in (old, value)]
        if len(written) != 1 or graph.users.get(value) or value in graph.outputs:
            return False
    return True
