"""Gradients of split parameters, which know that they are pieces: torch's own calls on them see the whole gradient.

`torch.nn.utils.clip_grad_norm_` and `get_total_norm`, `GradScaler.unscale_` and a norm taken by hand ask for the norm
of a gradient or whether it is finite. On a piece every rank would get another answer. A piece answers for all ranks, so
all ranks have to ask; all else is done with this rank's part. An optimizer whose update is not made element by element
would look at a part as if it were the whole: it is found out when it first makes a step, by a trial on a small matrix.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from conjoin.errors import UsageError
from conjoin.ops import Layout, Split
from conjoin.runtime.program.norms import norms_of, parted_axes
from conjoin.runtime.ranks.communicator import Axes, Communicator
from conjoin.runtime.state.optimizer_trial import Tried, try_out
from conjoin.runtime.torch_private import as_plain_tensors, check_and_unscale, foreach_norm


class GradientPiece(Tensor):
    """This rank's part of a gradient."""

    axes: Axes
    """Along which ranks hold other parts."""
    is_split: bool
    """Whether there is no rank that holds all of it."""
    communicator: Communicator
    world: Communicator | None
    """In a pipeline all ranks: other stages have other parameters."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_plain_tensors():
            answer = _ANSWERS.get(func)
            if answer is not None:
                return answer(func, *args, **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
        return result if func in _COPIES else _still_pieces(result, args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).detach().clone()


_COPIES = frozenset(
    {torch.clone, Tensor.clone, torch.zeros_like, torch.empty_like, torch.full_like, Tensor.as_subclass}
)
"""What an optimizer makes its state with, which is a tensor like any other."""


def _marked(tensor: Tensor, like: GradientPiece) -> GradientPiece:
    with as_plain_tensors():
        made = tensor.as_subclass(GradientPiece)
    made.axes, made.is_split, made.communicator, made.world = like.axes, like.is_split, like.communicator, like.world
    return made


def _still_pieces(result: Any, args: Sequence[Any]) -> Any:
    """What is made of a piece element by element is a piece: through views, casts and factors a norm stays right."""
    first = args[0] if args else None
    if isinstance(result, list | tuple) and isinstance(first, list | tuple) and len(result) == len(first):
        return type(result)(map(_still_piece, result, first)) if type(result) in (list, tuple) else result
    piece = next((arg for arg in args if isinstance(arg, GradientPiece)), None)
    return _still_piece(result, piece)


def _still_piece(result: Any, source: Any) -> Any:
    if type(result) is not Tensor or not isinstance(source, GradientPiece) or not result.is_floating_point():
        return result
    return _marked(result, source) if result.shape == source.shape else result


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each gradient as a whole, in the dtype torch would give, but at least in single precision."""
    piece = next(x for x in tensors if isinstance(x, GradientPiece))
    if piece.world is not None:
        raise UsageError(
            "The norm of gradients of a pipeline was asked for by torch's own call. This rank has the parameters of "
            "its stages only, and each would clip by another norm. Call clip_grad_norm_ of what conjoin.load "
            "gave, which takes it over all stages."
        )
    held = [(x, x.axes if isinstance(x, GradientPiece) else ()) for x in tensors]
    norms = norms_of(held, float(order), piece.communicator, piece.device)
    return [
        norm.to(dtype or torch.promote_types(x.real.dtype, torch.float32))
        for norm, x in zip(norms, tensors, strict=True)
    ]


def _vector_norm(
    func: Any, x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if dim is not None and not (isinstance(dim, list | tuple) and len(dim) in (0, x.dim())):
        raise UsageError(
            f"The norm of a gradient along dim {dim} was asked for, and this rank holds a part of shape "
            f"{tuple(x.shape)} of it. Other ranks hold the rest of those rows. Ask for the norm of the whole gradient, "
            f"or take `conjoin.full_state_dict` and gradients of a plan that splits no weights."
        )
    return _norms([x], ord, dtype)[0]


def _norm(func: Any, x: Tensor, p: float | str | None = "fro", dim: Any = None, **more: Any) -> Tensor:
    order = 2.0 if p is None or isinstance(p, str) else p
    return _vector_norm(func, x, order, dim, dtype=more.get("dtype"))


def _foreach_norm(
    func: Any, tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return _norms(tensors, ord, dtype)


def _check_and_unscale(func: Any, tensors: Sequence[Tensor], found: Tensor, scale: Tensor) -> None:
    """Scale gradients back, and tell whether one is not finite: on any rank."""
    piece = next(x for x in tensors if isinstance(x, GradientPiece))
    func(tensors, found, scale)
    communicator = piece.world or piece.communicator
    communicator.prepare(communicator.mesh.names)
    communicator.all_reduce(found, communicator.mesh.names, largest=True).wait()


_ANSWERS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _vector_norm,
    torch.norm: _norm,
    Tensor.norm: _norm,
    foreach_norm: _foreach_norm,
    check_and_unscale: _check_and_unscale,
}


def mark_gradients(
    parameters: Iterable[tuple[nn.Parameter, Layout]], communicator: Communicator, world: Communicator | None = None
) -> None:
    """Have the gradients of parameters that are not whole on this rank know it as soon as they are there; in a
    pipeline all of them, as other stages have others."""
    for parameter, layout in parameters:
        axes = parted_axes(layout, communicator.mesh)
        if (axes or world is not None) and parameter.requires_grad:
            is_split = any(isinstance(placement, Split) for _, placement in layout)
            mark = _Marker(axes, is_split, communicator, world)
            parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            _watch_optimizers()


class _Marker:
    def __init__(self, axes: Axes, is_split: bool, communicator: Communicator, world: Communicator | None) -> None:
        self._axes, self._is_split, self._communicator, self._world = axes, is_split, communicator, world

    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if type(gradient) is Tensor:
            made = gradient.as_subclass(GradientPiece)
            made.axes, made.is_split = self._axes, self._is_split
            made.communicator, made.world = self._communicator, self._world
            parameter.grad = made


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_optimizer)


_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer that would take parts of weights for the whole, at its first step."""
    if optimizer in _checked:
        return
    for group in optimizer.param_groups:
        pieces = [p.grad for p in group["params"] if isinstance(p.grad, GradientPiece) and p.grad.axes]
        if pieces:
            _judge(optimizer, try_out(optimizer, group), next((x for x in pieces if x.is_split), pieces[0]))
    _checked.add(optimizer)


def _judge(optimizer: Optimizer, tried: Tried, piece: GradientPiece) -> None:
    name = type(optimizer).__name__
    off = max(tried.between_parts if piece.is_split else 0.0, tried.between_tensors)
    if tried.error is not None:
        warnings.warn(
            f"{name} updates weights of which this rank has parts, and could not be tried out ({tried.error}). It is "
            f"right only if it works element by element. Compare a few steps with one device.",
            stacklevel=4,
        )
    elif off > 0:
        raise UsageError(
            f"{name} was to update a weight of which this rank holds a part of shape {tuple(piece.shape)}. It does not "
            f"work element by element: on a small matrix, updating the parts differs from updating the whole by "
            f"{off:.1%}. Use one that does (SGD, Adam, AdamW), or a plan that keeps weights whole (data-parallel)."
        )
