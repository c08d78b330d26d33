"""Transfers as ranks carry them out: in chunks and by any plan in rounds, judged by the tensor itself, sliced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from conjoin.comm import SENDER_WAYS, Form, Grid, InRounds, WholeSlices, plan_transfer
from conjoin.ir import region_of
from conjoin.machine import Axis, Mesh
from conjoin.ops import Invariant, Layout, Split, TensorType
from conjoin.runtime import Crossing, World, run_ranks
from conjoin.runtime.ranks.channels import All
from conjoin.runtime.ranks.communicator import Channel, Messages, Parcel
from conjoin.runtime.ranks.wire import to_send

Side = tuple[Layout, Grid]
SHAPE = (12, 8)
WHOLE = torch.arange(96, dtype=torch.int32).view(SHAPE)
ROWS: Layout = (("x", Split(0)), ("y", Invariant()))
COLUMNS: Layout = (("x", Invariant()), ("y", Split(1)))
ALL: Layout = (("x", Invariant()), ("y", Invariant()))


def side(layout: Layout, hosts: int, first_host: int = 0) -> Side:
    """Two devices on each host."""
    mesh = Mesh((Axis("x", hosts, True), Axis("y", 2)))
    devices = tuple(range(2 * first_host, 2 * (first_host + hosts)))
    return layout, Grid(mesh, devices, tuple(device // 2 for device in devices))


def piece(side: Side, rank: int) -> Tensor | None:
    layout, grid = side
    if rank not in grid.devices:
        return None
    region = region_of(SHAPE, layout, grid.mesh, grid.devices.index(rank))
    return WHOLE[tuple(slice(*each) for each in region)]


@dataclass
class Grouped:
    """A channel whose messages are over together, as NCCL's are: what starts later begins when that is."""

    channel: Channel
    bytes_sent: int = 0
    are_apart: bool = False

    def start(self, sends: Messages, receives: Messages) -> Parcel:
        parcel = self.channel.start(sends, receives)
        parcel.wait()
        return parcel


def carry_out(source: Side, target: Side, plan: InRounds, is_grouped: bool = False, times: int = 2) -> None:
    """On threads, several times one after another."""
    size = max(*source[1].devices, *target[1].devices) + 1

    def program(world: World) -> None:
        crossing = Crossing(TensorType(SHAPE, torch.int32, ()), source, target, world.rank, plan)
        channel = world.channel("transfers", tuple(range(size)))
        later: Channel = Grouped(channel) if is_grouped else channel
        have, want = piece(source, world.rank), piece(target, world.rank)
        for _ in range(times):
            expected = None if want is None else crossing.expect(channel, torch.device("cpu"))
            if expected is not None and is_grouped:
                expected._channel = later
            parcel = None if have is None else crossing.send(channel, have)
            if expected is not None:
                assert torch.equal(expected.wait(), want)
            if parcel is not None:
                parcel.wait()

    run_ranks(Mesh((Axis("rank", size),)), program)


PAIRS = {
    "to all of three hosts": (side(COLUMNS, 2), side(ALL, 3, 2)),
    "rows to columns": (side(ROWS, 2), side(COLUMNS, 2, 2)),
    "to hosts that have some of it": (side(ROWS, 2), side(ALL, 3, 1)),
}


