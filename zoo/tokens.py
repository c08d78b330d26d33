"""Synthetic token batches, and the next-token loss, that every language model of the zoo shares."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def next_token_batch(count: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return `count` random token sequences and the same sequences shifted left by one: (inputs_BL, targets_BL)."""
    tokens_BM = torch.randint(vocabulary, (count, length + 1))
    return tokens_BM[:, :-1].contiguous(), tokens_BM[:, 1:].contiguous()


def next_token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Return the mean cross-entropy over all positions of all sequences."""
    return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())
