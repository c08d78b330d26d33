"""Single messages of processes: what goes over connections that channels share stays apart, and few are sent to share
a number."""

from __future__ import annotations

import torch
from torch import Tensor

from conjoin.machine import Mesh
from conjoin.runtime import Session, launch
from conjoin.runtime.ranks.communicator import World

RANKS = 4


def _world() -> World:
    return Session("cpu").communicator(Mesh.of_nodes(1, RANKS))


def _channels_cross(_: int) -> dict[str, list[float]]:
    """Each pair of neighbours talks in a channel of its own, some in another, and all in a third; what was sent first
    in one is taken last."""
    world = _world()
    rank = world.rank
    pairs = [(a, a + 1) for a in range(RANKS - 1)]
    groups = {**{f"{a}>{b}": (a, b) for a, b in pairs}, "ends": (0, 3), "all": tuple(range(RANKS)), "0>1 too": (0, 1)}
    channels = {name: world.channel(name, ranks) for name, ranks in groups.items() if rank in ranks}
    taken: dict[str, list[tuple[int, Tensor]]] = {}
    sent = []
    for name, channel in channels.items():
        others = [other for other in groups[name] if other != rank]
        sent.append(channel.start([(other, _message(name, rank, other)) for other in others], ()))
    for name, channel in reversed(channels.items()):
        taken[name] = [(other, torch.empty(1)) for other in groups[name] if other != rank]
        channel.start((), taken[name]).wait()
    for parcel in sent:
        parcel.wait()
    return {name: [float(x - _message(name, other, rank)) for other, x in got] for name, got in taken.items()}


def _message(name: str, sender: int, receiver: int) -> Tensor:
    return torch.tensor([sum(map(ord, name)) * 100.0 + 10 * sender + receiver])


def test_messages_of_channels_that_share_connections_are_not_taken_for_each_other() -> None:
    for found in launch(RANKS, _channels_cross):
        assert found and all(difference == 0 for each in found.values() for difference in each)


def _sums(_: int) -> list[list[float]]:
    world = _world()
    world.prepare(world.mesh.names)
    found = []
    for last in range(RANKS):
        told = torch.tensor([world.rank + 1.0, 10.0 * last], dtype=torch.float64)
        under_way = world.to_sum(told, last)
        told += 1  # by the time it is waited for
        under_way.wait()
        found.append(told.tolist())
    assert world.num_started == RANKS, "every rank enters each of them once"
    return found


def test_what_is_summed_over_all_ranks_is_the_same_on_all_whoever_comes_last() -> None:
    for found in launch(RANKS, _sums):
        assert found == [[14.0, 40.0 * last + 4] for last in range(RANKS)]


def _threads_of_channels(_: int) -> int:
    """How many threads more than before a process has with twelve channels."""
    world = _world()
    world.prepare_channels()
    before = _num_threads()
    for number in range(12):
        world.channel(str(number), tuple(range(RANKS)))
    return _num_threads() - before


def _num_threads() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("Threads:"))


def test_channels_take_no_threads_of_their_own() -> None:
    assert launch(RANKS, _threads_of_channels) == [0] * RANKS
