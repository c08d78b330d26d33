"""Products in chunks of their rows: what is sent of one chunk goes while the next one is multiplied.

Forward, chunks are gathered ahead of the product, and what it makes of each is summed up behind it. Backward it is the
other way round; the gradient of the matrix comes last, of all rows at once, beside the sums that are still under way.
What was gathered is a result too: others that read it read it from there, and their gradients come here and are summed
up together. A way on which nothing is sent is gone at once, in one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import Chunking, ChunkMove
from conjoin.ops import first_order
from conjoin.runtime.movement.carriers import Carry
from conjoin.runtime.ranks.communicator import Communicator, uncompiled
from conjoin.runtime.ranks.wire import from_sum, to_add, to_send

Finish = Callable[[], Tensor]
"""Waits for what is under way, and gives it."""


class Product:
    """Rows times a matrix, and their gradients, as torch has them."""

    def __init__(self, op: str, function: Callable[..., Tensor]) -> None:
        self._op, self._function = op, function

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self._op == "linear":
            return self._function(x, weight, bias)
        return self._function(bias, x, weight) if self._op == "addmm" else self._function(x, weight)

    def of_rows(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the rows."""
        return torch.matmul(gradient, weight if self._op == "linear" else weight.mT)

    def of_weight(self, gradient: Tensor, x: Tensor) -> Tensor:
        flat, rows = gradient.flatten(0, -2), x.flatten(0, -2)
        return flat.mT @ rows if self._op == "linear" else rows.mT @ flat


