"""Timing collectives: which sets of axes, what is counted, that all ranks agree, that known speeds are found."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch

from conjoin.errors import UsageError
from conjoin.machine import COLLECTIVE_KINDS, CollectiveFit, Mesh
from conjoin.runtime import (
    Communication,
    Concurrency,
    Pace,
    Timed,
    axis_sets,
    calibrate_collectives,
    communicator_over,
    join_ranks,
    launch,
    measure_communication,
)
from conjoin.runtime.ranks.board import Board
from conjoin.runtime.ranks.communicator import Axes, Communicator, Done, Work
from conjoin.runtime.ranks.threads import ThreadRanks


def test_all_sets_of_few_axes_and_the_telling_ones_of_many() -> None:
    assert axis_sets(Mesh.of_nodes(1, 1)) == ()
    assert axis_sets(Mesh.of_nodes(1, 3)) == (("d0",),)
    assert len(axis_sets(Mesh.of_nodes(4, 4))) == 15
    many = axis_sets(Mesh.of_nodes(1, 32))
    assert len(many) == 6 and many[-1] == ("d0", "d1", "d2", "d3", "d4"), "no axes between nodes: no set of them"


# On real ranks.


def calibrate(rank: int, nodes: int, devices: int, seconds: float) -> Any:
    join_ranks()
    communicator = communicator_over(Mesh.of_nodes(nodes, devices))
    start = time.perf_counter()
    return measure_communication(communicator, seconds), time.perf_counter() - start


@pytest.mark.parametrize(("nodes", "devices"), [(1, 2), (2, 2)])
def test_real_ranks_agree_on_a_fit_for_each_collective(nodes: int, devices: int) -> None:
    answers = launch(nodes * devices, calibrate, nodes, devices, 0.5)
    assert all(found == answers[0][0] for found, _ in answers)
    found = answers[0][0]
    assert isinstance(found, Communication)
    sets = axis_sets(Mesh.of_nodes(nodes, devices))
    assert [(timed.axes, timed.kind) for timed in found.collectives] == [(a, k) for a in sets for k in COLLECTIVE_KINDS]
    for timed in found.collectives:
        sizes = [size for size, _ in timed.points]
        assert len(sizes) >= 4 and sizes == sorted(set(sizes)) and 0.8 * 256 <= sizes[0] <= 1.2 * 256
        assert all(1.5 < after / before < 4.5 for before, after in pairwise(sizes)), "fourfold, then twofold"
        assert all(0 < seconds < 10 for _, seconds in timed.points)
        fit = timed.fit()
        assert fit.latency >= 0 and fit.seconds_per_byte >= 0 and fit.r_squared <= 1
        assert fit.seconds(sizes[-1]) > 0
    assert any(timed.fit().seconds_per_byte > 0 for timed in found.collectives)
    links = {"d0"} if nodes == 1 else {"n0", "d0"}
    assert {timed.axes[0] for timed in found.point_to_point} == links
    assert all(timed.kind == "point-to-point" and len(timed.points) >= 4 for timed in found.point_to_point)
    assert (found.concurrency is None) == (nodes == 1)
    if found.concurrency is not None:
        both = found.concurrency
        assert both.axes == (("n0",), ("d0",)) and both.slowdown == both.together_seconds / max(both.alone_seconds) > 0


def wrong_world(rank: int) -> None:
    communicator_over(Mesh.of_nodes(1, 3))


def test_as_many_ranks_as_devices_must_run() -> None:
    with pytest.raises(UsageError, match="3 devices was asked for, and 2 ranks are running"):
        launch(2, wrong_world)


def test_one_rank_has_nothing_to_calibrate() -> None:
    communicator = communicator_over(Mesh(()))
    assert calibrate_collectives(communicator, seconds=1) == ()
    assert measure_communication(communicator, 1.0) == Communication((), (), None)
    assert join_ranks() == torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


# On links of known speed.


class SlowLinks(ThreadRanks):
    """One rank that takes as long as α + β · bytes sent says, on a clock that only it moves."""

    def __init__(self, mesh: Mesh, latency: dict[Axes, float], seconds_per_byte: float) -> None:
        super().__init__(mesh, 0, Board(1))
        self.now = 0.0
        self._latency, self._seconds_per_byte = latency, seconds_per_byte

    def _pay(self, axes: Axes, sent: float) -> Work:
        self.bytes_sent += round(sent)
        self.now += self._latency.get(axes, 1e-4) + self._seconds_per_byte * sent
        return Done()

    def all_reduce(self, tensor: torch.Tensor, axes: Axes, largest: bool = False) -> Work:
        if largest:  # the ranks' common clock
            return Done()
        members = len(self.mesh.group(0, axes))
        return self._pay(axes, 2 * (members - 1) / members * tensor.nbytes)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor, axes: Axes) -> Work:
        assert output.numel() == len(self.mesh.group(0, axes)) * tensor.numel()
        return self._pay(axes, output.nbytes - tensor.nbytes)

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, axes: Axes) -> Work:
        assert tensor.numel() == len(self.mesh.group(0, axes)) * output.numel()
        return self._pay(axes, tensor.nbytes - output.nbytes)

    def all_to_all(self, output: torch.Tensor, tensor: torch.Tensor, sizes: Any, axes: Axes) -> Work:
        assert sum(sizes[0]) == output.numel() and sum(sizes[1]) == tensor.numel()
        return self._pay(axes, tensor.nbytes - 4 * sizes[1][0])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowLinks:
    """Two nodes of three devices; what crosses nodes has a latency ten times as long."""
    links = SlowLinks(Mesh.of_nodes(2, 3), {("d0",): 1e-4, ("n0",): 1e-3, ("n0", "d0"): 1e-3}, 1e-8)
    monkeypatch.setattr(time, "perf_counter", lambda: links.now)
    return links


def by_kind(fits: tuple[CollectiveFit, ...]) -> dict[tuple[str, Axes], CollectiveFit]:
    return {(fit.kind, fit.axes): fit for fit in fits}


def test_links_of_known_speed_are_found_exactly(slow: SlowLinks) -> None:
    fits = by_kind(calibrate_collectives(slow, seconds=60))
    assert len(fits) == 15
    for (_, axes), fit in fits.items():
        assert fit.latency == pytest.approx(1e-4 if axes == ("d0",) else 1e-3, rel=1e-4)
        assert fit.seconds_per_byte == pytest.approx(1e-8, rel=1e-4)
        assert fit.r_squared > 0.9999 and fit.break_bytes == 0


def test_the_time_is_kept_and_sizes_that_take_too_long_are_left_out(slow: SlowLinks) -> None:
    told: list[float] = []
    found = measure_communication(slow, 4.0, told.append)
    assert slow.now < 5, "a round may end late, not much"
    assert told == sorted(told) and told[-1] == 1 and told[0] < 0.1
    largest = {timed.points[-1][0] for timed in found.collectives}
    assert max(largest) <= 4 * 2**20, "4 MiB already take 43 ms, and 15 collectives share 3.2 s in 4 rounds"
    assert min(largest) >= 16_000


def test_a_long_moment_does_not_end_the_climb(slow: SlowLinks) -> None:
    pay, calls = slow._pay, iter(range(10**9))

    def stumble(axes: Axes, sent: float) -> Work:
        slow.now += 1.0 if next(calls) in (13, 14) else 0.0  # both times that the fourth size is timed
        return pay(axes, sent)

    slow._pay = stumble  # type: ignore[method-assign]
    found = measure_communication(slow, 120.0).collectives
    assert (found[0].kind, found[0].axes) == ("all-reduce", ("n0",))
    assert found[0].points[-1][0] == 64 * 2**20, "it takes 0.67 s, its share is 1.6 s"
    assert found[0].fit().seconds_per_byte == pytest.approx(1e-8, rel=1e-4)


def test_two_at_once_on_one_wire_take_twice_as_long(slow: SlowLinks) -> None:
    found = measure_communication(slow, 10.0).concurrency
    assert found is not None
    assert found.together_seconds == pytest.approx(sum(found.alone_seconds))
    assert 1 < found.slowdown < 2, "the one across nodes has the longer latency"
    assert Concurrency((("a",), ("b",)), (1.0, 1.0), 2.0).slowdown == 2


def test_the_common_clock_reads_the_median_of_a_block(slow: SlowLinks) -> None:
    durations = iter([1.0, 50.0, 2.0, 3.0, 1.5])

    def call() -> None:
        slow.now += next(durations)

    assert Pace(slow).time(call, 5) == 2.0


def test_what_was_timed_fits_itself() -> None:
    timed = Timed("exchange", ("d0",), ((256, 1e-5), (1024, 2e-5), (4096, 6e-5)))
    assert timed.fit() == CollectiveFit(
        "exchange", ("d0",), timed.fit().latency, timed.fit().seconds_per_byte, timed.fit().r_squared
    )
    assert timed.fit().seconds_per_byte == pytest.approx(1.3e-8, rel=0.1)


def sent_by_each(rank: int) -> list[int]:
    """What every kind of transfer counts when the busiest rank should send 1200 bytes between three ranks."""
    from conjoin.runtime.ranks.collective_times import _Buffers, _transfer

    communicator: Communicator = communicator_over(Mesh.of_nodes(1, 3))
    communicator.prepare(("d0",))
    buffers = _Buffers(torch.device("cpu"))
    counts = []
    for kind in COLLECTIVE_KINDS:
        before = communicator.bytes_sent
        _transfer(communicator, kind, ("d0",), 1200, buffers)()
        counts.append(communicator.bytes_sent - before)
    return counts


def test_the_busiest_rank_sends_what_was_asked_for() -> None:
    counts = launch(3, sent_by_each)
    assert counts[1] == [1200] * 5
    assert counts[0] == counts[2] == [1200] * 4 + [600], "the ends of a chain have one neighbour"
