"""Gradients of split parameters, which know that they are pieces: torch's own calls on them see the whole gradient.

`torch.nn.utils.clip_grad_norm_` and `get_total_norm`, `GradScaler.unscale_` and what is taken by hand ask for the norm
of a gradient, its sum or largest element, or whether it is finite. On a piece every rank would get another answer, and
decide otherwise than the rest. A piece answers for all ranks, so all ranks have to ask; what is asked of rows of it is
refused, and so is writing to them. What a call is asked of is told by its name and never by sizes, which differ between
ranks: else some would ask the others and some would not. All else is done with this rank's part.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.overrides import get_default_nowrap_functions

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
    of_rows: bool
    """Picked out of a piece: other rows than those of this number in the whole, so nothing is answered of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with as_plain_tensors():
            answer = _ANSWERS.get(func)
            if answer is not None:
                return answer(func, *args, **(kwargs or {}))
            piece = args[0] if args and isinstance(args[0], GradientPiece) else None
            if piece is not None and piece.of_rows and _is_in_place(func):
                raise _no_places(piece)
            if piece is not None and func.__name__.startswith(_WHOLE_FAMILIES):
                raise _no_rows(func, piece)
            result = func(*args, **(kwargs or {}))
            if piece is not None and isinstance(result, tuple) and any(isinstance(x, Tensor) for x in result):
                raise _no_rows(func, piece)  # factors, places or parts
        return result if func in _MADE_ANEW else _still_pieces(func, result, args)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with as_plain_tensors():
            copied = self.detach().clone()
        return _marked(copied, self)


def _is_in_place(func: Any) -> bool:
    name: str = func.__name__
    return name.startswith("__i") if name.endswith("__") else name.endswith("_")


def _marked(tensor: Tensor, like: GradientPiece, *, of_rows: bool = False) -> GradientPiece:
    with as_plain_tensors():
        made = tensor.as_subclass(GradientPiece)
    made.axes, made.communicator, made.world = like.axes, like.communicator, like.world
    made.of_rows = of_rows or like.of_rows
    return made


def _still_pieces(func: Any, result: Any, args: Sequence[Any]) -> Any:
    """What is made of a piece element by element is a piece: through views, casts and factors a norm stays right; and
    so are pieces behind each other."""
    first = args[0] if args else None
    if isinstance(result, list | tuple) and isinstance(first, list | tuple) and len(result) == len(first):
        made = [_still_piece(func, x, [source]) for x, source in zip(result, first, strict=True)]
        return type(result)(made) if type(result) in (list, tuple) else result
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if isinstance(result, Tensor) and result.dtype is torch.bool and not all(map(_is_of_all, tensors)):
        return result  # compared with what this rank has
    return _still_piece(func, result, tensors)


def _is_of_all(tensor: Tensor) -> bool:
    return isinstance(tensor, GradientPiece) or tensor.dim() == 0


def _still_piece(func: Any, result: Any, sources: Sequence[Any]) -> Any:
    pieces = [x for x in sources if isinstance(x, GradientPiece)]
    if type(result) is not Tensor or not pieces:
        return result
    like = next((x for x in pieces if x.of_rows), pieces[0])
    if result.dim() == 0 < like.dim() and func not in _SQUEEZES:
        raise _no_rows(func, like)
    return _marked(result, like, of_rows=result.numel() != like.numel())


def _of_all_stages(func: Any, piece: GradientPiece) -> GradientPiece:
    if piece.of_rows:
        raise _no_rows(func, piece)
    if piece.world is not None:
        raise UsageError(
            "The norm of gradients of a pipeline was asked for by torch's own call. This rank has the parameters of "
            "its stages only, and each would clip by another norm. Call clip_grad_norm_ of what conjoin.load "
            "gave, which takes it over all stages."
        )
    return piece


