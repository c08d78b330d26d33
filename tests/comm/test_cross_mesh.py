"""Transfers between meshes: every device gets its piece, and no plan could be shorter."""

from __future__ import annotations

from functools import cache
from itertools import product
from time import process_time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin import comm
from conjoin.comm import (
    CHUNK_BYTES,
    Atomic,
    Form,
    Grid,
    Message,
    TransferPlan,
    WholeSlices,
    plan_crossing,
    plan_transfer,
    reduced_for_transfer,
)
from conjoin.comm.cross_mesh import CARD_BYTES
from conjoin.comm.rounds import decompose
from conjoin.comm.senders import depth_first, longest_first, naive, randomized, split_evenly
from conjoin.errors import PlanError
from conjoin.ir import region_of
from conjoin.machine import Axis, Mesh
from conjoin.ops import At, Invariant, Layout, Partial, Placement, Split, TensorType

Side = tuple[Layout, Grid]

PAIRS = [((2, 4), (2, 4)), ((2, 4), (3, 4)), ((1, 4), (2, 4)), ((2, 3), (3, 2)), ((3, 2), (2, 5)), ((2, 1), (5, 3))]
"""Hosts and devices of each: the four of AlpaComm Table 2, and two that are uneven in every way."""
PLACEMENTS: list[Placement] = [Invariant(), Split(0), Split(1)]
LAYOUTS = [(("x", one), ("y", other)) for one, other in product(PLACEMENTS, repeat=2)]
SHAPE = (60, 48)
CHUNKS = 8


