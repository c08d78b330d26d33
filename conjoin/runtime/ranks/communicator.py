"""What carries tensors between ranks: process groups of torch.distributed, or threads of one process that play ranks.

Both speak the same four collectives over a set of mesh axes, flat tensors in and out, so that a rank's program is the
same in training and in a check without a cluster. Members of a group stand in the order of their ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import count
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from conjoin.comm import ring_bytes
from conjoin.errors import UsageError
from conjoin.machine import Mesh
from conjoin.runtime.ranks.rendezvous import compare
from conjoin.runtime.ranks.swaps import swap
from conjoin.runtime.torch_private import (
    all_gather,
    compiler_follows,
    default_store,
    group_of_members,
    leave_uncompiled,
    reduce_scatter,
)

F = TypeVar("F", bound=Callable[..., Any])
_numbers = count()
"""Of communicators, which all ranks make in the same order."""


def uncompiled(function: F) -> F:
    """Keep `torch.compile` out of what talks to other ranks: it compiles what stands before and after.

    The switch loads the compiler, which eager runs do without, and takes a while in every call. So the compiler is told
    to leave this alone, where it meets the call and where it would go on with what is called.
    """
    switched: list[F] = []

    @leave_uncompiled
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiler_follows():
            return function(*args, **kwargs)
        if not switched:
            switched.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return switched[0](*args, **kwargs)

    return cast(F, call)


Axes = tuple[str, ...]
"""Axis names in the order of the mesh."""
Sizes = tuple[Sequence[int], Sequence[int]]
"""How many elements come from each member of a group, and how many go to each."""


Messages = Sequence[tuple[int, Tensor]]
"""Flat tensors, each with the rank at its other end."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when its result may be read."""


class Communicator(Protocol):
    """The collectives of one rank; each returns at once, the result is there after `wait`."""

    mesh: Mesh
    rank: int
    bytes_sent: int
    """Payload that left this rank so far, counted for the algorithm each collective is known to use."""
    num_started: int
    """How many collectives this rank has started so far."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie that it carries, unless the caller knows better."""

    def prepare(self, axes: Axes) -> None:
        """Make ready to communicate over these axes; all ranks prepare the same sets of axes in the same order."""

    def compare(self, text: str) -> Sequence[str]:
        """What every rank says, asked outside of all collectives; all ranks ask."""

    def all_reduce(self, tensor: Tensor, axes: Axes, largest: bool = False) -> Work:
        """Sum (or take the largest) over the group, in place."""

    def all_gather(self, output: Tensor, tensor: Tensor, axes: Axes) -> Work:
        """Everyone's flat tensor, one after the other."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, axes: Axes) -> Work:
        """The sum over the group of the part of a flat tensor that belongs to this rank."""

    def all_to_all(self, output: Tensor, tensor: Tensor, sizes: Sizes, axes: Axes) -> Work:
        """Parts of a flat tensor to everyone, parts from everyone; sizes received, then sizes sent."""


class Watched(Work, Protocol):
    """What is under way under somebody's eyes."""

    def wait_for(self, part: Work) -> None:
        """Wait for a part of it."""


class Parcel(Protocol):
    """Messages under way."""

    def wait(self, count: int | None = None) -> object:
        """Return when they are over; of those that are received, then those that are sent, the first ones at least."""


class Channel(Protocol):
    """Single messages between some ranks; those from one rank to another come in the order they were sent."""

    bytes_sent: int
    are_apart: bool
    """Whether messages are over one by one, in any order; else those that start together are, before later ones."""

    def start(self, sends: Messages, receives: Messages) -> Parcel:
        """Start to send and to receive; both are over after `wait`."""


class World(Communicator, Protocol):
    """The communicator of all ranks, from which those of some are made."""

    def among(self, mesh: Mesh, ranks: tuple[int, ...]) -> Communicator:
        """This rank on a mesh of some of the ranks, which all make it."""

    def prepare_channels(self) -> None:
        """Make ready for channels; all ranks do."""

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        """A channel of some ranks, which all make it in the same order."""

    def sum_over_all(self, tensor: Tensor, last: int) -> None:
        """Sum a few numbers over all ranks, in place; one of them is expected to come last."""

    @property
    def can_break_off(self) -> bool:
        """Whether this rank can leave what is under way among some of the ranks, and go on later."""

    def break_off(self) -> None:
        """Leave what is under way in channels and among ranks of other meshes; who waits there for this rank is told
        by a `BrokenOff`, also when it comes later. What all ranks do together goes on."""

    def renew(self) -> None:
        """After some have broken off, connect anew; all ranks do."""

    def fail(self, error: BaseException) -> None:
        """Where it cannot break off: have those end who wait for this rank."""


class Done:
    """A collective that is over already."""

    def wait(self) -> None:
        return None