def _norms(func: Any, tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """The norm of each gradient as a whole, in the dtype torch would give, but at least in single precision."""
    pieces = [_of_all_stages(func, x) for x in _pieces_in(tensors)]
    held = [(x, x.axes if isinstance(x, GradientPiece) else ()) for x in tensors]
    norms = norms_of(held, float(order), pieces[0].communicator, pieces[0].device)
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
    return _norms(func, [x], ord, dtype)[0]


def _norm(func: Any, x: Tensor, p: float | str | None = "fro", dim: Any = None, **more: Any) -> Tensor:
    if isinstance(p, str) and p != "fro":
        raise _no_rows(func, x)
    return _vector_norm(func, x, 2.0 if p is None or isinstance(p, str) else p, dim, dtype=more.get("dtype"))


def _linalg_norm(func: Any, x: Tensor, ord: float | str | None = None, dim: Any = None, **more: Any) -> Tensor:
    """Of a matrix every order but "fro" is that of a matrix: of its rows, or of its singular values."""
    if dim is None and ord not in (None, "fro") and x.dim() > 1:
        raise _no_rows(func, x)
    return _norm(func, x, ord, dim, **more)


def _foreach_norm(
    func: Any, tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    return _norms(func, tensors, ord, dtype)


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
        return _still_pieces(func, func(x, *args, **kwargs), (x, *others))
    if args or kwargs.get("dim") is not None or kwargs.get("keepdim") or x.is_complex():
        raise _no_rows(func, x)
    piece, name = _of_all_stages(func, x), func.__name__
    order, of_none = _ORDERS[name]
    found = func(x) if x.numel() else func(x.new_zeros(1)).fill_(of_none)
    mine = x.double().sum() if name == "mean" else found.double()
    held = torch.stack([mine, mine.new_tensor(float(x.numel()))])
    total = over_ranks(held, piece.axes, order, piece.communicator) if piece.axes else held
    answer = total[0] / total[1] if name == "mean" else total[0]
    return answer.to(kwargs.get("dtype") or found.dtype)


def _alike(func: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether two tensors are equal, or close, on all ranks."""
    piece = _of_all_stages(func, _pieces_in((*args, *kwargs.values()))[0])
    mine = torch.tensor([float(func(*args, **kwargs))], dtype=torch.float64, device=piece.device)
    return bool(over_ranks(mine, piece.axes, -inf, piece.communicator)[0]) if piece.axes else bool(mine)


def _pieces_in(values: Iterable[Any]) -> list[GradientPiece]:
    flat = (x for value in values for x in (value if isinstance(value, list | tuple) else (value,)))
    return [x for x in flat if isinstance(x, GradientPiece)]


def _refused(func: Any, *args: Any, **kwargs: Any) -> Any:
    raise _no_rows(func, _pieces_in((*args, *kwargs.values()))[0])


def _picked(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Rows of this rank's part, to be looked at."""
    result = func(x, *args, **kwargs)
    if not isinstance(x, GradientPiece):  # picked by a piece
        return result
    if isinstance(result, list | tuple):
        return type(result)(_marked(each, x, of_rows=True) for each in result)
    whole = args == (slice(None),) or args == (...,)
    return _marked(result, x, of_rows=not whole)


def _no_places(x: Tensor) -> UsageError:
    return UsageError(
        f"Rows of a gradient were to be written by their places, and this rank holds a part of shape {tuple(x.shape)} "
        f"of it. They have other places in the whole, so every rank would write other ones. Choose elements by a mask "
        f"made of the gradient or its parameter, or write to this rank's part by .as_subclass(torch.Tensor)."
    )


def _written(func: Any, x: Tensor, key: Any, value: Any) -> None:
    """Elements may be chosen by what they are, not by where they are."""
    is_mask = isinstance(key, Tensor) and key.dtype is torch.bool and key.shape == x.shape
    if isinstance(x, GradientPiece) and not is_mask and (isinstance(key, Tensor) or key not in (slice(None), ...)):
        raise _no_places(x)
    func(x, key, value)


def _shown(func: Any, x: GradientPiece, *args: Any, **kwargs: Any) -> Any:
    if not x.of_rows:
        warnings.warn(
            f"{func.__name__} of a gradient gives the part of shape {tuple(x.shape)} that this rank holds, and other "
            f"ranks have others. What is taken of it differs between them. Ask for its norm, sum, mean or max as a "
            f"tensor first, on every rank.",
            stacklevel=3,
        )
    return func(x, *args, **kwargs)


def _joined(func: Any, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """Pieces behind each other, if their other parts lie along the same axes: then norms stay right."""
    if len({x.axes if isinstance(x, GradientPiece) else () for x in tensors}) > 1:
        raise UsageError(
            f"{func.__name__} of {len(tensors)} gradients was asked for, of which this rank holds parts. They are "
            f"split along different axes of the mesh, so nobody could tell the norm of what comes out. Take the norm "
            f"of each, or call torch.nn.utils.clip_grad_norm_ or get_total_norm with all of them."
        )
    pieces = [x for x in tensors if isinstance(x, GradientPiece)]
    return _marked(func(tensors, *args, **kwargs), pieces[0], of_rows=any(x.of_rows for x in pieces))


_ORDERS = {
    "sum": (1.0, 0.0), "mean": (1.0, 0.0), "count_nonzero": (1.0, 0.0), "max": (inf, -inf), "amax": (inf, -inf),
    "any": (inf, 0.0), "min": (-inf, inf), "amin": (-inf, inf), "all": (-inf, 1.0),
}  # fmt: skip
"""How answers of ranks are put together: summed up, or the largest or smallest of them; and that for no elements."""
_OF_ROWS = (
    "argmax", "argmin", "std", "var", "std_mean", "var_mean", "median", "nanmedian", "quantile", "nanquantile", "histc",
    "histogram", "bincount", "prod", "logsumexp", "aminmax", "nansum", "nanmean", "topk", "kthvalue", "mode", "sort",
    "msort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff", "unique", "nonzero",
    "argwhere", "dot", "vdot", "inner", "outer", "mv", "mm", "bmm", "matmul", "__matmul__", "__rmatmul__", "addmm",
    "einsum", "tensordot", "trace", "dist", "cdist", "cov", "corrcoef", "renorm", "softmax", "log_softmax",
    "cosine_similarity", "_foreach_max",
)  # fmt: skip
"""What looks at more than an element, and is not put together here."""
_WHOLE_FAMILIES = ("linalg_", "fft_")
"""How the names of more such begin."""
_PICKING = (
    "__getitem__", "narrow", "select", "index_select", "masked_select", "take", "take_along_dim", "gather", "diagonal",
    "diag", "tril", "triu", "chunk", "split", "tensor_split", "unbind", "__iter__", "unfold",
)  # fmt: skip
_SHOWING = ("numpy", "tolist", "__array__")
_SQUEEZES = frozenset({torch.squeeze, Tensor.squeeze, torch.reshape, Tensor.reshape, Tensor.view})
_OF_MATRICES = (
    nn.functional.normalize, nn.functional.softmax, nn.functional.log_softmax, nn.functional.linear,
)  # fmt: skip
_JOINING = (torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack)


def _both(names: Iterable[str], answer: Callable[..., Any]) -> dict[Any, Callable[..., Any]]:
    """As a function of torch and as a method."""
    found = (getattr(home, name, None) for home in (torch, Tensor) for name in names)
    return {func: answer for func in found if func is not None}


_NEW = ("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "as_subclass")
_MADE_ANEW = {
    *_both((*_NEW, "new_zeros", "new_ones", "new_empty", "new_full", "new_tensor", "isclose"), _whole),
    *get_default_nowrap_functions(),
}
"""What comes out is a tensor like any other; also what a tensor is a view of, by which compilers tell tensors apart."""
_ANSWERS: dict[Any, Callable[..., Any]] = {
    **_both(_ORDERS, _whole),
    **_both(_OF_ROWS, _refused),
    **_both(("equal", "allclose"), _alike),
    **_both(_PICKING, _picked),
    **_both(_SHOWING, _shown),
    **dict.fromkeys(_OF_MATRICES, _refused),
    **dict.fromkeys(_JOINING, _joined),
    Tensor.__setitem__: _written,
    torch.linalg.vector_norm: _vector_norm,
    torch.linalg.norm: _linalg_norm,
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
    _keep_states_plain()
    for parameter, layout in parameters:
        axes = parted_axes(layout, communicator.mesh)
        if (axes or world is not None) and parameter.requires_grad:
            is_split = any(isinstance(placement, Split) for _, placement in layout)
            mark = _Marker(axes, communicator, world)
            # before hooks of the user, and for torch.autograd.grad
            parameter.register_hook(mark.mark_if_any)  # type: ignore[no-untyped-call]
            parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            if axes:
                note_part(parameter, is_split=is_split)


@cache
def _keep_states_plain() -> None:
    register_optimizer_step_post_hook(_make_states_plain)


def _make_states_plain(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """What an optimizer keeps of gradients, like the first momentum of SGD, is a tensor like any other."""
    for state in optimizer.state.values():
        for name, kept in state.items():
            if isinstance(kept, GradientPiece):
                state[name] = kept.as_subclass(Tensor)


class _Marker:
    def __init__(self, axes: Axes, communicator: Communicator, world: Communicator | None) -> None:
        self._axes, self._communicator, self._world = axes, communicator, world

    def mark_if_any(self, gradient: Tensor | None) -> GradientPiece | None:
        """What comes to a hook is nothing where a step in micro-batches finds that there is no gradient."""
        return None if gradient is None else self.mark(gradient)

    def mark(self, gradient: Tensor) -> GradientPiece:
        made = gradient.as_subclass(GradientPiece)
        made.axes, made.communicator, made.world = self._axes, self._communicator, self._world
        made.of_rows = False
        return made

    def __call__(self, parameter: Tensor) -> None:
        if type(parameter.grad) is Tensor:
            parameter.grad = self.mark(parameter.grad)
