"""Operators over rows that read inputs from the host, block by block: one is computed with while the next comes.

Of what makes rows of rows (`RowCall`) a block is some rows. Autograd keeps what lies on the device; the backward pass
brings each block once more, and computes it again for its gradients. Of operators over edges (`edge_blocks.py`) a block
is some vertices with their edges. Where the device is the host the same is done with plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from conjoin.comm import cut_blocks
from conjoin.ir import HostReader, Range, flatten_tree, unflatten_tree
from conjoin.ops import first_order, tells_of_writes
from conjoin.runtime.movement.host_copies import Engines
from conjoin.runtime.program.functions import Function

Run = Callable[[Range, list[Tensor]], None]


def each_block(engines: Engines, spans: Sequence[Range], cut: Callable[[Range], list[Tensor]], run: Run) -> None:
    """Run something with what is cut of the host for each span, on the device: two of them are there at once."""
    coming: tuple[list[Tensor], torch.cuda.Event | None] | None = None
    for i, span in enumerate(spans):
        here, arrived = _begin(engines, cut(span)) if coming is None else coming
        engines.wait(arrived)
        coming = _begin(engines, cut(spans[i + 1])) if i + 1 < len(spans) else None
        run(span, here)


def _begin(engines: Engines, pieces: Sequence[Tensor]) -> tuple[list[Tensor], torch.cuda.Event | None]:
    made = [torch.empty(piece.shape, dtype=piece.dtype, device=engines.device) for piece in pieces]
    return made, engines.bring(list(zip(made, pieces, strict=True)))


class Pinned:
    """Copies in pinned memory, which devices read beside what they compute, of tensors that stay as they are."""

    def __init__(self, engines: Engines) -> None:
        self._is_pinned = engines.device.type != "cuda"
        self._known: Any = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor) -> Tensor:
        """The tensor itself where it is pinned, or may be written to unseen: that is copied as it is."""
        if self._is_pinned or tensor.is_pinned() or not tells_of_writes(tensor):
            return tensor
        version, made = self._known.get(tensor, (-1, None))
        if made is None or version != tensor._version:
            made = tensor.pin_memory()
            self._known[tensor] = tensor._version, made
        found: Tensor = made
        return found


@dataclass(frozen=True, slots=True)
class _Rows:
    """One call that goes over rows."""

    engines: Engines
    function: Function
    reader: HostReader
    leaves: list[Any]
    """Its arguments, of which `places` are tensors."""
    places: list[int]
    tree: Any
    hosts: list[Tensor]

    def spans(self) -> list[Range]:
        """Rows of about as many bytes."""
        rows = self.hosts[0].shape[0]
        row_bytes = sum(host.nbytes for host in self.hosts) // max(rows, 1)
        return cut_blocks(range(0, rows * row_bytes + 1, row_bytes)) if row_bytes else [(0, rows)]

    def cut(self, span: Range) -> list[Tensor]:
        return [host[slice(*span)] for host in self.hosts]

    def piece(self, span: Range, here: list[Tensor], others: Sequence[Tensor | None]) -> Any:
        """The rows of a span, from those of the host that are here."""
        leaves, there = list(self.leaves), iter(here)
        for i, (place, other) in enumerate(zip(self.places, others, strict=True)):
            leaves[place] = next(there) if other is None else other[slice(*span)] if i in self.reader.rows else other
        args, named = unflatten_tree(leaves, self.tree)
        return self.function(*args, **named)


class _OverRows(torch.autograd.Function):
    """The outputs of all blocks; what is on the host has no gradient."""

    @staticmethod
    def forward(ctx: Any, call: _Rows, *others: Tensor | None) -> Tensor:
        ctx.call, kind = call, call.engines.device.type
        ctx.save_for_backward(*others, *call.hosts)  # those of the host are read again: torch tells of writes to them
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        spans, made = call.spans(), list[Tensor]()

        def run(span: Range, here: list[Tensor]) -> None:
            piece = call.piece(span, here, others)
            if not made:
                made.append(piece.new_empty(spans[-1][1], *piece.shape[1:]))
            made[0][slice(*span)] = piece

        each_block(call.engines, spans, call.cut, run)
        return made[0]

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        call = ctx.call
        others = ctx.saved_tensors[: -len(call.hosts)]
        needed = [i for i, needs in enumerate(ctx.needs_input_grad[1:]) if needs]
        sums = [torch.zeros_like(others[i]) for i in needed]
        kind, dtype, enabled = ctx.autocast

        def run(span: Range, here: list[Tensor]) -> None:
            given: list[Any] = [None if other is None else other.detach() for other in others]
            wanted = [given[i].requires_grad_() for i in needed]
            with torch.enable_grad(), torch.autocast(kind, dtype, enabled, cache_enabled=False):
                piece = call.piece(span, here, given)
            found = torch.autograd.grad(piece, wanted, gradient[slice(*span)])
            for total, part in zip(sums, found, strict=True):
                total += part

        each_block(call.engines, call.spans(), call.cut, run)
        gradients = dict(zip(needed, sums, strict=True))
        return None, *(gradients.get(i) for i in range(len(others)))


class RowCall:
    """An operator whose rows are made of rows that lie on the host."""

    def __init__(self, function: Function, reader: HostReader, engines: Engines) -> None:
        self._function, self._reader, self._engines, self._pinned = function, reader, engines, Pinned(engines)

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        leaves, tree = flatten_tree((args, named))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        hosts = [self._pinned.of(leaves[places[i]]) for i in self._reader.host]
        others = [None if i in self._reader.host else leaves[place] for i, place in enumerate(places)]
        call = _Rows(self._engines, self._function, self._reader, leaves, places, tree, hosts)
        made: Tensor = _OverRows.apply(call, *others)  # type: ignore[no-untyped-call]
        return made
