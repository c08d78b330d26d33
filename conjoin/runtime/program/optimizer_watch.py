"""Optimizers are looked at before their first step: one that would train nothing, or parts as if they were the whole.

A part of a weight is updated as the whole would be only by an optimizer that works element by element, which is found
out by a trial on a small matrix. One that was made of the plain model's parameters would never see a gradient.
"""

from __future__ import annotations

import warnings
import weakref
from functools import cache
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from conjoin.errors import UsageError
from conjoin.runtime.state.optimizer_trial import Tried, try_out

_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_parts = WeakTensorKeyDictionary()
"""Parameters of which this rank holds a part, and whether there is no rank that holds all."""
_originals = WeakTensorKeyDictionary()
"""Parameters of models that plans were loaded with, under their names."""


def note_part(parameter: nn.Parameter, *, is_split: bool) -> None:
    """This rank holds a part of a parameter: optimizers are to work on it element by element."""
    _watch_optimizers()
    _parts[parameter] = is_split


def note_originals(model: nn.Module) -> None:
    """A plan was loaded with this model: what is trained from now on are the pieces, not its parameters."""
    _watch_optimizers()
    for name, parameter in model.named_parameters():
        _originals[parameter] = name


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_check_optimizer)


def _check_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    if len(args) < 2 and kwargs.get("closure") is None:  # beside the optimizer: else the step makes its gradients
        _check_has_gradients(optimizer)
    for group in optimizer.param_groups:
        parts = [p for p in group["params"] if p in _parts]
        if parts:
            _judge(optimizer, try_out(optimizer, group), next((p for p in parts if _parts[p]), parts[0]))
    _checked.add(optimizer)


def _check_has_gradients(optimizer: Optimizer) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    names = [_originals[p] for p in parameters if p in _originals]
    if names and all(p.grad is None for p in parameters):
        raise UsageError(
            f"{type(optimizer).__name__} was to make a step with {names[0]} of the plain model, and {len(parameters)} "
            f"parameters without a gradient. The plan was loaded with that model and trains pieces of its own, so this "
            f"optimizer would never change them. Make the optimizer of step.parameters(), where step is what "
            f"conjoin.load gave."
        )


def _judge(optimizer: Optimizer, tried: Tried, part: nn.Parameter) -> None:
    name = type(optimizer).__name__
    off = max(tried.between_parts if _parts[part] else 0.0, tried.between_tensors)
    if tried.error is not None:
        warnings.warn(
            f"{name} updates weights of which this rank has parts, and could not be tried out ({tried.error}). It is "
            f"right only if it works element by element. Compare a few steps with one device.",
            stacklevel=4,
        )
    elif off > 0:
        raise UsageError(
            f"{name} was to update a weight of which this rank holds a part of shape {tuple(part.shape)}. It does not "
            f"work element by element: on a small matrix, updating the parts differs from updating the whole by "
            f"{off:.1%}. Use one that does (SGD, Adam, AdamW), or a plan that keeps weights whole (data-parallel)."
        )