class Sum:
    """An all-to-all under way whose parts are added up at the end."""

    def __init__(self, work: Work, parts: Tensor, output: Tensor) -> None:
        self._work, self._parts, self._output = work, parts, output

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._parts, 0, out=self._output)


class Session(Protocol):
    """Who makes process groups, and watches over what is done in them."""

    device: torch.device
    patience_seconds: float

    def look_for(self, ranks: list[int], groups: Sequence[tuple[int, ...]]) -> None: ...

    def group(self, ranks: tuple[int, ...], name: str = "") -> dist.ProcessGroup: ...

    def started(
        self, ranks: tuple[int, ...], start: Callable[[], Work | None], may_break: bool = False
    ) -> Watched | None: ...

    def break_off(self) -> None: ...

    def renew(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


def group_device() -> torch.device:
    """Where tensors lie that this process's group carries: on a GPU of its own, or on the CPU under Gloo.

    Launchers other than torchrun may not number the ranks of a node, or may let each see its own GPU only: then ranks
    take the GPUs they see in turn.
    """
    if not torch.cuda.is_available() or not dist.is_initialized() or dist.get_backend() == dist.Backend.GLOO:
        return torch.device("cpu")
    index = dist.get_node_local_rank(dist.get_rank()) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


class _Groups(dict[Axes, dist.ProcessGroup]):
    """Those that were made, until the session is closed."""

    def __missing__(self, axes: Axes) -> dist.ProcessGroup:
        raise UsageError(
            f"Ranks were to communicate over {', '.join(axes)} after their session was closed. They are not connected "
            f"any more. Open another session and load the plan there."
        )


class ProcessGroups:
    """The ranks of torch.distributed: one process group for every set of axes that a plan communicates over."""

    def __init__(self, mesh: Mesh, session: Session | None = None, ranks: tuple[int, ...] | None = None) -> None:
        self.mesh = mesh
        self.rank = dist.get_rank() if ranks is None else ranks.index(dist.get_rank())
        self._session = session
        self._ranks = ranks
        """Those that the mesh is made up of, where it is not all."""
        self.bytes_sent = self.num_started = 0
        self._swaps = dist.get_backend() == dist.Backend.GLOO
        """Whether single messages are better than the backend's own collectives.

        Gloo's reduce-scatter is an all-reduce that forgets: exchanging and adding moves half the bytes.
        """
        self._groups: dict[Axes, dist.ProcessGroup] = _Groups()
        self._members: dict[Axes, tuple[int, ...]] = {}
        self._parts: list[ProcessGroups] = []
        self._channels: list[ProcessChannel] = []
        self._ways: _Ways | None = None
        self._number = str(next(_numbers)) if ranks is None else f"of {ranks}"
        self._num_compared = 0

    @property
    def device(self) -> torch.device:
        return group_device() if self._session is None else self._session.device

    def prepare(self, axes: Axes) -> None:
        if axes not in self._groups:
            self._groups[axes], self._members[axes] = self._make_group(axes), self._global(axes)

    def _global(self, axes: Axes) -> tuple[int, ...]:
        """The members of this rank's group."""
        members = self.mesh.group(self.rank, axes)
        return members if self._ranks is None else tuple(self._ranks[member] for member in members)

    def close(self) -> None:
        """Let go of the process groups, which end when nobody holds them."""
        self._groups.clear()
        for part in self._parts:
            part.close()

    def among(self, mesh: Mesh, ranks: tuple[int, ...]) -> ProcessGroups:
        """This rank on a mesh of some of the ranks."""
        made = ProcessGroups(mesh, self._session, ranks)
        self._parts.append(made)
        return made

    def prepare_channels(self) -> None:
        if self._swaps and self._ways is None:
            self._ways = _Ways(self._group_with_name, dist.get_world_size())

    def channel(self, name: str, ranks: tuple[int, ...]) -> ProcessChannel | GlooChannel:
        """Single messages between some of the ranks."""
        self.prepare_channels()
        if self._ways is not None:
            return GlooChannel(self._ways, ranks, self._session)
        made = ProcessChannel(partial(self._group_with_name, ranks, name), ranks, self._session)
        self._channels.append(made)
        return made

    def _group_with_name(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        return group_of_members(ranks, name) if self._session is None else self._session.group(ranks, name)

    def sum_over_all(self, tensor: Tensor, last: int) -> None:
        """On Gloo all tell the last one, who tells all; what Gloo sums up goes round twice, rank by rank."""
        if not self._swaps:
            self.all_reduce(tensor, self.mesh.names).wait()
            return
        axes = self.mesh.names
        self._started(axes, lambda: _Telling(self._groups[axes], last, tensor)).wait()

    @property
    def can_break_off(self) -> bool:
        return self._session is not None and dist.get_backend() == dist.Backend.GLOO

    def break_off(self) -> None:
        assert self._session is not None, "there is one that it can be broken off with"
        self._session.break_off()

    def renew(self) -> None:
        assert self._session is not None, "there is one that it can be broken off with"
        self._session.renew()

    def fail(self, error: BaseException) -> None:
        if self._session is not None:
            self._session.fail(error)

    def reconnect(self) -> None:
        """Take the groups that were made anew."""
        for part in self._parts:
            for axes in part._groups:
                part._groups[axes] = part._make_group(axes)
        if self._ways is not None:
            self._ways.reconnect()
        for channel in self._channels:
            channel.reconnect()

    def _make_group(self, axes: Axes) -> dist.ProcessGroup:
        if self._ranks is not None:  # others make their own
            members = self._global(axes)
            if self._session is None:
                return group_of_members(members, "stage")
            return self._session.group(members, "stage")
        if set(axes) == set(self.mesh.names):
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        mine: Any = None
        for ranks in self.mesh.groups(axes):
            # every rank makes every group, in the same order
            made = dist.new_group(list(ranks)) if self._session is None else self._session.group(tuple(ranks))
            mine = made if self.rank in ranks else mine
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    def compare(self, text: str) -> Sequence[str]:
        self._num_compared += 1
        keys = default_store(f"conjoin/compared/{self._number}/{self._num_compared}")
        what, size, session = "program to go on with", self.mesh.size, self._session
        if session is None:
            return list(compare(keys, what, text, self.rank, size).values())
        look = partial(session.look_for, groups=tuple(self._members.values()))
        return list(compare(keys, what, text, self.rank, size, session.patience_seconds, look).values())

    def _started(self, axes: Axes, start: Callable[[], Work | None]) -> Work:
        self.num_started += 1
        if self._session is None:
            return start() or Done()
        return self._session.started(self._members[axes], start, self._ranks is not None) or Done()

    def all_reduce(self, tensor: Tensor, axes: Axes, largest: bool = False) -> Work:
        group = self._groups[axes]
        self.bytes_sent += ring_bytes(tensor.nbytes, group.size())
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        return self._started(axes, lambda: dist.all_reduce(tensor, op, group, async_op=True))

    def all_gather(self, output: Tensor, tensor: Tensor, axes: Axes) -> Work:
        group = self._groups[axes]
        self.bytes_sent += (group.size() - 1) * tensor.nbytes
        if self._swaps and group.size() == 2:  # more stand in a ring: words and data go different ways
            return self._swap("all-gather", axes, output.view(2, -1).unbind(), (tensor.view(-1),) * 2)
        return self._started(axes, lambda: all_gather(output, tensor, group=group, async_op=True))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, axes: Axes) -> Work:
        group = self._groups[axes]
        self.bytes_sent += (group.size() - 1) * output.nbytes
        if self._swaps:
            rows = tensor.view(group.size(), output.numel())
            parts = torch.empty_like(rows)
            under_way = self._swap("reduce-scatter", axes, parts.unbind(), rows.unbind())
            return Sum(under_way, parts, output)
        return self._started(axes, lambda: reduce_scatter(output, tensor, group=group, async_op=True))

    def all_to_all(self, output: Tensor, tensor: Tensor, sizes: Sizes, axes: Axes) -> Work:
        group = self._groups[axes]
        received, sent = list(sizes[0]), list(sizes[1])
        own = self.mesh.group(self.rank, axes).index(self.rank)
        self.bytes_sent += (tensor.numel() - sent[own]) * tensor.itemsize
        if self._swaps:
            return self._swap("all-to-all", axes, torch.split(output, received), torch.split(tensor, sent))
        return self._started(axes, lambda: dist.all_to_all_single(output, tensor, received, sent, group, async_op=True))

    def _swap(self, kind: str, axes: Axes, into: Sequence[Tensor], out: Sequence[Tensor]) -> Work:
        return self._started(axes, lambda: swap(kind, self._groups[axes], into, out))


class _Telling:
    """What all ranks tell one, who sums it up and tells all."""

    def __init__(self, group: dist.ProcessGroup, last: int, tensor: Tensor) -> None:
        self._group, self._tensor, self._is_last = group, tensor, group.rank() == last
        self._others = [rank for rank in range(group.size()) if rank != group.rank()] if self._is_last else [last]
        self._heard = tensor.new_empty(len(self._others), tensor.numel())
        parts = zip(self._others, self._heard.unbind(), strict=True)
        self._works = [group.recv([part], rank, _TOLD) for rank, part in parts]
        if not self._is_last:
            self._say()

    def _say(self) -> None:
        self._works += [self._group.send([self._tensor], rank, _TOLD) for rank in self._others]

    def wait(self) -> None:
        All(self._works).wait()
        if self._is_last:
            self._works = []
            self._tensor += self._heard.sum(0)
            self._say()
            All(self._works).wait()
        else:
            self._tensor.copy_(self._heard[0])


_TOLD = 0x5AD


class _Ways:
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

    def __init__(self, ways: _Ways, ranks: tuple[int, ...], session: Session | None) -> None:
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
