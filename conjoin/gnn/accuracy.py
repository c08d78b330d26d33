"""How many vertices a model gets right, beside its loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

UNLABELLED = -100
"""The class that torch's cross-entropy leaves out."""


class Graded:
    """A loss that tells more: a dict of `loss`, and where labels are classes `correct` and `counted`.

    >>> logits, labels = torch.eye(3), torch.tensor([0, 2, UNLABELLED])
    >>> {key: float(value) for key, value in Graded(functional.cross_entropy)(logits, labels).items() if key != "loss"}
    {'correct': 1.0, 'counted': 2.0}
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        several = functional.binary_cross_entropy_with_logits
        self._is_of_several = loss is several or isinstance(loss, nn.BCEWithLogitsLoss)

    def __call__(self, output: Tensor, *given: Tensor) -> dict[str, Tensor]:
        """The loss of a model's output and what it takes beside that, labels first."""
        found = {"loss": self._loss(output, *given)}
        labels = given[0] if given else None
        if labels is None or output.dim() != 2:
            return found
        if self._is_of_several and labels.shape == output.shape:
            right = (output > 0) == (labels > 0)
            return found | {"correct": _count(right), "counted": _count(torch.ones_like(right))}
        if labels.dim() == 1 and not labels.is_floating_point():
            known = labels != UNLABELLED
            return found | {"correct": _count((output.argmax(-1) == labels) & known), "counted": _count(known)}
        return found


def _count(those: Tensor) -> Tensor:
    return those.to(torch.float32).sum()
