"""The norm of gradients that lie on many ranks: every element counts once, wherever it is held."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import copysign, inf, nan

import torch
from torch import Tensor, nn

from conjoin.machine import Mesh
from conjoin.ops import At, Layout, Split
from conjoin.runtime.ranks.communicator import Axes, Communicator
from conjoin.runtime.torch_private import as_plain_tensors

_HALF = (torch.float16, torch.bfloat16)
"""Too narrow to square in."""
Held = tuple[Tensor | None, Axes]
"""What a rank holds of a tensor, and the axes along which the other parts lie: along all others ranks hold the same."""


Group = tuple[Communicator, Sequence[tuple[nn.Parameter, Layout]]]
"""Parameters with their layouts, and the ranks that hold them."""


def clip_grad_norm(
    groups: Sequence[Group],
    max_norm: float,
    norm_type: float,
    communicator: Communicator,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place as `torch.nn.utils.clip_grad_norm_` does on one device, and give the norm before it.

    Groups are the stages of a pipeline that this rank is part of, or all there is.
    """
    with as_plain_tensors():
        return _clip(groups, max_norm, norm_type, communicator, error_if_nonfinite)


def _clip(
    groups: Sequence[Group], max_norm: float, norm_type: float, communicator: Communicator, error_if_nonfinite: bool
) -> Tensor:
    trained = [(members, [(p, layout) for p, layout in pieces if p.requires_grad]) for members, pieces in groups]
    everywhere = all(members is communicator for members, _ in trained)
    if everywhere and not any(pieces for _, pieces in trained):
        return torch.tensor(0.0)
    gradients = [p.grad for _, pieces in trained for p, _ in pieces if p.grad is not None]
    norms = [norm for members, pieces in trained for norm in _norms_in(members, pieces, norm_type)]
    device = communicator.device
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else _power(None, norm_type, device)
    dtypes = (gradient.abs().dtype if gradient.is_complex() else gradient.dtype for gradient in gradients)
    dtype: torch.dtype = reduce(torch.promote_types, dtypes, torch.float32)
    if not everywhere:
        norm, dtype = _over_stages(norm, dtype, trained, norm_type, communicator)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients of all ranks is {norm.item()}, so they cannot be clipped. "
            f"Leave error_if_nonfinite out to scale them by it all the same."
        )
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # the small number is torch's own
    for gradient in gradients:
        scale_by(gradient, scale)
    return norm.to(dtype)


def _norms_in(members: Communicator, pieces: Sequence[tuple[nn.Parameter, Layout]], order: float) -> list[Tensor]:
    if not pieces:
        return []
    held = [(p.grad, parted_axes(layout, members.mesh)) for p, layout in pieces]
    return norms_of(held, order, members, pieces[0][0].device)


def _over_stages(
    norm: Tensor, dtype: torch.dtype, groups: Sequence[Group], order: float, communicator: Communicator
) -> tuple[Tensor, torch.dtype]:
    """The norm of all stages from that of this rank's, and the widest dtype of any: ranks that have no gradients, or
    narrower ones, tell the same number. The first rank of a stage speaks for it."""
    speaks = all(members.rank == 0 for members, _ in groups)
    mine = norm.double().to(communicator.device).view(1) if speaks else _power(None, order, communicator.device).view(1)
    if speaks and abs(order) != inf and order:
        mine = mine**order
    is_wide = torch.full_like(mine, copysign(float(dtype == torch.float64), order))  # not zero where it is on any rank
    total, num_wide = over_ranks(torch.cat([mine, is_wide]), communicator.mesh.names, order, communicator)
    widest = torch.float64 if num_wide else torch.float32
    return (total if abs(order) == inf or not order else total ** (1.0 / order)), widest


def scale_by(gradient: Tensor, scale: Tensor) -> None:
    """Multiply in place by a number in double precision."""
    if gradient.dtype in _HALF:  # a small scale would itself be rounded
        gradient.copy_(gradient.float() * scale.float())
    else:
        gradient.mul_(scale.to(gradient.dtype))


def norms_of(held: Sequence[Held], order: float, communicator: Communicator, device: torch.device) -> list[Tensor]:
    """The norm of each whole tensor, in double precision, the same on all ranks.

    Those whose parts lie along the same axes go in one collective. A rank that has nothing of a tensor takes part.
    """
    norms = [_power(tensor, order, device) for tensor, _ in held]
    for axes in sorted({axes for _, axes in held if axes}):
        chosen = [i for i, (_, other) in enumerate(held) if other == axes]
        totals = over_ranks(torch.stack([norms[i] for i in chosen]), axes, order, communicator)
        for i, total in zip(chosen, totals, strict=True):
            norms[i] = total
    return norms if abs(order) == inf or not order else [norm ** (1.0 / order) for norm in norms]


def _power(tensor: Tensor | None, order: float, device: torch.device) -> Tensor:
    """What adds up over the parts of a tensor, or of which the largest or smallest is taken."""
    if tensor is None or not tensor.numel():
        return torch.tensor(inf if order == -inf else 0.0, dtype=torch.float64, device=device)
    wide = torch.float32 if tensor.dtype in _HALF else None
    norm = torch.linalg.vector_norm(tensor.detach(), order, dtype=wide).double()
    powered: Tensor = norm if abs(order) == inf or not order else norm**order
    return powered


def over_ranks(norms: Tensor, axes: Axes, order: float, communicator: Communicator) -> Tensor:
    """Numbers of all ranks summed up, or for the orders of infinity the largest or smallest of them."""
    communicator.prepare(axes)
    if abs(order) != inf:
        communicator.all_reduce(norms, axes).wait()
        return norms
    sign = 1.0 if order > 0 else -1.0  # backends disagree on the largest of numbers and what is not a number
    both = torch.stack([sign * norms.nan_to_num(nan=0.0, posinf=inf, neginf=-inf), norms.isnan().double()])
    communicator.all_reduce(both, axes, largest=True).wait()
    return torch.where(both[1] > 0, nan, sign * both[0])


def parted_axes(layout: Layout, mesh: Mesh) -> Axes:
    """The axes along which ranks hold different parts of a tensor."""
    return mesh.in_order(axis for axis, placement in layout if isinstance(placement, Split | At))