@pytest.mark.parametrize("is_grouped", [False, True], ids=["apart", "grouped"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("chunks", [1, 5])
def test_pieces_come_in_chunks(pair: str, chunks: int, is_grouped: bool) -> None:
    carry_out(*PAIRS[pair], plan_transfer(SHAPE, 4, *PAIRS[pair], chunks), is_grouped)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("form", Form)
def test_every_other_way_is_carried_out_too(form: Form, pair: str) -> None:
    slices = WholeSlices(SHAPE, *PAIRS[pair])
    found = SENDER_WAYS["longest first"](slices.tasks(form, 1.0))
    carry_out(*PAIRS[pair], slices.carried(form, found, chunks=3))


def test_several_may_be_under_way_among_the_same_ranks() -> None:
    """What is passed on of one is not taken for what comes first of the next."""
    source, target = side((("x", Split(0)), ("y", Split(0))), 2), side(ALL, 2)
    plan = plan_transfer(SHAPE, 4, source, target, chunks=2)

    def program(world: World) -> None:
        crossing = Crossing(TensorType(SHAPE, torch.int32, ()), source, target, world.rank, plan)
        channel, onward = (world.channel(name, tuple(range(4))) for name in ("transfers", "passed on"))
        have = piece(source, world.rank)
        assert have is not None and crossing.passes_on
        expected = [crossing.expect(channel, torch.device("cpu"), onward) for _ in range(3)]
        for number, each in enumerate(expected):
            parcel = crossing.send(channel, have + 100 * number)
            assert torch.equal(each.wait(), WHOLE + 100 * number)
            parcel.wait()

    run_ranks(Mesh((Axis("rank", 4),)), program)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16, torch.bool])
def test_one_element_of_many_is_sent(dtype: torch.dtype) -> None:
    """Torch takes it for contiguous whatever its stride is."""
    column = torch.arange(12).to(dtype).view(3, 4)[1:2, 2:3].t()
    sent = to_send(column)
    assert torch.equal(sent.view(dtype).view(()), column.reshape(()))
    assert sent.data_ptr() == column.data_ptr()


def test_a_chunk_is_passed_on_before_the_next_has_come() -> None:
    """The source sends its second chunk when the last host has the first."""
    source, target = side(ALL, 1), side(ALL, 2, 1)
    plan = plan_transfer(SHAPE, 4, source, target, chunks=2)
    first = {m.chunk: m for messages in plan.rounds() for m in messages if m.sender in source[1].devices}
    assert sorted(first) == [0, 1], "one message for each chunk"
    giver, next_host = first[0].sender, first[0].receiver
    passed = [m for messages in plan.rounds() for m in messages if m.sender == next_host]
    last = next(m.receiver for m in passed if m.receiver // 2 != next_host // 2)

    def program(world: World) -> None:
        crossing = Crossing(TensorType(SHAPE, torch.int32, ()), source, target, world.rank, plan)
        channel, signal = (world.channel(name, tuple(range(6))) for name in ("transfers", "signal"))
        if world.rank == giver:
            for chunk in (0, 1):
                message = first[chunk]
                part = WHOLE.view(-1)[message.begin : message.end].clone()
                channel.start([(message.receiver, part)], ()).wait()
                if chunk == 0:
                    signal.start((), [(last, torch.zeros(1))]).wait()
        elif world.rank in target[1].devices:
            expected = crossing.expect(channel, torch.device("cpu"))
            if world.rank == last:
                expected._channel = Watched(channel, lambda: signal.start([(giver, torch.ones(1))], ()).wait())
            assert torch.equal(expected.wait(), WHOLE)

    run_ranks(Mesh((Axis("rank", 6),)), program)


class Watched:
    """A channel that calls when the first message that it receives has come."""

    are_apart = True
    bytes_sent = 0

    def __init__(self, channel: Channel, call: Callable[[], object]) -> None:
        self._channel = channel
        self._calls = [call]

    def start(self, sends: Messages, receives: Messages) -> Parcel:
        parcel = self._channel.start(sends, receives)
        if receives and self._calls:
            parcel.wait(1)
            self._calls.pop()()
        return parcel


class Finished:
    def __init__(self, is_over: bool) -> None:
        self._is_over = is_over

    def is_completed(self) -> bool:
        return self._is_over


@pytest.mark.parametrize(("over", "all_over"), [([True, True], True), ([True, False], False), ([], True)])
def test_a_watch_may_ask_several_messages_at_once(over: list[bool], all_over: bool) -> None:
    assert All([Finished(each) for each in over]).is_completed() is all_over  # type: ignore[misc]
