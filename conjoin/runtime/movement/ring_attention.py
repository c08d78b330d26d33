"""Attention of a split sequence to itself: keys and values go around while every rank computes with those that came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import Ring
from conjoin.ops import Attending, Mixed, first_order
from conjoin.runtime.program.functions import Function
from conjoin.runtime.ranks.communicator import Communicator, Work, uncompiled

_DIM = 2
"""Of the sequence."""


@dataclass(frozen=True, slots=True)
class Message:
    """Tensors under way to this rank."""

    work: Work
    arriving: Tensor
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]

    def wait(self) -> list[Tensor]:
        self.work.wait()
        found, start = [], 0
        for shape, dtype in self.shapes:
            stop = start + torch.Size(shape).numel() * dtype.itemsize
            found.append(self.arriving[start:stop].view(dtype).view(shape))
            start = stop
        return found


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors])


class Circle:
    """The ranks around which pieces of a sequence go, as one of them sees it."""

    def __init__(self, ring: Ring, members: Sequence[int], communicator: Communicator) -> None:
        self.ring, self._communicator = ring, communicator
        self.position = members.index(communicator.rank)
        ranks = sorted(members)
        self._places = [ranks.index(member) for member in members]
        """Of every position of the ring, that among the members of the group."""

    def pass_on(self, tensors: Sequence[Tensor], lengths: Sequence[int]) -> Message:
        """Start to send tensors to the next rank; those that come from the one before are so long."""
        shapes = [((*x.shape[:_DIM], n, *x.shape[_DIM + 1 :]), x.dtype) for x, n in zip(tensors, lengths, strict=True)]
        packed = _bytes_of(tensors)
        after, before = ((self.position + way) % self.ring.size for way in (1, -1))
        arriving = packed.new_empty(sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes))
        return Message(self._send(packed, {after: len(packed)}, arriving, {before: len(arriving)}), arriving, shapes)

    def _send(self, packed: Tensor, sent: dict[int, int], arriving: Tensor, received: dict[int, int]) -> Work:
        sizes = [[0] * self.ring.size for _ in range(2)]
        for found, some in zip(sizes, (received, sent), strict=True):
            for position, size in some.items():
                found[self._places[position]] = size
        return self._communicator.all_to_all(arriving, packed, (sizes[0], sizes[1]), self.ring.axes)

    def swap(self, tensors: Sequence[Tensor], back: bool = False) -> list[Tensor]:
        """Every rank's own piece in exchange for the two halves that it computes with; or these back."""
        ring, half = self.ring, self.ring.lengths[0] // 2
        gives, takes = ring.halves_sent(self.position), ring.halves_taken(self.position)
        gives, takes = (takes, gives) if back else (gives, takes)
        held, wanted = (sorted(h for some in table.values() for h in some) for table in (gives, takes))

        def ordered(table: dict[int, list[int]]) -> list[tuple[int, list[int]]]:
            return sorted(table.items(), key=lambda item: self._places[item[0]])

        packed = _bytes_of(
            [x.narrow(_DIM, held.index(h) * half, half) for _, some in ordered(gives) for h in some for x in tensors]
        )
        shapes = [(*x.shape[:_DIM], half, *x.shape[_DIM + 1 :]) for x in tensors]
        size = len(packed) // len(held)
        arriving = torch.empty_like(packed)
        sent, received = ({to: size * len(some) for to, some in table.items()} for table in (gives, takes))
        work = self._send(packed, sent, arriving, received)
        order = [h for _, some in ordered(takes) for h in some]
        kinds = [(shape, x.dtype) for _ in order for shape, x in zip(shapes, tensors, strict=True)]
        parts = Message(work, arriving, kinds).wait()
        rows = [parts[len(tensors) * order.index(h) :][: len(tensors)] for h in wanted]
        return [torch.cat(pieces, _DIM) for pieces in zip(*rows, strict=True)]

    def columns(self, mask: Tensor | None, step: int) -> Tensor | None:
        """What of a mask, whose rows are those of the queries here, is about the keys that are here in a step."""
        if mask is None or not mask.dim() or mask.shape[-1] == 1:
            return mask
        source = (self.position - step) % self.ring.size
        return mask.narrow(-1, sum(self.ring.lengths[:source]), self.ring.lengths[source])

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attending: Attending, mask: Tensor | None = None
    ) -> Mixed:
        """What the queries see of all keys."""
        ring, mixed = self.ring, Mixed.nothing(query, value.shape[-1])
        for step in range(ring.size):
            coming = None
            if step < ring.size - 1:
                coming = self.pass_on((key, value), [ring.lengths[(self.position - step - 1) % ring.size]] * 2)
            block = ring.block(self.position, step)
            if block is not None:
                seen = key[:, :, block.keys], value[:, :, block.keys]
                made = attending.forward(
                    query[:, :, block.queries], *seen, block.is_causal, self.columns(mask, step)
                )
                mixed.add(block.queries, *made)
            if coming is not None:
                key, value = coming.wait()
        return mixed

    def backward(
        self,
        gradient: Tensor,
        tensors: tuple[Tensor, ...],
        mixed: tuple[Tensor, Tensor],
        attending: Attending,
        mask: Tensor | None = None,
        g_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values; those of keys and values go around with them, and one further. That
        of a mask is added to `g_mask`."""
        (query, key, value), ring, (out, lse) = tensors, self.ring, mixed
        wide = out.dtype
        g_query = torch.zeros(query.shape, dtype=wide, device=query.device)
        own: list[Tensor] = []
        for step in range(ring.size + 1):
            held = [key, value] if step < ring.size - 1 else []
            source = ring.lengths[(self.position - step) % ring.size]
            following = ring.lengths[(self.position - step - 1) % ring.size]
            coming = self.pass_on([*own, *held], [source] * len(own) + [following] * len(held))
            made = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (key, value)] if step < ring.size else []
            block = ring.block(self.position, step) if step < ring.size else None
            if block is not None:
                rows, keys = block.queries, block.keys
                found = attending.backward(
                    gradient[:, :, rows], query[:, :, rows], (key[:, :, keys], value[:, :, keys]),
                    (out[:, :, rows], lse[:, :, rows]), block.is_causal, self.columns(mask, step),
                )  # fmt: skip
                for into, some, part in zip((g_query, *made), (rows, keys, keys), found[:3], strict=True):
                    into[:, :, some].add_(part)
                of_mask = self.columns(g_mask, step)
                if of_mask is not None:
                    of_mask.add_(found[3].sum_to_size(of_mask.shape))
            arrived = coming.wait()
            if held:
                key, value = arrived[len(own) :]
            others = arrived[: len(own)]
            own = [one.add_(two) for one, two in zip(made, others, strict=True)] if made and others else made or others
        g_key, g_value = own
        return g_query.to(query.dtype), g_key.to(key.dtype), g_value.to(value.dtype)


class _Around(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913 - what attention takes
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        circle: Circle,
        attending: Attending,
    ) -> Tensor:
        if circle.ring.swaps:
            query, key, value = circle.swap((query, key, value))
        mixed = circle.forward(query, key, value, attending, mask)
        out = mixed.out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, mixed.lse, mask)
        ctx.around = circle, attending
        return circle.swap([out], back=True)[0] if circle.ring.swaps else out

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        circle, attending = ctx.around
        *tensors, out, lse, mask = ctx.saved_tensors
        gradient = circle.swap(gradients)[0] if circle.ring.swaps else gradients[0]
        g_mask = torch.zeros(mask.shape, dtype=lse.dtype, device=lse.device) if ctx.needs_input_grad[3] else None
        found = circle.backward(gradient, tuple(tensors), (out.to(lse.dtype), lse), attending, mask, g_mask)
        of_mask = None if g_mask is None else g_mask.to(mask.dtype)
        return *(circle.swap(found, back=True) if circle.ring.swaps else found), of_mask, None, None


def carry_ring(ring: Ring, members: Sequence[int], communicator: Communicator) -> Function:
    """Attention along the sequence that some ranks hold, as a differentiable function of what this one holds."""
    communicator.prepare(ring.axes)
    circle = Circle(ring, members, communicator)

    @uncompiled
    def around(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        _: bool,
        scale: float | None,
        __: bool,
        mask: Tensor | None = None,
    ) -> Tensor:
        return _Around.apply(query, key, value, mask, circle, Attending.of(query, key, scale))  # type: ignore[no-any-return, no-untyped-call]

    return around
