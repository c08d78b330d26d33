"""Reshards on real tensors, among threads and among Gloo processes: values, gradients, and the bytes that comm counts.

A value is spread over the ranks as its layout says (partial sums as unequal shares), carried, and put together again;
its gradient comes back in the duals. Uneven pieces are the rule here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from math import prod
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from conjoin.comm import StepKind, backward_route, bytes_sent, dual_layout, reshard
from conjoin.ir import Region, RegionMove, holds, region_of, region_shape
from conjoin.machine import Axis, Mesh
from conjoin.ops import At, Copies, Invariant, Layout, Partial, Placement, Split, placement_on
from conjoin.runtime.movement.carriers import carry_move, carry_reshard
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.threads import run_ranks
from tests.comm.layouts import all_layouts
from tests.runtime.gloo_ranks import run_processes

SHARES = (1.75, -0.5, -0.25), (1.25, -0.25)
"""Of partial sums, along an axis of three and of two; each adds up to 1, and none is 0 or equal to another."""


def line(*sizes: int) -> Mesh:
    return Mesh(tuple(Axis(name, size) for name, size in zip("xyz", sizes, strict=False)))


@dataclass(frozen=True, slots=True)
class Case:
    """A tensor of a shape from one layout to another."""

    shape: tuple[int, ...]
    source: Layout
    target: Layout

    def whole(self, seed: int) -> Tensor:
        return torch.randn(self.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EVERYWHERE: tuple[Placement, ...] = (Invariant(), Copies(), Partial())
PLACES: tuple[Placement, ...] = (*EVERYWHERE, At(0), At(1))


def cases_on(
    mesh: Mesh, shape: tuple[int, ...], count: int | None = None, placements: tuple[Placement, ...] = PLACES
) -> list[Case]:
    """All, or so many in which all placements meet that can: each is taken for what is new in it, then by chance."""
    layouts, rng = all_layouts(shape, mesh, placements), Random(str(shape))
    if count is None:
        return [Case(shape, source, target) for source, target in product(layouts, layouts)]
    found = [Case(shape, source, ()) for source in layouts] if len(mesh.names) == 2 else []  # in every order of axes
    missing = all_pairs(layouts, mesh).difference(*(pairs(case, mesh) for case in found))
    while missing or len(found) < count:
        drawn = [Case(shape, rng.choice(layouts), rng.choice(layouts)) for _ in range(AT_ONCE)]
        found.append(max(drawn, key=lambda case: len(pairs(case, mesh) & missing)))
        missing -= pairs(found[-1], mesh)
    return found


AT_ONCE = 50
Pair = tuple[tuple[tuple[str, bool], Placement], ...]


def pairs(case: Case, mesh: Mesh) -> set[Pair]:
    """Which placements meet: of one axis before and after, or of two axes."""
    held = [((axis, last), placement_on(layout, axis)) for axis in mesh.names for last, layout in enumerate(
        (case.source, case.target)
    )]
    return set(combinations(held, 2))


def all_pairs(layouts: list[Layout], mesh: Mesh) -> set[Pair]:
    """Of all cases: every two layouts that say something else of an axis, and every one with itself."""
    each = {(axis, placement_on(layout, axis)): layout for layout in layouts for axis in mesh.names}
    cases = [Case((), one, other) for one, other in product(each.values(), each.values())]
    return set().union(*(pairs(case, mesh) for case in (*cases, *(Case((), layout, layout) for layout in layouts))))


def spread(whole: Tensor, layout: Layout, mesh: Mesh, rank: int) -> Tensor:
    """What a rank holds of a value."""
    if not holds(layout, mesh, rank):
        return whole.new_empty(region_shape(region_of(tuple(whole.shape), layout, mesh, rank)))
    part = whole[tuple(slice(*span) for span in region_of(tuple(whole.shape), layout, mesh, rank))].clone()
    for axis, place in mesh.coordinates(rank).items():
        if placement_on(layout, axis) == Partial():
            part *= SHARES[3 - mesh.sizes[axis]][place]
    return part


def recombine(parts: list[Tensor], shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> Tensor:
    """The one value that the ranks hold; copies must be equal."""
    whole = torch.zeros(shape, dtype=torch.float64)
    same = [axis for axis in mesh.names if placement_on(layout, axis) in (Invariant(), Copies())]
    for rank, part in enumerate(parts):
        if not holds(layout, mesh, rank):
            assert part.shape == region_shape(region_of(shape, layout, mesh, rank)) and not part.numel()
            continue
        place = mesh.coordinates(rank)
        first = mesh.rank_at({axis: 0 if axis in same else i for axis, i in place.items()})
        assert torch.equal(part, parts[first]), "copies differ"
        if first == rank:
            whole[tuple(slice(*span) for span in region_of(shape, layout, mesh, rank))] += part
    return whole


def gapped(x: Tensor) -> Tensor:
    """The same numbers with nonsense between them in memory: backends refuse such strides, or send the nonsense."""
    return torch.stack([x, torch.full_like(x, 99)], -1)[..., 0]


Carried = tuple[Tensor, Tensor, int, int]
"""The result, the gradient, and the bytes sent there and back."""


def carry_all(communicator: Communicator, cases: list[Case]) -> list[Carried]:
    mesh, rank = communicator.mesh, communicator.rank
    found: list[Carried] = []
    for case in cases:
        x = gapped(spread(case.whole(0), case.source, mesh, rank)).requires_grad_()
        before = communicator.bytes_sent
        y = carry_reshard(case.shape, case.source, case.target, communicator)(x)
        there = communicator.bytes_sent
        y.backward(gapped(spread(case.whole(1), dual_layout(case.target), mesh, rank)))  # type: ignore[no-untyped-call]
        assert x.grad is not None
        found.append((y.detach().clone(), x.grad, there - before, communicator.bytes_sent - there))
    return found


def check(cases: list[Case], mesh: Mesh, found: list[list[Carried]]) -> None:
    for i, case in enumerate(cases):
        there = reshard(case.shape, case.source, case.target, mesh)
        back = backward_route(there, mesh)
        results, gradients, sent_there, sent_back = zip(*(ranks[i] for ranks in found), strict=True)
        told = f"{case} on {mesh} by\n{there}\nand back by\n{back}"
        got = recombine(list(results), case.shape, case.target, mesh)
        torch.testing.assert_close(got, case.whole(0), rtol=1e-12, atol=1e-12, msg=lambda m, t=told: f"{t}\n{m}")
        got = recombine(list(gradients), case.shape, dual_layout(case.source), mesh)
        torch.testing.assert_close(got, case.whole(1), rtol=1e-12, atol=1e-12, msg=lambda m, t=told: f"{t}\n{m}")
        for route, sent in ((there, sent_there), (back, sent_back)):
            want = [sum(bytes_sent(s, case.shape, 8, mesh, rank) for s in route.steps) for rank in range(mesh.size)]
            assert list(sent) == want, told


THREADED = [
    (line(2), (4, 6), None),
    (line(3), (4, 5), None),
    (line(2, 2), (5, 7), 160),
    (line(2, 2), (8, 4), 140),
    (line(2, 3), (7, 9), 140),
    (line(2, 2, 2), (9, 10), 90),
    (line(2, 2), (), 60),
]


@pytest.mark.parametrize(("mesh", "shape", "count"), THREADED, ids=lambda v: str(v))
def test_reshards_among_threads(mesh: Mesh, shape: tuple[int, ...], count: int | None) -> None:
    cases = cases_on(mesh, shape, count)
    check(cases, mesh, run_ranks(mesh, lambda communicator: carry_all(communicator, cases)))


def test_reshards_among_processes(tmp_path: Path) -> None:
    mesh = line(2, 2)
    cases = Random(0).sample([*cases_on(mesh, (5, 7)), *cases_on(mesh, (8, 4))], 50)
    routes = [reshard(case.shape, case.source, case.target, mesh) for case in cases]
    routes += [backward_route(route, mesh) for route in routes]
    assert {step.kind for route in routes for step in route.steps} == set(StepKind), "every kind of step is tried"
    check(cases, mesh, run_processes(mesh, lambda communicator: carry_all(communicator, cases), tmp_path))


DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.complex64,
)  # fmt: skip


def of_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers that every dtype holds exactly; complex ones with their conjugation still to be done."""
    small = torch.arange(prod(shape)).reshape(shape) % 3 + 4
    return torch.complex(small.float(), small.float() + 1).conj() if dtype.is_complex else small.to(dtype)


