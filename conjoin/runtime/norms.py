"""The norm of gradients that lie on many ranks: every element counts once, wherever it is held."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

import torch
from torch import Tensor, nn

from conjoin.ops import At, Layout, Split
from conjoin.runtime.communicator import Axes, Communicator


def clip_grad_norm(
    pieces: Iterable[tuple[nn.Parameter, Layout]], max_norm: float, norm_type: float, communicator: Communicator
) -> Tensor:
    """Scale gradients in place as `torch.nn.utils.clip_grad_norm_` does on one device, and give the norm before it.

    Parameters that are split along the same axes, or kept at one place of them, are summed up together over those axes;
    along other axes every rank has the same gradient and counts it once.
    """
    found = [(p.grad, _split_axes(layout, communicator)) for p, layout in pieces if p.grad is not None]
    groups: dict[Axes, list[Tensor]] = {}
    for gradient, axes in found:
        groups.setdefault(axes, []).append(gradient)
    totals = [_total(groups[axes], axes, norm_type, communicator) for axes in sorted(groups)]
    if not totals:
        return torch.tensor(0.0)
    stacked = torch.stack(totals)
    norm = stacked.amax() if norm_type == inf else stacked.sum() ** (1.0 / norm_type)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # the small number is torch's own
    for gradient, _ in found:
        gradient.mul_(scale.to(gradient.dtype))
    return norm


def _total(gradients: list[Tensor], axes: Axes, norm_type: float, communicator: Communicator) -> Tensor:
    here = [gradient for gradient in gradients if gradient.numel()] or [torch.zeros_like(gradients[0]).sum()]
    norms = torch.stack([torch.linalg.vector_norm(gradient, norm_type) for gradient in here])
    total = norms.amax() if norm_type == inf else (norms**norm_type).sum()
    if axes:
        communicator.prepare(axes)
        communicator.all_reduce(total, axes, largest=norm_type == inf).wait()
    return total


def _split_axes(layout: Layout, communicator: Communicator) -> Axes:
    return communicator.mesh.in_order(axis for axis, placement in layout if isinstance(placement, Split | At))
