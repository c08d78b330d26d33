"""Gradients of split parameters, which know that they are pieces: torch's own calls on them see the whole gradient.

`torch.nn.utils.clip_grad_norm_` and `get_total_norm`, `GradScaler.unscale_` and what is taken by hand ask for the norm
of a gradient, its sum or largest element, or whether it is finite. On a piece every rank would get another answer, and
decide otherwise than the rest. A piece answers for all ranks, so all ranks have to ask; what is asked of rows of it is
refused, and all else is done with this rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import UsageError
from conjoin.ops import Layout, Split
from conjoin.runtime.program.norms import norms_of, over_ranks, parted_axes
from conjoin.runtime.program.optimizer_watch import note_part
from conjoin.runtime.ranks.communicator import Axes, Communicator
from conjoin.runtime.torch_private import as_plain_tensors, check_and_unscale, foreach_norm


class GradientPiece(Tensor):
    """This rank's part of a gradient."""

    axes: Axes
    """Along which ranks hold other parts."""
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
    made.axes, made.communicator, made.world = like.axes, like.communicator, like.world
    return made


def _still_pieces(result: Any, args: Sequence[Any]) -> Any:
    """What is made of a piece element by element is a piece: through views, casts and factors a norm stays right; and
    so are pieces behind each other."""
    first = args[0] if args else None
    if isinstance(result, list | tuple) and isinstance(first, list | tuple) and len(result) == len(first):
        return type(result)(map(_still_piece, result, first)) if type(result) in (list, tuple) else result
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if isinstance(result, Tensor) and result.dtype is torch.bool and len(tensors) > 1:
        return result  # compared with what this rank has
    return _still_piece(result, next((x for x in tensors if isinstance(x, GradientPiece)), None))


def _still_piece(result: Any, source: Any) -> Any:
    if type(result) is not Tensor or not isinstance(source, GradientPiece):
        return result
    is_kept = result.is_floating_point() or result.dtype is torch.bool
    return _marked(result, source) if is_kept and result.numel() == source.numel() else result


def _of_all_stages(piece: GradientPiece) -> GradientPiece:
    if piece.world is not None:
        raise UsageError(
            "The norm of gradients of a pipeline was asked for by torch's own call. This rank has the parameters of "
            "its stages only, and each would clip by another norm. Call clip_grad_norm_ of what conjoin.load "
            "gave, which takes it over all stages."
        )
    return piece


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each gradient as a whole, in the dtype torch would give, but at least in single precision."""
    piece = _of_all_stages(next(x for x in tensors if isinstance(x, GradientPiece)))
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


def _no_rows(func: Any, x: Tensor) -> UsageError:
    return UsageError(
        f"{func.__name__} of parts of a gradient was asked for, and this rank holds a part of shape {tuple(x.shape)} "
        f"of it. Other ranks hold the rest, and each would have another answer. Ask for its norm, sum, mean, max, min, "
        f"any or all as a whole, on every rank, or take this rank's part by .as_subclass(torch.Tensor)."
    )


def _whole(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A sum, mean, largest or smallest element over all ranks, and whether any or all are true."""
    others = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    if others:  # of two tensors: element by element
        return _still_pieces(func(x, *args, **kwargs), (x, *others))
    if args or kwargs.get("dim") is not None or kwargs.get("keepdim") or x.is_complex():
        raise _no_rows(func, x)
    piece, name = _of_all_stages(x), func.__name__
    order, of_none = _ORDERS[name]
    found = func(x) if x.numel() else func(x.new_zeros(1)).fill_(of_none)
    mine = x.double().sum() if name == "mean" else found.double()
    held = torch.stack([mine, mine.new_tensor(float(x.numel()))])
    total = over_ranks(held, piece.axes, order, piece.communicator) if piece.axes else held
    answer = total[0] / total[1] if name == "mean" else total[0]
    return answer.to(kwargs.get("dtype") or found.dtype)


def _refused(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise _no_rows(func, next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, GradientPiece)))


def _joined(func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Pieces behind each other, if their other parts lie along the same axes: then norms stay right."""
    if len({x.axes if isinstance(x, GradientPiece) else () for x in tensors}) > 1:
        raise UsageError(
            f"{func.__name__} of {len(tensors)} gradients was asked for, of which this rank holds parts. They are "
            f"split along different axes of the mesh, so nobody could tell the norm of what comes out. Take the norm "
            f"of each, or call torch.nn.utils.clip_grad_norm_ or get_total_norm with all of them."
        )
    return _marked(func(tensors, *args, **kwargs), next(x for x in tensors if isinstance(x, GradientPiece)))


_ORDERS = {
    "sum": (1.0, 0.0), "mean": (1.0, 0.0), "count_nonzero": (1.0, 0.0), "max": (inf, -inf), "amax": (inf, -inf),
    "any": (inf, 0.0), "min": (-inf, inf), "amin": (-inf, inf), "all": (-inf, 1.0),
}  # fmt: skip
"""How answers of ranks are put together: summed up, or the largest or smallest of them; and that for no elements."""
_OF_ROWS = (
    "argmax", "argmin", "std", "var", "median", "nanmedian", "quantile", "nanquantile", "histc", "prod", "logsumexp",
    "aminmax", "nansum", "nanmean", "topk", "kthvalue", "mode", "dot", "vdot", "inner", "mv", "mm", "matmul",
    "cosine_similarity",
)  # fmt: skip
"""What looks at more than an element, and is not put together here."""
_JOINING = (torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack)


def _both(names: Iterable[str], answer: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """As a function of torch and as a method."""
    found = (getattr(home, name, None) for home in (torch, Tensor) for name in names)
    return {func: answer for func in found if func is not None}


_ANSWERS: dict[Any, Callable[..., Any]] = {
    **_both(_ORDERS, _whole),
    **_both(_OF_ROWS, _refused),
    **dict.fromkeys(_JOINING, _joined),
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
            mark = _Marker(axes, communicator, world)
            parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            if axes:
                note_part(parameter, is_split=is_split)


class _Marker:
    def __init__(self, axes: Axes, communicator: Communicator, world: Communicator | None) -> None:
        self._axes, self._communicator, self._world = axes, communicator, world

    def __call__(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        if type(gradient) is Tensor:
            made = gradient.as_subclass(GradientPiece)
            made.axes, made.communicator, made.world = self._axes, self._communicator, self._world
            parameter.grad = made
