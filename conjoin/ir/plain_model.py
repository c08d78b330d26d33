"""The model inside what people put around one: torch.compile, DataParallel; and what is no model to be planned."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from conjoin.errors import ConjoinError, UsageError
from conjoin.ir.python_state import OPERATORS


def plain_model(model: object, refusal: type[ConjoinError] = UsageError) -> nn.Module:
    """The model itself: what compiles it, or copies it to devices, is taken off, since a plan does that its own way.

    >>> type(plain_model(nn.DataParallel(nn.Linear(2, 2)))).__name__
    'Linear'
    """
    if not isinstance(model, nn.Module):
        kind = f"The class {model.__name__}" if isinstance(model, type) else f"A {type(model).__name__}"
        raise refusal(
            f"{kind} was given instead of the model. Conjoin takes a torch.nn.Module, whose parameters it can name. "
            f"Pass the module itself; wrap a function in one."
        )
    if "_orig_mod" in dict(model.named_children()):  # compiled
        return plain_model(model.get_submodule("_orig_mod"), refusal)
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return plain_model(model.module, refusal)
    _check_parts(model, refusal)
    return model


def copied_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of a model, also where it keeps what a forward pass made (its last scores, a weight that a hook makes
    anew): torch copies no tensor that has a history, so these are copied without theirs.

    >>> model = nn.Linear(2, 2)
    >>> model.last = [model(torch.ones(1, 2))]
    >>> copied_model(model).last[0].requires_grad
    False
    """
    memo = {} if memo is None else memo
    for part in model.modules():
        kept = tree_leaves({name: value for name, value in vars(part).items() if not name.startswith("_")})
        memo.update({id(value): value for value in kept if isinstance(value, OPERATORS)})
        for tensor in (value for value in kept if isinstance(value, Tensor) and not value.is_leaf):
            memo.setdefault(id(tensor), tensor.detach().clone())
    return copy.deepcopy(model, memo)


def _check_parts(model: nn.Module, refusal: type[ConjoinError]) -> None:
    name = type(model).__name__
    scripted = [part for part, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise refusal(
            f"{name} is TorchScript in {scripted[0] or 'itself'}. What is compiled by torch.jit has no Python code "
            f"that could be followed. Pass the model as it was before torch.jit.script or torch.jit.trace."
        )
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    unshaped = [part for part, tensor in tensors if is_lazy(tensor)]
    if unshaped:
        raise refusal(
            f"{name} has {len(unshaped)} parameters or buffers without a shape, {unshaped[0]} first. Lazy modules get "
            f"theirs from the first batch. Call the model once on a batch before."
        )
    spread = [part for part, tensor in tensors if type(tensor).__name__ == "DTensor"]
    if spread or type(model).__module__.startswith("torch.distributed.fsdp"):
        what = f"{spread[0]} is a DTensor" if spread else f"{name} has its parameters as flat pieces"
        raise refusal(
            f"{name} is spread over devices already: {what}. A plan spreads the plain model. Pass the model as it was "
            f"before FSDP or distribute_tensor."
        )
