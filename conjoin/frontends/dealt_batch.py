"""A batch dealt out: what the model takes, what is left for the loss, and the names of all inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves

from conjoin.errors import CaptureError
from conjoin.frontends.diagnosis import refuse_packed, refuse_sparse
from conjoin.ir import Structure

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Arguments:
    """A batch dealt out: what the model takes, what is left for the loss."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_args: tuple[Any, ...] = ()
    loss_kwargs: dict[str, Any] | None = None
    whole_to_loss: bool = False
    """Nothing is left over, and the loss takes the batch as it is."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """What a function takes: names by position, those of all that must be given, and whether any number is taken."""

    positional: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    any_args: bool = True
    any_kwargs: bool = True


def _taken_by(function: Callable[..., Any] | None) -> _Taken:
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values() if called is not None else ()
    except (TypeError, ValueError):  # built in, and silent about what it takes
        return _Taken()
    many = [p.kind for p in parameters if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return _Taken(
        tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)),
        tuple(p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)),
        inspect.Parameter.VAR_POSITIONAL in many,
        inspect.Parameter.VAR_KEYWORD in many,
    )


def deal_out(model: nn.Module, batch: Batch, loss: Callable[..., Any] | None) -> Arguments:
    """Give the model what its forward takes; with a loss, what is left over goes to the loss after the output.

    What the loss cannot do without is not given to a parameter that the model can do without: of `(x, y)` a
    `forward(x, mask=None)` gets x where the loss takes output and target.
    """
    if any(map(_is_packed, tree_leaves(batch, is_leaf=_is_packed))):
        raise refuse_packed("The batch")
    takes, wanted = _taken_by(model), _taken_by(loss).required[1:]
    if isinstance(batch, Tensor):
        batch = (batch,)
    if isinstance(batch, Mapping):
        known = {p.name for p in inspect.signature(model.forward).parameters.values()}
        kept = known if not takes.any_kwargs and loss is not None else {*known, *batch}
        kept -= {name for name in wanted if name not in takes.required}
        taken = {key: value for key, value in batch.items() if key in kept}
        return _with_whole_batch(Arguments((), taken, (), {k: v for k, v in batch.items() if k not in taken}), loss)
    if isinstance(batch, tuple | list):
        least = max(sum(name in takes.required for name in takes.positional), 1)
        count = len(batch) if takes.any_args or loss is None else min(len(batch), len(takes.positional))
        count = min(count, max(len(batch) - len(wanted), least))
        return _with_whole_batch(Arguments(tuple(batch[:count]), {}, tuple(batch[count:]), {}), loss)
    raise CaptureError(
        f"A batch was given as {type(batch).__name__}. Capture needs the model's inputs: a tensor, a tuple of "
        f"positional inputs or a dict of keyword inputs. Pass one of these (numpy arrays: torch.from_numpy)."
    )


def _is_packed(part: Any) -> bool:
    return isinstance(part, PackedSequence)


def _with_whole_batch(dealt: Arguments, loss: Callable[..., Any] | None) -> Arguments:
    """A loss of two arguments that nothing was left over for gets the whole batch."""
    if loss is None or dealt.loss_args or dealt.loss_kwargs:
        return dealt
    return replace(dealt, whole_to_loss=len(_taken_by(loss).required) == 2)


def input_names(model: nn.Module, dealt: Arguments, structure: Structure) -> tuple[str, ...]:
    """Names a user knows: the parameter of forward, then the way into a container; `target` for what the loss takes."""
    names = _taken_by(model).positional
    found: dict[str, None] = {}
    for path in structure.paths():
        part, *rest = path
        if part == 0:
            rest[0] = names[int(rest[0])] if int(rest[0]) < len(names) else f"input_{rest[0]}"
        elif part == 2:
            rest[0] = "target" if len(dealt.loss_args) == 1 else f"target_{rest[0]}"
        name = ".".join(str(step) for step in rest)
        while name in found:
            name += "_"
        found[name] = None
    return tuple(found)


def check_batch(leaves: list[Any], tensors: list[Tensor]) -> None:
    plain = [type(leaf).__name__ for leaf in leaves if is_dataclass(leaf) and not isinstance(leaf, type)]
    if plain:
        raise CaptureError(
            f"The batch holds a {plain[0]}, a dataclass that torch does not know. Capture takes containers apart as "
            f"torch does, to find the tensors in them. Call torch.utils._pytree.register_dataclass({plain[0]}) once, "
            f"or give its fields as a dict."
        )
    strange = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor | bool | int | float | str | None)}
    if strange:
        raise CaptureError(
            f"The batch holds values of type {', '.join(sorted(strange))}. Capture takes tensors, numbers, strings and "
            f"None, nested in tuples, lists and dicts. Convert the others (numpy arrays: torch.from_numpy)."
        )
    if not tensors:
        raise CaptureError(
            f"A batch of {len(leaves)} value(s) without any tensor was given. Capture follows tensors through the "
            f"model. Pass the inputs of one training step as tensors."
        )
    if any(tensor.is_nested for tensor in tensors):
        raise CaptureError(
            "A nested tensor was given with the batch, rows of different lengths. A graph is for one shape of every "
            "tensor. Pad the rows to one length, as torch.nested.to_padded_tensor does, and mask what was added."
        )
    sparse = [tuple(tensor.shape) for tensor in tensors if tensor.layout != torch.strided]
    if sparse:
        raise refuse_sparse(f"A tensor of the batch, of shape {sparse[0]},")
