"""Does an optimizer work element by element? It is tried out on a small matrix, as a whole and in parts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

_STEPS = 3
_ROUNDING = 1e-4
"""Of an update, in single precision: one that looks at more than its element differs in the first digits."""


@dataclass(frozen=True, slots=True)
class Tried:
    """By how much updates of parts differ from those of the whole, relative to the update."""

    between_parts: float = 0.0
    """Where a tensor is cut."""
    between_tensors: float = 0.0
    """Where one of two tensors is elsewhere."""
    error: str | None = None
    """Why it could not be tried."""


def try_out(optimizer: Optimizer, group: Mapping[str, Any]) -> Tried:
    """Try an optimizer of the same class with the options of one of its groups."""
    device = group["params"][0].device
    start, pull, goal = (_numbers(seed, device) for seed in range(3))
    cuts = [
        (slice(0, 4), slice(None)),
        (slice(4, None), slice(None)),
        (slice(None), slice(1)),
        (slice(None), slice(1, None)),
    ]
    try:
        (whole,) = _updated(optimizer, group, [(start, pull, goal)])
        parts = [_updated(optimizer, group, [(start[cut], pull[cut], goal[cut])])[0] for cut in cuts]
        both = _updated(optimizer, group, [(start, pull, goal), (3 * goal, pull, start)])
    except Exception as error:  # whatever a stranger's class needs that we do not know of
        return Tried(error=f"{type(error).__name__}: {error}"[:200])
    largest = float((whole - start).abs().max())
    off = [_relative(part - whole[cut], largest) for part, cut in zip(parts, cuts, strict=True)]
    return Tried(max(off), _relative(both[0] - whole, largest))


def _relative(difference: Tensor, largest: float) -> float:
    """A difference in units of the largest update; what is not a number is as far off as can be."""
    found = float(difference.nan_to_num(nan=inf).abs().max())
    return 0.0 if found <= _ROUNDING * largest else found / largest if 0 < found < largest else 1.0


def _numbers(seed: int, device: torch.device) -> Tensor:
    return (torch.rand(6, 4, generator=torch.Generator().manual_seed(seed)) + 0.5).to(device)


def _updated(
    optimizer: Optimizer, group: Mapping[str, Any], problems: Sequence[tuple[Tensor, Tensor, Tensor]]
) -> list[Tensor]:
    """Tensors after some steps down an endless slope, whose gradient at an element is the element's own affair."""
    tensors = [nn.Parameter(start.clone()) for start, _, _ in problems]
    options = {key: value for key, value in group.items() if key != "params"}
    taken = inspect.signature(type(optimizer)).parameters
    needed = {key: value for key, value in optimizer.defaults.items() if key in taken}
    tried = type(optimizer)([{**options, "params": tensors}], **needed)

    def closure() -> Any:
        total = torch.zeros((), device=tensors[0].device)
        for x, (_, pull, goal) in zip(tensors, problems, strict=True):
            ahead = x.detach() - goal
            x.grad = pull * (1 + ahead.sigmoid())
            total += (pull * (ahead + nn.functional.softplus(ahead))).sum()
        return total

    for _ in range(_STEPS):
        closure()
        try:
            tried.step()
        except TypeError:  # some ask for the loss again
            tried.step(closure)
    return [x.detach() for x in tensors]