def share(whole: Tensor, place: int, dtype: torch.dtype) -> Tensor:
    """One of three parts of a sum; of truth values, of an or."""
    if dtype == torch.bool:
        return whole if place == 1 else torch.zeros_like(whole)
    rest = torch.full(whole.shape, place, dtype=torch.complex64 if dtype.is_complex else torch.int64)
    return (whole.to(rest.dtype) - 3).to(dtype) if place == 0 else rest.to(dtype)


def carry_dtypes(communicator: Communicator) -> int:
    """Every dtype from every kind of layout to whole tensors, and to pieces; even, uneven and without elements."""
    axis, mesh, rank, count = "x", communicator.mesh, communicator.rank, 0
    for dtype, shape in product(DTYPES, ((6, 3), (5, 4), (3, 0))):
        whole = of_dtype(shape, dtype)
        for source, target in product((Partial(), Split(0), At(1)), (Invariant(), Split(0), Split(1), At(0))):
            if source == target or (0 in shape and target == Split(1)):
                continue
            before, after = ((axis, source),), ((axis, target),)
            part = share(whole, rank, dtype) if source == Partial() else spread(whole, before, mesh, rank)
            result = carry_reshard(shape, before, after, communicator)(gapped(part))
            region = region_of(shape, after, mesh, rank)
            wanted = whole[tuple(slice(*s) for s in region)] if holds(after, mesh, rank) else result
            same = torch.equal(result.to(torch.complex128), wanted.to(torch.complex128))
            assert result.dtype == dtype and same, (dtype, shape, source, target)
            count += 1
    return count