@cache
def grids(pair: tuple[tuple[int, int], tuple[int, int]]) -> tuple[Grid, Grid]:
    made, device, host = [], 0, 0
    for hosts, per_host in pair:
        count = hosts * per_host
        mesh = Mesh((Axis("x", hosts, True), Axis("y", per_host)))
        names = tuple(host + i // per_host for i in range(count))
        made.append(Grid(mesh, tuple(range(device, device + count)), names))
        device, host = device + count, host + hosts
    return made[0], made[1]


@cache
def planned(pair: int, one: int, other: int, itemsize: int = 4) -> tuple[TransferPlan, Side, Side]:
    source, target = grids(PAIRS[pair])
    sides = (LAYOUTS[one], source), (LAYOUTS[other], target)
    return plan_transfer(SHAPE, itemsize, *sides, chunks=CHUNKS), *sides


def deliver(shape: tuple[int, ...], source: Side, target: Side, rounds: list[tuple[Message, ...]]) -> None:
    """Carry out messages on arrays: nobody sends what it has not, and everybody gets what it wants."""
    whole = np.arange(int(np.prod(shape))).reshape(shape or (1,))  # a scalar as a row of one
    held = {device: np.full(whole.shape, -1) for _, grid in (source, target) for device in grid.devices}
    for rank, device in enumerate(source[1].devices):
        region = region_of(shape, source[0], source[1].mesh, rank)
        if len(region) == len(shape):
            where = tuple(slice(*each) for each in region)
            held[device][where] = whole[where]
    come = -1
    for number, messages in enumerate(rounds):
        carried = []
        for message in messages:
            assert come >= message.after or message.after < number
            where = tuple(slice(*each) for each in message.region)
            values = held[message.sender][where].reshape(-1)[message.begin : message.end].copy()
            assert len(values) and values.min() >= 0, f"{message} sends what is not there"
            carried.append((message, where, values))
        for message, where, values in carried:
            part = held[message.receiver][where].copy()
            part.reshape(-1)[message.begin : message.end] = values
            held[message.receiver][where] = part
        come = number
    for rank, device in enumerate(target[1].devices):
        region = region_of(shape, target[0], target[1].mesh, rank)
        if len(region) == len(shape):
            where = tuple(slice(*each) for each in region)
            assert np.array_equal(held[device][where], whole[where])


def busy_seconds(plan: TransferPlan, rounds: list[tuple[Message, ...]], host_of: dict[int, int]) -> float:
    """When the last message between hosts comes: a host sends and receives one at a time, in order, at one element a
    second, and starts nothing before the frame in which it came has ended."""
    out, into, begun = {}, {}, 0.0
    ends: list[float] = []
    for messages in rounds:
        end = ends[-1] if ends else 0.0
        for message in messages:
            one, other = host_of[message.sender], host_of[message.receiver]
            if one == other:
                continue
            begun = max(out.get(one, 0.0), into.get(other, 0.0), ends[message.after] if message.after >= 0 else 0.0)
            out[one] = into[other] = begun + message.end - message.begin
            end = max(end, out[one])
        ends.append(end)
    return ends[-1] if ends else 0.0


@pytest.mark.parametrize("itemsize", [4, CARD_BYTES])
@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_every_device_gets_its_piece_within_the_bound_for_all_pairs_of_layouts(pair: int, itemsize: int) -> None:
    """Of elements so large that a card is worth one, too: then every host spreads what it sends and takes."""
    for one, other in product(range(9), repeat=2):
        plan, source, target = planned(pair, one, other, itemsize)
        rounds = list(plan.rounds())
        deliver(SHAPE, source, target, rounds)
        host_of = {d: h for _, grid in (source, target) for d, h in zip(grid.devices, grid.hosts, strict=True)}
        limit = lower_bound(source, target) * (1 + (plan.longest_chain - 1) / plan.chunks)
        assert plan.seconds(itemsize) <= limit + 1e-9
        rounding = 2 * plan.num_frames * plan.rounds_per_frame  # an element more here and there: sizes are no multiples
        assert busy_seconds(plan, rounds, host_of) <= limit + rounding


def lower_bound(source: Side, target: Side) -> float:
    """Of AlpaComm's problem without its restrictions: elements a host needs, or that some hosts alone have to send."""
    wholes = [{}, {}]
    for found, (layout, grid) in zip(wholes, (source, target), strict=True):
        for rank, host in enumerate(grid.hosts):
            region = region_of(SHAPE, layout, grid.mesh, rank)
            found.setdefault(region, set()).add(host)
    size = lambda region: int(np.prod([stop - start for start, stop in region]))
    need = {}
    for region, hosts in wholes[1].items():
        for host in hosts:
            need[host] = need.get(host, 0) + size(region)
    sets = list(wholes[0].values())
    senders = sorted(set().union(*sets))
    dense = 0.0
    for bits in range(1, 1 << len(senders)):
        some = {host for i, host in enumerate(senders) if bits >> i & 1}
        inside = sum(size(region) for region, hosts in wholes[0].items() if hosts <= some)
        dense = max(dense, inside / len(some))
    return max(*need.values(), dense)


@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_all_devices_of_a_host_send_and_take_as_much_of_a_piece_as_each_other(pair: int) -> None:
    """Each has a card of its own; what is passed on goes over the one over which it came."""
    for one, other in product(range(9), repeat=2):
        plan, source, target = planned(pair, one, other, CARD_BYTES)
        host_of = {d: h for _, grid in (source, target) for d, h in zip(grid.devices, grid.hosts, strict=True)}
        taken, given = (dict.fromkeys(grid.devices, 0) for _, grid in (target, source))
        for messages in plan.rounds():
            for message in messages:
                if host_of[message.sender] != host_of[message.receiver]:
                    taken[message.receiver] += message.end - message.begin
                    if message.sender in given:
                        given[message.sender] += message.end - message.begin
        for (layout, grid), amounts in ((source, given), (target, taken)):
            alike: dict[object, list[int]] = {}
            for rank, device in enumerate(grid.devices):
                region = region_of(SHAPE, layout, grid.mesh, rank)
                alike.setdefault((region, host_of[device]), []).append(amounts[device])
            for found in alike.values():  # an element more of what comes from each host
                assert max(found) - min(found) <= 2 * PAIRS[pair][0][0], (one, other)


def test_what_came_in_several_rounds_is_spread_in_one_message() -> None:
    """Three hosts have rows, and of four hosts two want the same columns."""
    source, target = Grid.of_hosts(3, 2), Grid.of_hosts(4, 4, 6, 3)
    plan = plan_transfer((700, 12), 4, ((("n0", Split(0)),), source), ((("n0", Split(1)),), target), chunks=4)
    rounds = list(plan.rounds())
    inside = [m for number, messages in enumerate(rounds) for m in messages if number % plan.rounds_per_frame == 5]
    assert plan.rounds_per_frame == 6
    assert len(plan.cells.x) > 3 * 4, "what goes from a host to another is cut where rounds end"
    assert len(inside) == plan.chunks * 3 * 4 * 3, "chunks, slices for each host, devices that it did not come to"


@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_never_behind_the_ways_of_the_paper(pair: int) -> None:
    for one, other in product(range(9), repeat=2):
        plan, source, target = planned(pair, one, other)
        whole = WholeSlices(SHAPE, source, target)
        ours = plan.seconds(4.0)
        for form in Form:
            tasks = whole.tasks(form, 1.0, plan.chunks)
            found = [naive(tasks), longest_first(tasks), randomized(tasks, tries=3)]
            assert ours <= min(way.seconds for way in found) * (1 + 1e-9), form
        if len(tasks) <= 8:
            assert ours <= depth_first(tasks, 500).seconds * (1 + 1e-9)


@pytest.mark.parametrize("form", Form)
def test_the_other_forms_deliver_too(form: Form) -> None:
    for pair, one, other in ((0, 3, 1), (1, 8, 4), (3, 0, 0), (5, 4, 0)):
        _, source, target = planned(pair, one, other)
        whole = WholeSlices(SHAPE, source, target)
        found = longest_first(whole.tasks(form, 1.0))
        deliver(SHAPE, source, target, list(whole.carried(form, found, chunks=5).rounds()))


@pytest.mark.parametrize("pair", range(len(PAIRS)))
def test_the_other_forms_bring_to_a_host_what_they_are_said_to(pair: int) -> None:
    """To all devices: of a tensor each host gets a copy for each device, one, or at most two halves of one."""
    _, source, target = planned(pair, 0, 0)
    whole = WholeSlices(SHAPE, source, target)
    host_of = {d: h for _, grid in (source, target) for d, h in zip(grid.devices, grid.hosts, strict=True)}
    copies = {Form.SEND_RECEIVE: PAIRS[pair][1][1], Form.GLOBAL_ALL_GATHER: 1 + 1 / PAIRS[pair][1][0]}
    for form in Form:
        came: dict[int, int] = {}
        for messages in whole.carried(form, longest_first(whole.tasks(form, 1.0)), chunks=5).rounds():
            for m in messages:
                if host_of[m.sender] != host_of[m.receiver]:
                    came[host_of[m.receiver]] = came.get(host_of[m.receiver], 0) + m.end - m.begin
        assert max(came.values()) <= copies.get(form, 1) * SHAPE[0] * SHAPE[1] + 1, form


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_shape_between_any_grids(data: st.DataObject) -> None:
    """Uneven pieces, one place of an axis, hosts that source and target share, devices that stay."""
    shape = tuple(data.draw(st.lists(st.integers(4, 9), max_size=3)))
    sides: list[Side] = []
    for _ in range(2):
        sizes = data.draw(st.sampled_from([(2, 2), (3, 1), (1, 3), (2, 3), (1, 1)]))
        mesh = Mesh((Axis("x", sizes[0], True), Axis("y", sizes[1])))
        options: list[Placement] = [Invariant(), At(0), *(Split(dim) for dim in range(len(shape)))]
        x, y = data.draw(st.sampled_from(options)), data.draw(st.sampled_from(options))
        if x == y and isinstance(x, Split) and shape[x.dim] < mesh.size:
            y = Invariant()
        first = data.draw(st.integers(0, 4))
        devices = tuple(range(first, first + mesh.size))
        sides.append(((("x", x), ("y", y)), Grid(mesh, devices, tuple(device // 2 for device in devices))))
    itemsize, chunks = data.draw(st.sampled_from([4, CARD_BYTES])), data.draw(st.integers(1, 4))
    plan = plan_transfer(shape, itemsize, sides[0], sides[1], chunks=chunks)
    deliver(shape, sides[0], sides[1], list(plan.rounds()))


def test_one_device_is_told_its_own_messages() -> None:
    plan, source, target = planned(0, 3, 1)
    everything = list(plan.rounds())
    for device in (*source[1].devices, *target[1].devices):
        mine = list(plan.rounds(device))
        wanted = [tuple(m for m in messages if device in (m.sender, m.receiver)) for messages in everything]
        assert [set(each) for each in mine] == [set(each) for each in wanted]


def test_partial_sums_are_scattered_before_they_travel() -> None:
    source, target = grids(PAIRS[0])
    route, plan = reduced_for_transfer(SHAPE, 4, ((("x", Invariant()), ("y", Partial())), source), ((), target))
    assert [step.kind.value for step in route.steps] == ["slice", "reduce-scatter"]
    assert plan.most == plan.bound == SHAPE[0] * SHAPE[1]
    with pytest.raises(PlanError, match="partial sums over y"):
        plan_transfer(SHAPE, 4, ((("y", Partial()),), source), ((), target))
    scalar, _ = reduced_for_transfer((), 4, ((("y", Partial()),), source), ((), target))
    assert [step.kind.value for step in scalar.steps] == ["all-reduce"]


def test_partial_sums_are_wanted_by_the_first_of_their_devices_alone() -> None:
    source, target = grids(PAIRS[0])
    plan = plan_transfer(SHAPE, 4, ((), source), ((("x", Split(0)), ("y", Partial())), target))
    got: dict[int, int] = {}
    for messages in plan.rounds():
        for message in messages:
            got[message.receiver] = got.get(message.receiver, 0) + message.end - message.begin
    first = [target.devices[rank] for rank in range(8) if target.mesh.coordinates(rank)["y"] == 0]
    assert got == dict.fromkeys(first, SHAPE[0] * SHAPE[1] // 2)


def test_what_goes_on_inside_hosts_is_told() -> None:
    source, target = grids(PAIRS[0])
    assert (
        plan_transfer(SHAPE, 4, ((), source), ((("x", Split(0)),), target)).most_inside == 3 * SHAPE[0] * SHAPE[1] // 2
    )
    same = plan_transfer(SHAPE, 4, ((), source), ((), source))
    assert (same.most, same.most_inside, same.seconds(1.0)) == (0, 0, 0.0)
    assert all(message.sender == message.receiver for messages in same.rounds() for message in messages)


@pytest.mark.parametrize("num_hosts", [2, 8])
def test_a_chunk_of_a_slice_is_worth_a_message(num_hosts: int) -> None:
    """Between stages of many devices slices are small: hundredths of the tensor are not what is sent."""
    source = Grid.of_hosts(num_hosts, 4)
    target = Grid.of_hosts(num_hosts, 4, first_device=4 * num_hosts, first_host=num_hosts)
    rows = tuple((axis.name, Split(0)) for axis in source.mesh.axes)
    type = TensorType((1024, 2048), torch.float32)
    plan = plan_crossing(type, (rows, source), ((), target))
    sent = [m for messages in plan.rounds() for m in messages if m.sender != m.receiver]
    assert 1 < plan.chunks < comm.CHUNKS
    assert sum(m.end - m.begin for m in sent) * 4 >= len(sent) * CHUNK_BYTES


@pytest.mark.parametrize("layouts", [(0, 1), (0, None), (None, 0), (None, None)])
def test_five_hundred_devices_to_five_hundred_are_planned_in_about_a_second(layouts: tuple[int | None, ...]) -> None:
    source, target = Grid.of_hosts(64, 8), Grid.of_hosts(64, 8, 512, 64)
    sides = [
        (tuple((axis, Invariant() if dim is None else Split(dim)) for axis in grid.mesh.names), grid)
        for dim, grid in zip(layouts, (source, target), strict=True)
    ]
    begin = process_time()
    plan = plan_transfer((4096, 2048), 4, sides[0], sides[1])
    assert process_time() - begin < 3  # half a second at most on a core of 2026
    assert plan.most == plan.bound


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000))
def test_rounds_are_whole_free_of_collisions_and_no_longer_than_the_busiest(seed: int) -> None:
    draw = np.random.default_rng(seed)
    amounts = draw.integers(0, 9, draw.integers(1, 6, 2)) * draw.integers(0, 2, 1)
    found = decompose(amounts)
    again, longest = np.zeros_like(amounts), 0
    np.add.at(again, (found.senders, found.receivers), found.amounts)
    assert np.array_equal(again, amounts)
    for number in np.unique(found.rounds):
        now = found.rounds == number
        assert len(set(found.senders[now])) == len(set(found.receivers[now])) == now.sum()
    assert found.longest == max(amounts.sum(axis=0).max(initial=0), amounts.sum(axis=1).max(initial=0)) >= longest


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.sets(st.integers(0, 4), min_size=1)), min_size=1, max_size=6))
def test_senders_share_as_evenly_as_hall_allows(given_amounts: list[tuple[int, set[int]]]) -> None:
    amounts, hosts = [a for a, _ in given_amounts], [tuple(sorted(h)) for _, h in given_amounts]
    shares = split_evenly(amounts, hosts)
    load = [0] * 5
    for amount, each, share in zip(amounts, hosts, shares, strict=True):
        assert sum(share.values()) == amount and set(share) <= set(each)
        for host, part in share.items():
            load[host] += part
    dense = 0.0
    for bits in range(1, 32):
        some = {host for host in range(5) if bits >> host & 1}
        dense = max(dense, sum(a for a, h in zip(amounts, hosts, strict=True) if set(h) <= some) / len(some))
    assert max(load) == int(np.ceil(dense - 1e-9))


def test_depth_first_finds_what_greedy_misses() -> None:
    """Two senders, two receivers: greedy lets both senders serve the same receiver first."""
    tasks = [Atomic(1.0, (0,), (2,)), Atomic(1.0, (1,), (2,)), Atomic(1.0, (0,), (3,)), Atomic(1.0, (1,), (3,))]
    assert naive(tasks).seconds == 3.0
    assert depth_first(tasks).seconds == randomized(tasks).seconds == 2.0


def test_grids_that_are_none_are_refused() -> None:
    with pytest.raises(PlanError, match="Name one device and its host for each place"):
        Grid(Mesh.of_nodes(2, 2), (0, 1, 2), (0, 0, 1))
    source, target = grids(PAIRS[0])
    with pytest.raises(PlanError, match="0 chunks"):
        plan_transfer(SHAPE, 4, ((), source), ((), target), chunks=0)
