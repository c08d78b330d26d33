"""Rows to the ranks that have their experts, and the answers back; none is dropped, however many there are for one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from conjoin.comm import Routing
from conjoin.ops import first_order, routed_experts, take_rows
from conjoin.runtime.program.functions import Function
from conjoin.runtime.ranks.communicator import Communicator, uncompiled

Counts = Sequence[int]


class Roads:
    """The ways between the ranks of a group, as one of them sees it."""

    def __init__(self, routing: Routing, communicator: Communicator) -> None:
        self.routing, self._communicator = routing, communicator
        members = sorted(communicator.mesh.group(communicator.rank, routing.axes))
        self.own = members.index(communicator.rank)

    @property
    def num_here(self) -> int:
        """Experts of this rank."""
        start, stop = self.routing.experts[self.own]
        return stop - start

    def send(self, rows: Tensor, sent: Counts, received: Counts) -> Tensor:
        """So many rows to each member, so many from each."""
        width = rows.shape[1]
        arrived = rows.new_empty(sum(received), width)
        sizes = [width * count for count in received], [width * count for count in sent]
        self._communicator.all_to_all(arrived.view(-1), rows.contiguous().view(-1), sizes, self.routing.axes).wait()
        return arrived

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """For every member and every expert here, how many rows come."""
        spans = self.routing.experts
        packed = torch.cat([counts[start:stop] for start, stop in spans])
        arrived = counts.new_empty(len(spans) * self.num_here)
        sizes = [self.num_here] * len(spans), [stop - start for start, stop in spans]
        self._communicator.all_to_all(arrived, packed, sizes, self.routing.axes).wait()
        return arrived.view(len(spans), self.num_here)


class _Sent(torch.autograd.Function):
    """Rows on their way, and their gradients the other."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, roads: Roads, sent: Counts, received: Counts) -> Tensor:
        ctx.way = roads, sent, received
        return roads.send(rows, sent, received)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        roads, sent, received = ctx.way
        return roads.send(gradients[0], received, sent), None, None, None


def carry_routing(routing: Routing, communicator: Communicator) -> Function:
    """Networks of experts that ranks own, as a function of this rank's rows and experts."""
    communicator.prepare(routing.axes)
    roads = Roads(routing, communicator)

    @uncompiled
    def routed(  # noqa: PLR0913 - as the operator has them
        x: Tensor,
        inward: Tensor,
        outward: Tensor,
        expert: Tensor,
        experts: int,
        activation: str,
        gate: Tensor | None = None,
    ) -> Tensor:
        ids, order = expert.sort(stable=True)
        with torch.no_grad():
            counts = torch.bincount(ids, minlength=experts)
            coming = roads.exchange_counts(counts)
        sent = [int(some.sum()) for some in (counts[start:stop] for start, stop in routing.experts)]
        received: list[int] = coming.sum(1).tolist()
        rows = _Sent.apply(take_rows(x, order, expert.shape[0]), roads, sent, received)  # type: ignore[no-untyped-call]
        here = torch.arange(roads.num_here, device=x.device).repeat(len(sent)).repeat_interleave(coming.view(-1))
        answers = routed_experts(rows, inward, outward, here, roads.num_here, activation, gate)
        back = _Sent.apply(answers, roads, received, sent)  # type: ignore[no-untyped-call]
        return back.new_zeros(expert.shape[0], back.shape[1]).index_copy(0, order, back)  # type: ignore[no-any-return]

    return routed
