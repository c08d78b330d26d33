"""Single messages between ranks that are processes: on Gloo over connections that channels share, else in groups of
their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist

from conjoin.runtime.ranks.communicator import Messages, Parcel, Session, Watched, Work


class Ways:
    """Connections between all ranks on Gloo, of their own for each direction: to higher ranks and to lower ones.

    What is sent before its receiver is ready waits for the word that it is, and so do all words behind what is sent in
    their own direction. Every group has a thread of its own, which takes time from what is computed: more channels than
    these share them, and their messages are told apart by tags.
    """

    def __init__(self, group_of: Callable[[tuple[int, ...], str], dist.ProcessGroup], size: int) -> None:
        self._group_of, self._ranks = group_of, tuple(range(size))
        self.rank, self._num_channels = dist.get_rank(), Counter[int]()
        self.reconnect()

    def reconnect(self) -> None:
        self.up, self.down = (self._group_of(self._ranks, f"to {which} ranks") for which in ("higher", "lower"))

    def tags(self, ranks: tuple[int, ...]) -> dict[int, int]:
        """Of a new channel by its other ranks, each of which counts alike those that it has with this one."""
        others = [rank for rank in ranks if rank != self.rank]
        self._num_channels.update(others)
        return {rank: _FIRST_TAG + self._num_channels[rank] for rank in others}


_FIRST_TAG = 0x1000
"""Beyond those that mean something else."""


class GlooChannel:
    """Single messages on connections that channels share."""

    are_apart = True

    def __init__(self, ways: Ways, ranks: tuple[int, ...], session: Session | None) -> None:
        self._ways, self._ranks, self._session, self._tags = ways, ranks, session, ways.tags(ranks)
        self.bytes_sent = 0

    def start(self, sends: Messages, receives: Messages) -> Parcel:
        for _, tensor in sends:
            self.bytes_sent += tensor.nbytes
        return _Parcel.started(self._session, self._ranks, partial(self._start, sends, receives), self.are_apart)

    def _start(self, sends: Messages, receives: Messages) -> Sequence[dist.Work]:
        """Without what torch does around each of them for other backends."""
        ways, own, tags = self._ways, self._ways.rank, self._tags
        works = [(ways.up if p < own else ways.down).recv([tensor], p, tags[p]) for p, tensor in receives]
        return works + [(ways.up if p > own else ways.down).send([tensor], p, tags[p]) for p, tensor in sends]


class ProcessChannel:
    """Single messages in a process group of their own; a backend that has no tags brings those of two ranks in order,
    and needs those of a time started at once to have several under way."""

    are_apart = False

    def __init__(
        self, group: Callable[[], dist.ProcessGroup], ranks: tuple[int, ...], session: Session | None
    ) -> None:
        self._make_group, self._ranks, self._session = group, ranks, session
        self.bytes_sent = 0
        self.reconnect()

    def reconnect(self) -> None:
        """Take the group that was made anew."""
        self._group = self._make_group()

    def start(self, sends: Messages, receives: Messages) -> Parcel:
        self.bytes_sent += sum(tensor.nbytes for _, tensor in sends)
        return _Parcel.started(self._session, self._ranks, partial(self._start, sends, receives), self.are_apart)

    def _start(self, sends: Messages, receives: Messages) -> Sequence[dist.Work]:
        operations = [dist.P2POp(dist.irecv, tensor, peer, self._group) for peer, tensor in receives]
        operations += [dist.P2POp(dist.isend, tensor, peer, self._group) for peer, tensor in sends]
        return dist.batch_isend_irecv(operations) if operations else ()


class _Parcel:
    """Messages of processes under way."""

    def __init__(self, works: Sequence[dist.Work], watched: Watched | None, are_apart: bool) -> None:
        self._works, self._watched, self._are_apart, self._num_over = works, watched, are_apart, 0

    @classmethod
    def started(
        cls,
        session: Session | None,
        ranks: tuple[int, ...],
        start: Callable[[], Sequence[dist.Work]],
        are_apart: bool,
    ) -> _Parcel:
        if session is None:
            return cls(start(), None, are_apart)
        works: Sequence[dist.Work] = ()

        def watched() -> Work:
            nonlocal works
            works = start()
            return works[0] if len(works) == 1 else All(works)

        watch = session.started(ranks, watched, may_break=True)
        return cls(works, watch, are_apart)

    def wait(self, count: int | None = None) -> None:
        """One by one where the backend has messages apart; others are over together."""
        end = len(self._works) if count is None or not self._are_apart else count
        if end <= self._num_over:
            return
        works = self._works[self._num_over : end]  # Gloo would wait for ever for what was waited for before
        self._num_over = end
        part = works[0] if len(works) == 1 else All(works)
        if self._watched is None:
            part.wait()
        else:
            self._watched.wait_for(part)


class All:
    """Several messages under way."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        """What a watch asks of what a device carries out."""
        return all(work.is_completed() for work in self._works)