def test_every_dtype_travels(tmp_path: Path) -> None:
    mesh = line(3)
    assert run_ranks(mesh, carry_dtypes) == run_processes(mesh, carry_dtypes, tmp_path) == [14 * (11 + 11 + 8)] * 3


def test_a_gradient_read_as_copies_would_be_noticed() -> None:
    """Data parallel with I's dual for B: the gradients of the ranks differ from their sum."""
    mesh = line(2)
    case = Case((4,), (), (("x", Copies()),))
    found = run_ranks(mesh, lambda communicator: carry_all(communicator, [case]))
    parts = [spread(case.whole(1), (("x", Partial()),), mesh, rank) for rank in range(2)]
    assert all(not torch.allclose(part, case.whole(1)) for part in parts)
    assert all(torch.allclose(ranks[0][1], case.whole(1)) for ranks in found)


def halo(communicator: Communicator, have: list[Region], want: list[Region]) -> tuple[Tensor, Tensor]:
    group = communicator.mesh.group(communicator.rank, communicator.mesh.names)
    whole = torch.arange(prod(stop for _, stop in have[-1]), dtype=torch.float64)
    x = whole[slice(*have[communicator.rank][0])].clone().requires_grad_()
    y = carry_move(RegionMove(group, tuple(have), tuple(want)), communicator)(x)
    y.backward(torch.ones_like(y) * (communicator.rank + 1))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return y.detach(), x.grad


def test_what_a_halo_took_gives_its_gradient_back(tmp_path: Path) -> None:
    """Four ranks with three, two, two and two of nine rows; the second wants two rows more on either side."""
    mesh = line(2, 2)
    have: list[Region] = [((0, 3),), ((3, 5),), ((5, 7),), ((7, 9),)]
    want: list[Region] = [((0, 4),), ((1, 7),), ((5, 7),), ((6, 9),)]
    for found in (
        run_ranks(mesh, lambda communicator: halo(communicator, have, want)),
        run_processes(mesh, lambda communicator: halo(communicator, have, want), tmp_path),
    ):
        assert [y.tolist() for y, _ in found] == [[float(i) for i in range(*w[0])] for w in want]
        assert [g.tolist() for _, g in found] == [[1, 3, 3], [3, 2], [5, 9], [4, 4]]


def test_a_reshard_without_gradient_is_a_plain_function() -> None:
    mesh = line(2)

    def program(communicator: Communicator) -> bool:
        move = carry_reshard((4,), (("x", Partial()),), (), communicator)
        with torch.no_grad():
            y = move(torch.ones(4, requires_grad=True))
        return not y.requires_grad and y.tolist() == [2.0] * 4 and not move(torch.ones(4)).requires_grad

    assert run_ranks(mesh, program) == [True, True]
