"""Attention in two operators, so that keys may be split: the greatest score of every query, and sums over keys.

    peak(q, k) = max_s q k_s
    sums(q, k, v, peak) = sum_s e_s v_s, sum_s e_s         with e_s = exp(q k_s - peak)
    attention = the first sum divided by the second

The greatest is that of the greatest of the parts, and sums are those of the sums. Scores are never there as a whole:
they are made for some keys at a time, and once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from conjoin.ops.first_order import first_order

_KEYS = 1024
"""Keys whose scores are there at a time."""


def attention_peak(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    """The greatest score of every query, a finite constant.

    >>> attention_peak(torch.ones(1, 2, 4), torch.arange(3.0)[None, :, None].expand(1, 3, 4), None, True, None, False)
    tensor([[[0.],
             [2.]]])
    """
    mask = None if attn_mask is None else attn_mask.detach()
    case = _Case(query.detach(), key.detach(), mask, is_causal, scale, enable_gqa)
    greatest = [scores.amax(-1, keepdim=True) for _, scores in case.scores()]
    finite = torch.finfo(greatest[0].dtype)
    return torch.stack(greatest).amax(0).clamp(finite.min, finite.max)


def attention_sums(  # noqa: PLR0913 - what torch's own takes
    query: Tensor,
    key: Tensor,
    value: Tensor,
    peak: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor]:
    """The sums over keys of exponentials of scores less the peak, with values and without."""
    return _Sums.apply(query, key, value, attn_mask, peak.detach(), is_causal, scale, enable_gqa)  # type: ignore[no-any-return, no-untyped-call]


class _Case:
    """Queries and keys, and their scores for some keys at a time."""

    def __init__(
        self, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
    ) -> None:
        self.repeats = query.shape[-3] // key.shape[-3] if enable_gqa and query.dim() > 2 else 1
        self.scale = 1 / sqrt(query.shape[-1]) if scale is None else scale
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.query, self.key, self.mask, self.is_causal = query.to(self.dtype), self.spread(key), mask, is_causal

    def spread(self, x: Tensor) -> Tensor:
        """Keys or values, in the dtype of sums, with those of a group of heads for each of its heads."""
        return x.to(self.dtype) if self.repeats == 1 else x.to(self.dtype).repeat_interleave(self.repeats, -3)

    def gathered(self, gradient: Tensor, like: Tensor) -> Tensor:
        """The gradient of keys or values from that of what they were spread to."""
        if self.repeats > 1:
            *lead, heads, keys, features = gradient.shape
            gradient = gradient.view(*lead, heads // self.repeats, self.repeats, keys, features).sum(-3)
        return gradient.sum_to_size(like.shape).to(like.dtype)

    def scores(self) -> Iterator[tuple[slice, Tensor]]:
        """Scores of all queries, and of which keys."""
        for start in range(0, self.key.shape[-2], _KEYS):
            some = slice(start, start + _KEYS)
            scores = (self.query * self.scale) @ self.key[..., some, :].mT
            yield some, self._masked(scores, some)

    def _masked(self, scores: Tensor, some: slice) -> Tensor:
        if self.is_causal:
            kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(-some.start)
            scores = scores.masked_fill(~kept, -torch.inf)
        if self.mask is None:
            return scores
        mask = self.mask if self.mask.shape[-1] == 1 else self.mask[..., some]
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, peak: Tensor, *attributes: Any
    ) -> Any:
        ctx.save_for_backward(query, key, value, mask, peak)
        ctx.attributes = attributes
        case = _Case(query, key, mask, *attributes)
        values = case.spread(value)
        weighed: Any = 0
        total: Any = 0
        for some, scores in case.scores():
            raised = (scores - peak).exp_()
            weighed = raised @ values[..., some, :] + weighed
            total = raised.sum(-1, keepdim=True) + total
        return weighed, total

    @staticmethod
    @first_order
    def backward(ctx: Any, g_weighed: Tensor, g_total: Tensor) -> tuple[Tensor | None, ...]:
        """With e for exponentials: D(values) = e^T D(weighed), D(scores) = e (D(weighed) values^T + D(total))."""
        query, key, value, mask, peak = ctx.saved_tensors
        case = _Case(query, key, mask, *ctx.attributes)
        values = case.spread(value)
        g_query: Any = 0
        g_keys, g_values, g_masks = [], [], []
        for some, scores in case.scores():
            raised = (scores - peak).exp_()
            g_values.append(raised.mT @ g_weighed)
            g_scores = raised.mul_(g_weighed @ values[..., some, :].mT + g_total)
            g_query = g_scores @ case.key[..., some, :] * case.scale + g_query
            g_keys.append(g_scores.mT @ case.query * case.scale)
            g_masks.append(g_scores)
        g_mask = None
        if ctx.needs_input_grad[3]:
            g_mask = torch.cat(g_masks, -1).sum_to_size(mask.shape).to(mask.dtype)
        g_key, g_value = (torch.cat(each, -2) for each in (g_keys, g_values))
        made = g_query.to(query.dtype), case.gathered(g_key, key), case.gathered(g_value, value), g_mask
        return *made, None, None, None, None
