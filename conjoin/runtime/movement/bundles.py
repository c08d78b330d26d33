"""Parameters in bundles: the same collectives for many, started early and waited for late.

A parameter that is stored as I and used as B needs nothing forward and an all-reduce of its gradient backward (data
parallel); one that is stored split is gathered for use and its gradient reduce-scattered (ZeRO), and the piece that is
left all-reduced over axes on which it is stored alike (hybrid sharding). All is done for many parameters at once and
overlaps with computing:

- `launch` stands in the program where the first parameter of the bundle is used. It waits for the gather, which was
  started ahead, and starts those of the bundles that are wanted next. In backward it runs when the last of the bundle's
  gradients is there, and starts to sum them up. In a segment that the backward pass runs again, it is run again too.
- `hold` stands at the start of the program. Autograd runs what was made first last, so in backward it runs when nothing
  else is left to do, and waits for the sums.

Parameters that are used in another dtype than stored are cast on the way: before they are gathered, and gradients
before they are summed up, so that a sum over many ranks is rounded as the parameter is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from conjoin.comm import BundleKind, ParameterBundle, find_bundles, flights_backward, flights_forward
from conjoin.ir import Plan
from conjoin.ops import first_order
from conjoin.runtime.movement.movers import Mover
from conjoin.runtime.program.kept_casts import Copies
from conjoin.runtime.ranks.communicator import Communicator, Work


class _Sum:
    """Gradients on their way: scattered over some axes, then summed up over others."""

    def __init__(self, mover: Mover, scattered: Work, flat: Tensor) -> None:
        self._mover, self._scattered, self._flat = mover, scattered, flat
        self._summed: Work | None = None
        is_stored = flat.dtype == mover.kind.stored
        self.result = flat if is_stored else torch.empty_like(flat, dtype=mover.kind.stored)
        """The sums, when they were waited for, as gradients of what is stored."""
        if not mover.kind.gathered:
            self.proceed()

    def proceed(self) -> None:
        """Wait for the pieces, and start what is left to do with them."""
        if self._summed is None:
            self._scattered.wait()
            self._summed = self._mover.sum_up(self._flat)

    def wait(self) -> None:
        self.proceed()
        assert self._summed is not None
        self._summed.wait()
        if self.result is not self._flat:
            self.result.copy_(self._flat)


@dataclass(slots=True)
class _Ticket:
    """One forward pass through a bundle: what was held, and the sums its backward has started."""

    held: tuple[Tensor, ...] = ()
    made: tuple[weakref.ref[Tensor], ...] = ()
    """The parameters as they are used, as long as somebody holds them."""
    sums: list[_Sum] = field(default_factory=list)
    versions: tuple[int, ...] = ()
    """Which state of the parameters was held."""
    launched: bool = False
    num_asked: int = 0
    """How often the backward pass has yet to ask for the parameters."""
    again: tuple[Tensor, ...] | None = None
    """The parameters as the backward pass uses them, while it has to ask."""

    def proceed(self) -> None:
        for each in self.sums:
            each.proceed()

    def settle(self) -> None:
        """Wait for the sums; what they were given is no longer held."""
        for each in self.sums:
            each.wait()
        self.sums.clear()


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: _Ticket, *stored: Tensor) -> tuple[Tensor, ...]:
        ctx.ticket = ticket
        ctx.set_materialize_grads(False)  # what is summed up at the end of all micro-batches gives none here
        return tuple(x.view_as(x) for x in stored)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.ticket.settle()
        return None, *gradients


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bundle: Bundle, ticket: _Ticket, *held: Tensor) -> tuple[Tensor, ...]:
        ctx.bundle, ctx.ticket = bundle, ticket
        return bundle.bring_again(ticket) if ticket.launched else bundle.bring(held)

    @staticmethod
    @first_order
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None, *ctx.bundle.start_back(ctx.ticket, gradients)


class Bundle:
    """Some parameters, and how they are moved together."""

    def __init__(self, found: ParameterBundle, mover: Mover, dropping: Dropping | None = None) -> None:
        self.entries, self.leaves, self.kind = found.entries, found.leaves, found.kind
        self.mover = mover
        self._dropping = dropping
        self.ticket = _Ticket()
        self.ahead: tuple[Bundle, ...] = ()
        """Those whose gathers are started with this one's in the forward pass."""
        self.ahead_back: tuple[Bundle, ...] = ()
        self.after: Bundle | None = None
        """The next of the same kind, whose gradients come before."""
        self.defers = False
        """Whether gradients of several micro-batches are added up, and summed over the ranks at the end."""
        self._put_off: Tensor | None = None
        self._copies = Copies()
        """What is cast where it is stored, for all micro-batches of a step."""
        self._scattered: tuple[Work, Tensor] | None = None

    def defer(self) -> None:
        """Sum gradients over the ranks when all micro-batches are done, where that needs no more memory than each."""
        self.defers = bool(self.kind.summed)

    def _put_off_more(self) -> None:
        """Add what was scattered to what was put off before."""
        if self._scattered is not None:
            (work, flat), self._scattered = self._scattered, None
            work.wait()
            self._put_off = flat.to(self.kind.stored) if self._put_off is None else self._put_off.add_(flat)

    def forget_put_off(self) -> None:
        """What is left of a step that is over, or has failed."""
        self._put_off_more()
        self._put_off = None
        self._copies.forget()

    def drop(self) -> None:
        """What is under way, of a step that ranks have left together: nobody waits for it any more."""
        self.ticket, self._scattered, self._put_off = _Ticket(), None, None
        self._copies.forget()
        self.mover.drop()

    def sum_up(self) -> tuple[Work, tuple[Tensor, ...]] | None:
        """Start to sum up what was put off; None where there is nothing."""
        self._put_off_more()
        flat, self._put_off = self._put_off, None
        return None if flat is None else (self.mover.sum_up(flat), self.mover.pieces(flat))

    def hold(self, *stored: Tensor) -> tuple[Any, ...]:
        """A ticket and the parameters as stored; in backward the wait for their gradients."""
        self.ticket.settle()  # of a backward pass that failed
        self.ticket = _Ticket(tuple(x.detach() for x in stored), versions=tuple(x._version for x in stored))
        self.mover.forget()
        held = _Hold.apply(self.ticket, *stored) if self.kind.trained else self.ticket.held  # type: ignore[no-untyped-call]
        return self.ticket, *held

    def launch(self, runs_again: bool, ticket: _Ticket, *held: Tensor) -> tuple[Tensor, ...]:
        """The parameters in the layouts of their use; in backward the start of the sums.

        Where it `runs_again` in the backward pass, they are cast or gathered again; kept where the plan says so.
        """
        made: tuple[Tensor, ...] = _Launch.apply(self, ticket, *held)  # type: ignore[no-untyped-call]
        if ticket.launched:
            return made
        ticket.launched, ticket.made = True, tuple(map(weakref.ref, made))
        if runs_again and torch.is_grad_enabled():
            ticket.num_asked += 1
            keeps = self.kind.gathered and not self.kind.regather
            ticket.again = tuple(x.detach() for x in made) if keeps else None
        if self._dropping is not None:
            self._dropping.note(self)
        return made

    def bring(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The parameters for the forward pass; others are started on the way."""
        if self.kind.gathered:
            self.mover.start(held)
            for other in self.ahead:
                if other.ticket.held and not other.ticket.launched:
                    other.mover.start(other.ticket.held)
        return self._brought(held)

    def _brought(self, held: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """As they are used: gathered anew, or cast once for all micro-batches."""
        if self.kind.gathered or not self.defers or self.kind.dtype == self.kind.stored:
            return self.mover.bring(held)
        return self._copies.of(held, lambda: self.mover.bring(held))

    def start_back(self, ticket: _Ticket, gradients: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Start to sum up gradients; what is returned is complete when the ticket is settled."""
        ticket.again = None
        self._proceed_with_earlier()
        scattered = self.mover.scatter(gradients, self.defers)
        if self.defers:
            self._put_off_more()
            self._scattered = scattered
            if not self.kind.gathered:  # there is nothing to wait for
                self._put_off_more()
            return (None,) * len(gradients)
        started = _Sum(self.mover, *scattered)
        ticket.sums.append(started)
        if torch.is_anomaly_enabled():  # what is not there yet may be anything
            started.wait()
        return self.mover.pieces(started.result)

    def _proceed_with_earlier(self) -> None:
        """Let few scatters be under way, each holds gradients of whole tensors; go on with pieces that have come."""
        earlier = self.after if self.kind.summed or self.after is None else self.after.after
        if earlier is not None and self.kind.gathered:
            earlier._put_off_more()
            earlier.ticket.proceed()

    def bring_again(self, ticket: _Ticket) -> tuple[Tensor, ...]:
        """The parameters for the backward pass: as they were kept, or gathered again; others are started on the way."""
        if ticket.again is None:
            if tuple(x._version for x in ticket.held) != ticket.versions:
                raise RuntimeError(
                    "A parameter was changed between a forward pass and its backward pass, which gathers it again. "
                    "The gradient would be that of another model. Call backward before the optimizer's step."
                )
            if self.kind.gathered:
                self.mover.start(ticket.held)
                for other in self.ahead_back:
                    if other.ticket.num_asked > 0 and other.ticket.again is None:
                        other.mover.start(other.ticket.held)
            with torch.no_grad():
                ticket.again = self._brought(ticket.held)
        found = ticket.again
        ticket.num_asked -= 1
        if ticket.num_asked == 0:
            ticket.again = None
        return tuple(x.detach() for x in found)


@dataclass(frozen=True, slots=True)
class _Dropped:
    """A tensor that autograd would have kept, in terms of a parameter that can be gathered again."""

    bundle: Bundle
    ticket: _Ticket
    parameter: int
    view: tuple[Any, Any, Any]
    """Size, stride and offset."""


class Keeping(Protocol):
    """How autograd keeps what is not dropped."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, kept: Any) -> Tensor: ...


class Dropping:
    """What autograd keeps for the backward pass: gathered parameters are dropped, and gathered again when needed."""

    def __init__(self) -> None:
        self._alive: dict[int, tuple[weakref.ref[Tensor], Bundle, int]] = {}
        """By the address of its memory, every gathered parameter of this forward pass."""

    def hooks(self, others: Keeping | None = None) -> AbstractContextManager[Any]:
        """For one forward pass; what is not dropped is kept as others keep it."""
        self._alive.clear()
        if others is None:
            return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

        def pack(tensor: Tensor) -> Any:
            kept = self.pack(tensor)
            return others.pack(tensor) if isinstance(kept, Tensor) else kept

        def unpack(kept: Any) -> Tensor:
            return self.unpack(kept) if isinstance(kept, _Dropped) else others.unpack(kept)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def note(self, bundle: Bundle) -> None:
        """The parameters of a bundle were just gathered."""
        for i, reference in enumerate(bundle.ticket.made):
            whole = reference()
            assert whole is not None
            self._alive[whole.untyped_storage().data_ptr()] = reference, bundle, i

    def pack(self, tensor: Tensor) -> Tensor | _Dropped:
        """What is kept of a tensor; autograd hands out aliases, so it is the memory that tells what it is."""
        reference, bundle, i = self._alive.get(tensor.untyped_storage().data_ptr(), (None, None, 0))
        whole = None if reference is None else reference()
        if whole is None or bundle is None:  # that memory may be another tensor's by now
            return tensor
        if tensor.dtype != whole.dtype or tensor.is_conj() or tensor.is_neg():  # strides do not tell
            return tensor
        bundle.ticket.num_asked += 1
        return _Dropped(bundle, bundle.ticket, i, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def unpack(self, kept: Tensor | _Dropped) -> Tensor:
        """The tensor again."""
        if isinstance(kept, Tensor):
            return kept
        return kept.bundle.bring_again(kept.ticket)[kept.parameter].as_strided(*kept.view)


def make_bundles(plan: Plan, communicator: Communicator, dropping: Dropping | None = None) -> tuple[Bundle, ...]:
    """All bundles of a plan, kind by kind in the order of use."""
    found = find_bundles(plan)
    bundles = tuple(
        Bundle(each, Mover(each, communicator), dropping if each.kind.regather else None) for each in found
    )
    last: dict[BundleKind, Bundle] = {}
    flights = (order(found, plan.bundle_bytes) for order in (flights_forward, flights_backward))
    for bundle, ahead, back in zip(bundles, *flights, strict=True):
        bundle.ahead, bundle.ahead_back = tuple(bundles[i] for i in ahead), tuple(bundles[i] for i in back)
        if bundle.kind in last:
            last[bundle.kind].after = bundle
        last[bundle.kind] = bundle
    return bundles
