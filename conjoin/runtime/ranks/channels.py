"""Single messages between ranks that are processes: on Gloo over connections that channels share, else in groups of
their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from conjoin.runtime.ranks.communicator import Guard, Messages, Session, Work
from conjoin.runtime.ranks.progress import Passage


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

    def start(self, sends: Messages, receives: Messages) -> ParcelOfWorks:
        """Without what torch does around each of them for other backends."""
        parcel = ParcelOfWorks(self._session, self._ranks)
        ways, tags, works = self._ways, self._tags, parcel.works
        own = ways.rank
        try:
            for peer, tensor in receives:
                works.append((ways.up if peer < own else ways.down).recv([tensor], peer, tags[peer]))
            for peer, tensor in sends:
                works.append((ways.up if peer > own else ways.down).send([tensor], peer, tags[peer]))
                self.bytes_sent += tensor.nbytes
        except torch.OutOfMemoryError:  # of this rank alone: it may leave the step
            raise
        except RuntimeError as error:
            raise parcel.explained(error) from error
        return parcel


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

    def start(self, sends: Messages, receives: Messages) -> ParcelAtOnce:
        self.bytes_sent += sum(tensor.nbytes for _, tensor in sends)
        operations = [dist.P2POp(dist.irecv, tensor, peer, self._group) for peer, tensor in receives]
        operations += [dist.P2POp(dist.isend, tensor, peer, self._group) for peer, tensor in sends]

        def start() -> Work:
            works = dist.batch_isend_irecv(operations) if operations else []
            return works[0] if len(works) == 1 else All(works)

        return ParcelAtOnce(start() if self._session is None else self._session.started(self._ranks, start, True))


class ParcelOfWorks:
    """Messages under way that are over one by one. There are many in a step, so nothing stands around them."""

    def __init__(self, session: Session | None, ranks: tuple[int, ...]) -> None:
        self._guard: Guard | None = None
        if session is not None:
            self._guard = session.guard
            self._passage: Passage = self._guard.enter(ranks, True)
        self.works: list[dist.Work] = []
        self._num_over = 0

    def explained(self, error: RuntimeError) -> Exception:
        """What a message failed of."""
        return error if self._guard is None else self._guard.explain(error, self._passage)

    def wait(self, count: int | None = None) -> None:
        begin, end, guard = self._num_over, len(self.works) if count is None else count, self._guard
        if end <= begin:
            return
        self._num_over = end
        if guard is not None:
            guard.begin_waiting(self._passage)
        try:
            for work in self.works[begin:end]:  # Gloo would wait for ever for what was waited for before
                work.wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise self.explained(error) from error
        finally:
            if guard is not None:
                guard.end_waiting(self._passage)


class ParcelAtOnce:
    """Messages under way that are over together."""

    def __init__(self, work: Work | None) -> None:
        self._work = work

    def wait(self, count: int | None = None) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


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
