"""The loss of the vertices there are, where a batch has rows that belong to none; and how many it gets right."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from conjoin.errors import UsageError
from conjoin.gnn.roles import BatchRoles


class VertexLoss:
    """A loss for filled-up parts: a dict of `loss`, and where vertices have classes `correct` and `counted`.

    Where the loss leaves vertices out that have a label for that, the others have it. Any other loss has to take a
    `reduction`; it then gets one more tensor, 1 for rows of vertices and 0 for others.
    """

    def __init__(self, loss: Any, roles: BatchRoles) -> None:
        self._loss, self.needs_mask = loss, not roles.is_labelled
        self._ignored = next((role.fill for role in roles.roles if role.kind == "vertices" and role.fill), 0)
        self._is_of_several = loss is functional.binary_cross_entropy_with_logits or isinstance(
            loss, nn.BCEWithLogitsLoss
        )
        if self.needs_mask:
            self._each, self._is_mean = _unreduced(loss)

    def __call__(self, output: Tensor, *given: Tensor) -> dict[str, Tensor]:
        """The loss of a model's output and of labels, behind which the mask stands where one is needed."""
        if not self.needs_mask:
            return {"loss": self._loss(output, *given), **self._right(output, given[0])}
        *labels, real = given
        each = self._each(output, *labels)
        per_row = each.flatten(1).sum(1) if each.dim() > 1 else each
        total = (per_row * real).sum()
        found = total / (real.sum() * (each.numel() // each.shape[0])) if self._is_mean else total
        return {"loss": found, **(_right_ones(output, labels[0], real) if self._is_of_several else {})}

    def _right(self, output: Tensor, labels: Tensor) -> dict[str, Tensor]:
        if output.dim() != 2 or labels.dim() != 1:
            return {}
        known = labels != self._ignored
        right = ((output.argmax(-1) == labels) & known).to(torch.float32)
        return {"correct": right.sum(), "counted": known.to(torch.float32).sum()}


def _right_ones(output: Tensor, labels: Tensor, real: Tensor) -> dict[str, Tensor]:
    """Where a vertex may be of several classes, every one of them that is told rightly."""
    if output.dim() != 2:
        return {}
    right = ((output > 0) == (labels > 0)).to(torch.float32).sum(1)
    return {"correct": (right * real).sum(), "counted": real.sum() * output.shape[1]}


def _unreduced(loss: Any) -> tuple[Callable[..., Tensor], bool]:
    """The loss of every vertex, and whether that of all is the mean."""
    if isinstance(loss, nn.Module) and isinstance(getattr(loss, "reduction", None), str):
        each = copy.copy(loss)
        each.reduction = "none"
        reduction = str(loss.reduction)
    elif callable(loss) and "reduction" in inspect.signature(loss).parameters:
        each, reduction = partial(loss, reduction="none"), inspect.signature(loss).parameters["reduction"].default
    else:
        each, reduction = None, ""
    if each is None or reduction not in ("mean", "sum"):
        raise UsageError(
            f"A graph was to be cut into parts of unequal sizes, with the loss {loss!r}. Rows that belong to no vertex "
            f"must not count in it, and it neither leaves a class out nor has a reduction that is a mean or a sum. Use "
            f"a loss of torch's, or train with the plan as it is, whose parts are even."
        )
    return each, reduction == "mean"