class ChunkedProduct:
    """A product with what is sent before and after it, in chunks."""

    def __init__(
        self,
        product: Product,
        chunking: Chunking,
        around: tuple[Carry | None, Carry | None],
        communicator: Communicator,
        pinned: bool,
    ) -> None:
        self._product, self._chunking, self._communicator = product, chunking, communicator
        self._before, self._after = around
        """What brings the rows, and what is made of them, where they go at once."""
        self._pinned = pinned
        for move in (chunking.operand, chunking.output):
            if move is not None:
                communicator.prepare(move.axes)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What is made, summed up, and the rows it was made of."""
        kind = x.device.type
        if not torch.is_autocast_enabled(kind):
            return self._run(x, weight, bias)
        if not self._pinned:  # casts that the caller's autocast makes stand between the sums and the product
            rows = x if self._before is None else self._before(x)
            made = self._product(rows, weight, bias)
            return made if self._after is None else self._after(made), rows
        with torch.autocast(kind, enabled=False):
            return self._run(x, weight, bias)

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
            return _Chunked.apply(self, x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
        return self.forward(x, weight, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        gathers, output = self._chunking.gathers, self._chunking.output
        if not gathers and output is None:
            return self._product(x, weight, bias), x
        coming = self._gathered(self._chunking.operand, x) if gathers else self._cut(x)
        rows: list[Tensor] = []
        going: list[Finish] = []
        for come in coming:
            rows.append(come())
            going.append(self._summed(output, self._product(rows[-1], weight, bias)))
        made = self._joined([finish() for finish in going], is_moved=self._chunking.gathers_back)
        return made, self._joined(rows) if gathers else x

    def backward(
        self, gradients: tuple[Tensor, Tensor | None], rows: Tensor, weight: Tensor, needs: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of what was given, of the rows, the matrix and what is added, as far as somebody needs them."""
        (gradient, of_others), operand = gradients, self._chunking.operand
        gathers, sums = self._chunking.gathers_back, operand is not None and needs[0]
        coming = self._gathered(self._chunking.output, gradient) if gathers else self._cut(gradient)
        if not gathers and not sums:
            coming = [lambda: gradient]
        others = self._cut(of_others) if of_others is not None and sums else []
        came: list[Tensor] = []
        going: list[Finish] = []
        for i, come in enumerate(coming):
            came.append(come())
            if needs[0]:
                part = self._product.of_rows(came[-1], weight)
                going.append(self._summed(operand, part.add_(others[i]()) if others else part))
        whole = self._joined(came) if gathers else gradient
        of_weight = self._product.of_weight(whole, rows) if needs[1] else None
        of_bias = whole.flatten(0, -2).sum(0) if needs[2] else None
        of_rows = [finish() for finish in going]
        if len(of_rows) < 2:
            return of_rows[0] if of_rows else None, of_weight, of_bias
        return self._joined(of_rows, is_moved=self._chunking.gathers), of_weight, of_bias

    def _cut(self, x: Tensor) -> list[Finish]:
        """Chunks of rows as a product reads or makes them."""
        dim, count, pieces = self._chunking.dim, self._chunking.count, self._chunking.pieces
        if pieces == 1:
            return [lambda part=part: part for part in x.tensor_split(count, dim)]  # type: ignore[misc]
        parts = torch.unflatten(x, dim, (pieces, -1)).tensor_split(count, dim + 1)
        return [lambda part=part: part.flatten(dim, dim + 1) for part in parts]  # type: ignore[misc]

    def _joined(self, parts: Sequence[Tensor], is_moved: bool = False) -> Tensor:
        """Chunks put together, of rows as a product reads or makes them, or of this rank's own where they moved."""
        dim, pieces = self._chunking.dim, 1 if is_moved else self._chunking.pieces
        if pieces == 1:
            return torch.cat(list(parts), dim)
        return torch.cat([torch.unflatten(part, dim, (pieces, -1)) for part in parts], dim + 1).flatten(dim, dim + 1)

    def _gathered(self, move: ChunkMove | None, x: Tensor) -> list[Finish]:
        """Start to gather chunks of this rank's own rows, one after the other."""
        assert move is not None and move.dim is not None
        parts = x.tensor_split(self._chunking.count, self._chunking.dim)
        return [self._gather(move.axes, move.size, move.dim, part) for part in parts]

    def _gather(self, axes: tuple[str, ...], size: int, dim: int, part: Tensor) -> Finish:
        part = part.contiguous()
        flat = part.new_empty((size, *part.shape))
        work = self._communicator.all_gather(to_send(flat), to_send(part), axes)

        def finish() -> Tensor:
            work.wait()
            return flat.movedim(0, dim).flatten(dim, dim + 1)

        return finish

    def _summed(self, move: ChunkMove | None, part: Tensor) -> Finish:
        """Start to sum up a chunk that was just made; nobody else holds it."""
        if move is None:
            return lambda: part
        dim, dtype = move.dim, part.dtype
        packed = part if dim is None else torch.unflatten(part, dim, (move.size, -1)).movedim(dim, 0)
        packed, shape = to_add(packed), packed.shape if dim is None else packed.shape[1:]
        if dim is None:
            work, total = self._communicator.all_reduce(packed, move.axes), packed
        else:
            total = packed.new_empty(packed.numel() // move.size)
            work = self._communicator.reduce_scatter(total, packed, move.axes)

        def finish() -> Tensor:
            work.wait()
            return from_sum(total, dtype).view(shape)

        return finish


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, product: ChunkedProduct, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        made, rows = product.forward(x, weight, bias)
        ctx.product = product
        ctx.shape, ctx.dtype = made.shape, made.dtype
        ctx.save_for_backward(rows, weight)
        ctx.set_materialize_grads(False)
        rows = rows.view_as(rows) if rows is x else rows
        if not ctx.needs_input_grad[1]:
            ctx.mark_non_differentiable(rows)
        return made, rows

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        rows, weight = ctx.saved_tensors
        of_made = rows.new_zeros(ctx.shape, dtype=ctx.dtype) if gradients[0] is None else gradients[0]
        return None, *ctx.product.backward((of_made, gradients[1]), rows, weight, ctx.needs_input_grad[1:])


def carry_chunked(
    product: Product,
    chunking: Chunking,
    around: tuple[Carry | None, Carry | None],
    communicator: Communicator,
    pinned: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """A product in chunks as a differentiable function of rows, matrix and what is added."""
    return uncompiled(ChunkedProduct(product, chunking, around, communicator, pinned).__call__)
