"""A step in micro-batches: each runs forward and backward before the next begins, so that only one is alive at a time.

The gradients are there when the forward pass ends; the caller's backward pass hands them out, scaled by the gradient
that comes to the loss. Gradients of parameters that all ranks hold are summed over the ranks once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import splits_evenly
from conjoin.errors import UsageError
from conjoin.ir import Accumulation, Leaf, LeafKind, Plan, region_of, region_shape
from conjoin.ops import split_axes

Gradients = list[Tensor | None]


class MicroBatches:
    """This rank's parts of the micro-batches of a batch."""

    def __init__(self, plan: Plan, accumulation: Accumulation, rank: int, in_order: bool) -> None:
        self._plan, self._steps, self._rank = plan, accumulation.steps, rank
        self._leaves = plan.graph.leaves_of(LeafKind.INPUT)
        self._cut, self._source = set(accumulation.cut), dict(accumulation.whole)
        self.names = [leaf.name for leaf in self._leaves if leaf.name not in self._source]
        self._inside = not in_order and self._alike()
        """Whether every rank cuts its own part of the batch; else a micro-batch is cut into parts for the ranks."""

    def _alike(self) -> bool:
        """Whether all inputs lie on the ranks alike: then it makes no difference which samples run together."""
        cut = [leaf for leaf in self._leaves if leaf.name in self._cut]
        axes = {split_axes(leaf.type.layout, 0) for leaf in cut}
        return len(axes) == 1 and all(splits_evenly(x.type.shape, x.type.layout, self._plan.mesh) for x in cut)

    def of(self, given: Sequence[Tensor]) -> list[list[Tensor]]:
        """The inputs of every micro-batch on this rank, from the batch as a whole or this rank's part of it."""
        by_name = dict(zip(self.names, given, strict=True))
        inputs = [(leaf, by_name[self._source.get(leaf.name, leaf.name)]) for leaf in self._leaves]
        return [[self._part(leaf, x, step) for leaf, x in inputs] for step in range(self._steps)]

    def _part(self, leaf: Leaf, x: Tensor, step: int) -> Tensor:
        steps = self._steps if leaf.name in self._cut else 1
        size = leaf.type.shape[0] if steps > 1 else 0
        whole = (size * steps, *leaf.type.shape[1:]) if steps > 1 else leaf.type.shape
        mesh, layout, shape = self._plan.mesh, leaf.type.layout, tuple(x.shape)
        region = region_of(whole, layout, mesh, self._rank)
        own = region_of(leaf.type.shape, layout, mesh, self._rank)
        if x.dtype == leaf.type.dtype and (steps == 1 or self._inside) and shape in (whole, region_shape(region)):
            part = x[tuple(slice(*span) for span in region)] if shape == whole else x
            count = region_shape(own)[0] if steps > 1 else 0
            return part[step * count : (step + 1) * count] if steps > 1 else part
        if x.dtype == leaf.type.dtype and shape == whole:
            return x[step * size : (step + 1) * size][tuple(slice(*span) for span in own)]
        parts = f" or {region_shape(region)}, its part on rank {self._rank}," if self._inside else ""
        raise UsageError(
            f"The captured {self._plan.model.name} was called with other inputs: {leaf.name} is {leaf.type.dtype} of "
            f"shape {whole}{parts} and {x.dtype} of shape {shape} came. A plan holds the shapes it was made with, here "
            f"{self._steps} micro-batches. Call it with such a batch, or make the plan again with this one."
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What one micro-batch after the other does: the loss of the batch, and the gradients of the parameters."""

    losses: Callable[[], Sequence[Callable[[], Tensor]]]
    """For every micro-batch what computes its loss."""
    parameters: Sequence[Tensor]
    finish: Callable[[Gradients], None]
    """Adds what ranks sum up at the end."""

    def forward_only(self) -> Tensor:
        total: Tensor | None = None
        for loss in self.losses():
            total = loss() if total is None else total + loss()
        assert total is not None
        return total

    def forward_and_backward(self) -> tuple[Tensor, Gradients]:
        total: Tensor | None = None
        gradients: Gradients = [None] * len(self.parameters)
        for compute in self.losses():
            loss = compute()
            total = loss.detach() if total is None else total + loss.detach()
            add_to(gradients, list(torch.autograd.grad(loss, self.parameters, allow_unused=True)))
            del loss
        assert total is not None
        self.finish(gradients)
        return total, gradients


def add_to(gradients: Gradients, more: Gradients) -> None:
    """Add gradients up, each gone when it is added; what autograd gave out is not written to: others may see it."""
    for i in range(len(more)):
        mine, other, more[i] = gradients[i], more[i], None
        if other is not None:
            gradients[i] = other if mine is None else mine + other


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, *parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            total, ctx.gradients = run.forward_and_backward()
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> Any:
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "The backward pass of a step in micro-batches was asked for twice. Its gradients were made in the "
                "forward pass and handed out once. Call the module again for another backward pass."
            )
        made: Gradients = []
        while gradients:  # one after the other, so that not all are there twice
            gradient = gradients.pop(0)
            made.append(None if gradient is None else gradient * incoming[0])
        return None, *made


def accumulate(run: Run) -> Tensor:
    """The loss of a step; its backward pass gives the parameters the gradients of all micro-batches."""
    if not torch.is_grad_enabled() or not run.parameters:
        return run.forward_only()
    return _Accumulated.apply(run, *run.parameters)  # type: ignore[no-any-return, no-untyped-call]
