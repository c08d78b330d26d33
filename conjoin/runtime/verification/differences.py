"""How far tensors are apart, relative to what they are part of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isfinite

import torch
from torch import Tensor

from conjoin.runtime.verification.steps import Reference

TOLERANCE = 1e-9
"""Relative, in double precision: a wrong layout is wrong in the first digits, rounding in the last."""
_SMALL, _NOTHING = 1e-3, 1e-12
"""Beside the largest, a small gradient; beside the loss, gradients that rounding may have left and nothing else."""

_Named = Mapping[str, Tensor | None]
Cut = Callable[[str, Tensor], Tensor]
"""The part of a whole tensor, by its name, that is compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How far one tensor of one rank is from what one device has."""

    what: str
    rank: int
    relative: float
    allowed: float = TOLERANCE

    @property
    def is_rounding(self) -> bool:
        return self.relative <= self.allowed


def differences_of_step(
    mine: tuple[float, Mapping[str, Tensor | None]], right: tuple[float, Mapping[str, Tensor]], rank: int, cut: Cut
) -> list[Difference]:
    """The loss and the gradients of one step; what is small beside the largest gradient is compared with that, and
    with the loss where no gradient is more than rounding may leave of it."""
    (loss, gradients), (right_loss, right_gradients) = mine, right
    off = relative(_number(loss), _number(right_loss), max(abs(right_loss), _SMALL))
    largest = max(map(largest_of, right_gradients.values()), default=0.0)
    floor = abs(right_loss) if largest <= _NOTHING * abs(right_loss) else _SMALL * largest
    named = _differences("gradient of ", gradients, right_gradients, rank, floor, cut)
    return [Difference("loss", rank, off), *named]


def differences_of_state(
    mine: Mapping[str, Tensor | None], right: Mapping[str, Tensor], rank: int, cut: Cut
) -> list[Difference]:
    """Parameters and buffers."""
    return _differences("", mine, right, rank, _SMALL, cut)


def differences_between(mine: Reference, right: Reference) -> tuple[Difference, ...]:
    """Two runs of some steps on one device; of every tensor the worst step."""
    found: list[Difference] = []
    for step in zip(mine.losses, mine.gradients, right.losses, right.gradients, strict=True):
        found += differences_of_step(step[:2], step[2:], 0, lambda _, whole: whole)
    found += differences_of_state(mine.state, right.state, 0, lambda _, whole: whole)
    if not torch.equal(mine.drawn, right.drawn):
        found.append(Difference("how many random numbers are drawn", 0, inf))
    return worst_of_each(found)


def worst_of_each(found: list[Difference]) -> tuple[Difference, ...]:
    """Of every tensor the largest difference, the largest of all first."""
    worst: dict[str, Difference] = {}
    for difference in found:
        if difference.what not in worst or difference.relative > worst[difference.what].relative:
            worst[difference.what] = difference
    return tuple(sorted(worst.values(), key=lambda difference: -difference.relative))


def _differences(
    what: str, mine: Mapping[str, Tensor | None], right: Mapping[str, Tensor], rank: int, floor: float, cut: Cut
) -> list[Difference]:
    found = []
    for name in {**mine, **right}:
        tensor, whole = mine.get(name), right.get(name)
        if tensor is None or whole is None:
            same = tensor is None and whole is None
            found += [] if same else [Difference(f"{what}{name} (missing on one side)", rank, inf)]
            continue
        off = relative(tensor, cut(name, whole), max(floor, largest_of(whole)))
        found.append(Difference(f"{what}{name}", rank, off))
    return found


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def _exact(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def largest_of(tensor: Tensor) -> float:
    """The largest magnitude; infinities, as of an attention mask, do not count."""
    sizes = _exact(tensor).abs()
    largest: float = sizes.max().item() if sizes.numel() else 0.0
    if isfinite(largest):
        return largest
    return sizes[sizes.isfinite()].max().item() if sizes.isfinite().any() else 0.0


def relative(tensor: Tensor, wanted: Tensor, scale: float) -> float:
    """The largest difference in units of the scale: none where both are the same infinity or both not a number."""
    if tensor.shape != wanted.shape:
        return inf
    mine, theirs = _exact(tensor), _exact(wanted)
    largest: float = (mine - theirs).abs().max().item() if mine.numel() else 0.0
    if isfinite(largest):
        return largest / max(scale, 1e-300)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    off = (mine - theirs)[~same].abs()
    if not off.isfinite().all():
        return inf
    return off.max().item() / max(scale, 1e-300) if off.numel() else 0.0
