"""Attention of some queries to some keys, with the logarithms of sums by which it is put together with that to others.

    out = sum_i out_i exp(lse_i - lse)        lse = log(sum_i exp(lse_i))

Of what all blocks come to together, out and lse, each block alone finds its part of the gradients. Torch's own kernels
are taken where they give both; else scores of a block are written out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conjoin.ops.first_order import first_order
from conjoin.ops.torch_private import flash_attention, flash_attention_backward


@dataclass(slots=True)
class Mixed:
    """What queries have seen so far: its mean, in the dtype of sums, and the logarithm of the sum of weights."""

    out: Tensor
    lse: Tensor

    @staticmethod
    def nothing(query: Tensor, features: int) -> Mixed:
        dtype = torch.promote_types(query.dtype, torch.float32)
        out = query.new_zeros((*query.shape[:-1], features), dtype=dtype)
        return Mixed(out, query.new_full(query.shape[:-1], -torch.inf, dtype=dtype))

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Put in what some of the queries have seen."""
        before, mean = self.lse[:, :, rows], self.out[:, :, rows]
        total = torch.logaddexp(before, lse.to(before.dtype))
        known = _finite(total)
        mean.mul_((before - known).exp_().unsqueeze(-1)).add_(out * (lse - known).exp_().unsqueeze(-1))
        before.copy_(total)


@dataclass(frozen=True, slots=True)
class Attending:
    """How queries look at keys."""

    scale: float
    repeats: int
    """Heads of queries for each of keys."""

    @staticmethod
    def of(query: Tensor, key: Tensor, scale: float | None) -> Attending:
        """By the usual scale where none is given."""
        return Attending(1 / sqrt(query.shape[-1]) if scale is None else scale, query.shape[1] // key.shape[1])

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What queries see of some keys, and the logarithms of their sums; where they see none, nothing and -inf."""
        key, value = self._spread(key), self._spread(value)
        if mask is None and _has_kernel(query, key, value):
            return flash_attention(query, key, value, causal, self.scale)
        scores = self._scores(query, key, causal, mask)
        lse = scores.logsumexp(-1)
        return (scores - _finite(lse).unsqueeze(-1)).exp_() @ value.to(scores.dtype), lse

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        pair: tuple[Tensor, Tensor],
        mixed: tuple[Tensor, Tensor],
        causal: bool,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Gradients of queries, keys and values, and of a mask that is added; `mixed` is what the queries have seen of
        all keys."""
        key, value = (self._spread(x) for x in pair)
        out, lse = mixed
        if mask is None and _has_kernel(query, key, value):
            given = gradient, query, key, value, out.to(query.dtype), lse
            found: tuple[Tensor, ...] = flash_attention_backward(given, causal, self.scale)
        else:
            weights = (self._scores(query, key, causal, mask) - _finite(lse).unsqueeze(-1)).exp_()
            found = self._written_out(gradient, (query, key, value), out, weights)
        return found[0], self._gathered(found[1]), self._gathered(found[2]), *found[3:]

    def _written_out(
        self, gradient: Tensor, tensors: tuple[Tensor, ...], out: Tensor, weights: Tensor
    ) -> tuple[Tensor, ...]:
        """With p for weights: D(v) = p^T D(out), D(scores) = p (D(out) v^T - sum(D(out) out))."""
        gradient, wide = gradient.to(weights.dtype), weights.dtype
        query, key, value = (x.to(wide) for x in tensors)
        shared = (gradient * out).sum(-1, keepdim=True)
        scores = (gradient @ value.mT - shared) * weights
        return scores @ key * self.scale, scores.mT @ query * self.scale, weights.mT @ gradient, scores

    def _scores(self, query: Tensor, key: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = query.to(wide) @ key.to(wide).mT * self.scale
        if mask is not None:
            return scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores.add_(mask)
        if not causal:
            return scores
        kept = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        return scores.masked_fill_(~kept, -torch.inf)

    def _spread(self, x: Tensor) -> Tensor:
        return x if self.repeats == 1 else x.repeat_interleave(self.repeats, 1)

    def _gathered(self, gradient: Tensor) -> Tensor:
        if self.repeats == 1:
            return gradient
        batch, heads, *rest = gradient.shape
        return gradient.view(batch, heads // self.repeats, self.repeats, *rest).sum(2)


def attention_from_row(
    query: Tensor, key: Tensor, value: Tensor, first: int, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Causal attention of the last rows of a sequence: they see the first keys, and of the rest those up to their own.

    There is no mask, so torch's fast kernels run, and what is computed is what is seen. Where none of them gives the
    logarithms of its sums, a mask is written for those that do not.

    >>> q, rows = torch.zeros(1, 1, 2, 4), torch.arange(3.0)[None, None, :, None].expand(1, 1, 3, 4)
    >>> attention_from_row(q, rows, rows, 1, None, False)[0, 0, :, 0]
    tensor([0.5000, 1.0000])
    """
    if not _has_kernel(query, key, value):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(first)
        return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)
    return _FromRow.apply(query, key, value, first, scale)  # type: ignore[no-any-return, no-untyped-call]


class _FromRow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, first: int, scale: float | None
    ) -> Tensor:
        attending, mixed = Attending.of(query, key, scale), Mixed.nothing(query, value.shape[-1])
        for some, causal in _blocks(first, key):
            mixed.add(slice(None), *attending.forward(query, key[:, :, some], value[:, :, some], causal))
        out = mixed.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, mixed.lse)
        ctx.first, ctx.attending = first, attending
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        g_query = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        parts = []
        for some, causal in _blocks(ctx.first, key):
            pair, mixed = (key[:, :, some], value[:, :, some]), (out.to(lse.dtype), lse)
            found = ctx.attending.backward(gradients[0], query, pair, mixed, causal)
            g_query.add_(found[0])
            parts.append(found[1:3])
        g_key, g_value = (torch.cat(each, 2) for each in zip(*parts, strict=True))
        return g_query.to(query.dtype), g_key.to(key.dtype), g_value.to(value.dtype), None, None


def _blocks(first: int, key: Tensor) -> Iterator[tuple[slice, bool]]:
    """Keys that all queries see, and those of their own rows; where there are such."""
    if first:
        yield slice(None, first), False
    if first < key.shape[2]:
        yield slice(first, None), True


def _finite(lse: Tensor) -> Tensor:
    """What is taken off before exponentials: nothing where no key is seen."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether torch has a kernel that gives logarithms of sums too: on GPUs for halves, for heads that it knows.

    Of nothing the kernel for CPUs divides by zero, and ends the process; of keys for fewer samples than there are
    queries for, it reads on behind them.
    """
    if query.shape[-1] != value.shape[-1] or not query.numel() or not key.numel():
        return False
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3] or query.shape[1] % key.shape[1]:
        return False
    if not query.is_cuda:
        return query.device.type == "cpu"
    narrow, features = query.dtype in (torch.float16, torch.bfloat16), query.shape[-1]
    return narrow and features % 8 == 0 and features <= 256 and torch.cuda.get_device_capability() >= (8, 0)
