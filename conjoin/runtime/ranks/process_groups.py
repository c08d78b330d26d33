"""Ranks that are processes: the collectives of torch.distributed, over groups that are made for sets of mesh axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conjoin.comm import ring_bytes
from conjoin.machine import Mesh
from conjoin.runtime.ranks.channels import All, GlooChannel, ProcessChannel, Ways
from conjoin.runtime.ranks.communicator import Axes, Channel, Done, Session, Sizes, Work, closed
from conjoin.runtime.ranks.rendezvous import compare
from conjoin.runtime.ranks.swaps import swap
from conjoin.runtime.torch_private import all_gather, default_store, group_of_members, reduce_scatter

_numbers = count()
"""Of communicators, which all ranks make in the same order."""


class Sum:
    """An all-to-all under way whose parts are added up at the end."""

    def __init__(self, work: Work, parts: Tensor, output: Tensor) -> None:
        self._work, self._parts, self._output = work, parts, output

    def wait(self) -> None:
        self._work.wait()
        torch.sum(self._parts, 0, out=self._output)


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
        raise closed(f"communicate over {', '.join(axes)}")


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
        self._ways: Ways | None = None
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
            self._ways = Ways(self._group_with_name, dist.get_world_size())

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        """Single messages between some of the ranks."""
        self.prepare_channels()
        if self._ways is not None:
            return GlooChannel(self._ways, ranks, self._session)
        made = ProcessChannel(partial(self._group_with_name, ranks, name), ranks, self._session)
        self._channels.append(made)
        return made

    def _group_with_name(self, ranks: tuple[int, ...], name: str) -> dist.ProcessGroup:
        return group_of_members(ranks, name) if self._session is None else self._session.group(ranks, name)

    def to_sum(self, tensor: Tensor, last: int) -> Work:
        """On Gloo all tell the last one, who tells all; what Gloo sums up goes round twice, rank by rank."""
        axes = self.mesh.names
        if not self._swaps:
            return _Later(lambda: self.all_reduce(tensor, axes))
        telling = _Telling(self._groups[axes], last, tensor)
        return _Later(lambda: self._started(axes, lambda: telling))

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


class _Later:
    """A collective that begins when it is waited for."""

    def __init__(self, start: Callable[[], Work]) -> None:
        self._start = start

    def wait(self) -> None:
        self._start().wait()


class _Telling:
    """What all ranks tell one, who sums it up and tells all.

    Who is told is ready for it from the beginning: it is there when the last one comes, and he waits for nobody.
    """

    def __init__(self, group: dist.ProcessGroup, last: int, tensor: Tensor) -> None:
        self._group, self._tensor, self._is_last = group, tensor, group.rank() == last
        self._others = [rank for rank in range(group.size()) if rank != group.rank()] if self._is_last else [last]
        self._heard = tensor.new_empty(len(self._others), tensor.numel())
        parts = zip(self._others, self._heard.unbind(), strict=True)
        self._coming = [group.recv([part], rank, _TOLD) for rank, part in parts]

    def _say(self) -> list[dist.Work]:
        return [self._group.send([self._tensor], rank, _TOLD) for rank in self._others]

    def wait(self) -> None:
        if self._is_last:
            All(self._coming).wait()
            self._tensor += self._heard.sum(0)
            All(self._say()).wait()
        else:
            All([*self._say(), *self._coming]).wait()
            self._tensor.copy_(self._heard[0])


_TOLD = 0x5AD
