"""Do ranks that should have the same inputs, loss and gradients have them? Asked in the first step.

A batch given whole must be the same on all ranks; a part of it on all ranks that hold this part. The loss is one number
everywhere. Wherever the same part of a parameter is held, it and its gradient are the same. Where they are not,
training would go on with as many models as there are ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from math import isfinite, nan, prod

import torch
from torch import Tensor

from conjoin.errors import RankError
from conjoin.ir import Leaf, Pipeline, Plan, holds
from conjoin.machine import Mesh
from conjoin.ops import Layout, Split
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.wire import flat
from conjoin.runtime.state.storage import Store
from conjoin.runtime.torch_private import as_plain_tensors

_WORDS = 2**20
"""Of eight bytes: how much of a tensor is looked at at once."""
_CLOSE = 1e-2
"""Ranks may round differently, not more: losses and norms are compared to this part of them."""
_CLOSER = 1e-4
"""The same of weights, which change little in a step."""
_NOISE = 1e-5
"""Of the largest norm of all gradients: below it a gradient is nothing but rounding."""


class Agreement:
    """What ranks compare in the first step of a module, and in every so manieth after it where that is asked for."""

    def __init__(
        self,
        plan: Plan | Pipeline,
        store: Store,
        communicator: Communicator,
        stages: Sequence[tuple[Communicator, Collection[str]]] | None = None,
    ) -> None:
        self._plan, self._store, self._communicator = plan, store, communicator
        self._stages = stages
        """Of a pipeline, for every stage of this rank who holds its parameters, and their names."""
        self._every: int | None = 0
        self._num_steps = 0
        self._compares_gradients = False
        """Whether the next backward pass is one to compare."""

    def every(self, num_steps: int | None) -> None:
        """Compare the next step and every so manieth after it; only the next (None); or none (0)."""
        self._every, self._num_steps = num_steps, 0
        for communicator in (self._communicator, *(stage for stage, _ in self._stages or ())):
            if num_steps != 0 and communicator.mesh.size > 1:
                communicator.prepare(communicator.mesh.names)

    def begin(self) -> bool:
        """Whether the step that begins is one to compare."""
        due = self._num_steps == 0 if self._every is None else bool(self._every) and self._num_steps % self._every == 0
        due = due and self._communicator.mesh.size > 1
        self._num_steps += 1
        self._compares_gradients = self._compares_gradients or due
        return due

    def compare_inputs(self, given: Mapping[Leaf, Tensor], loss: Tensor | None) -> None:
        """Raise RankError unless inputs agree where they should, and the loss everywhere."""
        mesh = self._communicator.mesh
        marks = [number for leaf, x in given.items() for number in (self._is_whole(leaf, x), digest(x))]
        value = float(loss.detach().real) if loss is not None and loss.numel() == 1 else nan
        bits = torch.tensor([value], dtype=torch.float64).view(torch.int64)
        told = _gathered(self._communicator, torch.cat([torch.tensor(marks, dtype=torch.int64), bits]))
        for i, leaf in enumerate(given):
            wholes, digests = told[:, 2 * i].tolist(), told[:, 2 * i + 1].tolist()
            ranks = [rank for rank in range(mesh.size) if holds(leaf.type.layout, mesh, rank)]
            same = {rank: (-1,) if wholes[rank] else _part_of(leaf.type.layout, mesh, rank) for rank in ranks}
            others = _unlike(same, digests)
            if others is not None:
                wanted = "the same batch, or to each rank its own part of it, as conjoin.Loader reads them"
                raise self._refusal(f"input {leaf.name}", others, wanted)
        losses = told[:, -1].contiguous().view(torch.float64).tolist()
        others = _unlike(dict.fromkeys(range(mesh.size), ()), losses)
        if others is not None:
            told_losses = " and ".join(f"{losses[rank]:g}" for rank in others)
            raise self._refusal(f"loss, not {told_losses}", others, "the same weights, batch and draws")

    def _is_whole(self, leaf: Leaf, given: Tensor) -> int:
        """Whether an input came as a whole: a part is smaller."""
        accumulation = self._plan.accumulation
        steps = accumulation.steps if accumulation is not None and leaf.name in accumulation.cut else 1
        return int(given.numel() == steps * prod(leaf.type.shape))

    def compare_gradients(self) -> None:
        """Raise RankError unless parameters and gradients agree wherever the same part of a parameter is held."""
        if not self._compares_gradients:
            return
        self._compares_gradients = False
        named = [(name, p) for name, p in self._store.root.named_parameters() if p.requires_grad]
        for communicator, names in ((self._communicator, None),) if self._stages is None else self._stages:
            if communicator.mesh.size > 1:
                self._compare_gradients(communicator, [(n, p) for n, p in named if names is None or n in names])

    def _compare_gradients(self, communicator: Communicator, named: Sequence[tuple[str, Tensor]]) -> None:
        mesh, store = communicator.mesh, self._store
        norms = torch.tensor([[_norm(p.detach()), _norm(p.grad)] for _, p in named], dtype=torch.float64)
        told = _gathered(communicator, norms.view(-1).view(torch.int64)).view(torch.float64).view(mesh.size, -1, 2)
        rounding = _NOISE * told[..., 1].nan_to_num(0.0, 0.0, 0.0).max().item() if named else 0.0
        for i, (name, _) in enumerate(named):
            layout = store.layout(name)
            same = {rank: _part_of(layout, mesh, rank) for rank in range(mesh.size) if holds(layout, mesh, rank)}
            for what, others in (
                (name, _unlike(same, told[:, i, 0].tolist(), _CLOSER)),
                (f"gradient of {name}", _unlike(same, told[:, i, 1].tolist(), rounding=rounding)),
            ):
                if others is not None:
                    raise self._refusal(what, others, "the same batch, weights and draws")

    def _refusal(self, what: str, others: tuple[int, int], wanted: str) -> RankError:
        return RankError(
            f"The ranks {others[0]} and {others[1]} must have the same {what}, and in step {self._num_steps} they have "
            f"not. Each would train a model of its own from here. Give all ranks {wanted}."
        )


def _gathered(communicator: Communicator, mine: Tensor) -> Tensor:
    """What all ranks have, one in a row."""
    sent, mine = communicator.bytes_sent, mine.to(communicator.device)
    told = mine.new_empty(communicator.mesh.size * mine.numel())
    communicator.all_gather(told, mine, communicator.mesh.names).wait()
    communicator.bytes_sent = sent  # what is counted is what the plan says
    return told.view(communicator.mesh.size, -1).cpu()


def digest(x: Tensor) -> int:
    """A number that tells tensors apart: their bytes, weighed by position."""
    words = flat(x).view(torch.uint8)
    words = torch.nn.functional.pad(words, (0, -words.numel() % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for number, part in enumerate(torch.split(words, _WORDS)):
        places = torch.arange(part.numel(), device=x.device) * 2 + 2 * number * _WORDS + 1
        total += (part * (places * 0x9E3779B97F4A7C1)).sum()  # odd, and so no place is lost
    return int(total)


def _norm(gradient: Tensor | None) -> float:
    """Of this rank's part of a gradient; none at all is told by a number that no norm is."""
    with as_plain_tensors():
        return -1.0 if gradient is None else float(gradient.detach().to(_wide(gradient.dtype)).norm())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _part_of(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Which part of a tensor a rank holds: its coordinates along the axes that split it."""
    places = mesh.coordinates(rank)
    return tuple(places[axis] for axis, placement in layout if isinstance(placement, Split))


def _unlike(
    same: Mapping[int, Hashable], values: Sequence[float], close: float = _CLOSE, rounding: float = 0.0
) -> tuple[int, int] | None:
    """Two ranks that should have the same and have not."""
    firsts: dict[Hashable, int] = {}
    for rank, what in same.items():
        first = firsts.setdefault(what, rank)
        a, b = values[first], values[rank]
        if not _agree(a, b, max(close * max(abs(a), abs(b)), rounding)):
            return first, rank
    return None


def _agree(a: float, b: float, rounding: float) -> bool:
    """Whole numbers are digests and agree only if they are equal."""
    if isinstance(a, int) or not (isfinite(a) and isfinite(b)):
        return a == b or (a != a and b != b)
    return abs(a - b) <= rounding
