"""The mesh: ranks and coordinates are two names of the same place, groups cover every rank once."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conjoin.machine import Axis, Mesh, prime_factors

PROFILE = settings.get_profile("machine")
MESHES = st.builds(Mesh.of_nodes, st.integers(1, 24), st.integers(1, 24))


@st.composite
def meshes_with_axes(draw: st.DrawFn) -> tuple[Mesh, tuple[str, ...]]:
    """A mesh and some of its axes, in any order."""
    mesh = draw(MESHES)
    names = draw(st.permutations(mesh.names))
    return mesh, tuple(names[: draw(st.integers(0, len(names)))])


@given(st.integers(1, 10_000))
@settings(PROFILE)
def test_prime_factors_multiply_to_the_number(number: int) -> None:
    factors = prime_factors(number)
    assert prod(factors) == number and list(factors) == sorted(factors)
    assert all(factor % divisor for factor in factors for divisor in range(2, factor) if divisor * divisor <= factor)


def test_axes_between_nodes_come_first() -> None:
    mesh = Mesh.of_nodes(6, 4)
    assert mesh.axes == (Axis("n0", 2, True), Axis("n1", 3, True), Axis("d0", 2), Axis("d1", 2))
    assert mesh.size == 24 and mesh.sizes == {"n0": 2, "n1": 3, "d0": 2, "d1": 2}
    assert mesh.in_order(["d1", "n1"]) == ("n1", "d1")


def test_one_device_has_no_axes() -> None:
    mesh = Mesh.of_nodes(1, 1)
    assert (mesh.axes, mesh.size, mesh.coordinates(0), mesh.rank_at({})) == ((), 1, {}, 0)
    assert mesh.groups(()) == ((0,),) and str(mesh) == ""


@given(MESHES)
@settings(PROFILE)
def test_coordinates_and_ranks_round_trip(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank_at(place) for place in places] == list(range(mesh.size))
    assert all(0 <= place[axis.name] < axis.size for place in places for axis in mesh.axes)
    # The last axis runs fastest: ranks in order are coordinates in order.
    assert [tuple(place.values()) for place in places] == sorted(tuple(place.values()) for place in places)


@given(meshes_with_axes())
@settings(PROFILE, deadline=None)  # large meshes take seconds where a host is busy
def test_groups_cover_every_rank_once(case: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    groups = mesh.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
    for group in groups:
        assert len(group) == prod(mesh.sizes[name] for name in axes)
        assert all(mesh.group(rank, axes) == group for rank in group)


@given(meshes_with_axes())
@settings(PROFILE)
def test_a_group_differs_along_its_axes_only(case: tuple[Mesh, tuple[str, ...]]) -> None:
    mesh, axes = case
    for group in mesh.groups(axes):
        places = [mesh.coordinates(rank) for rank in group]
        rest = [{name: at for name, at in place.items() if name not in axes} for place in places]
        assert all(other == rest[0] for other in rest)
        # The last axis given runs fastest.
        along = [tuple(place[name] for name in axes) for place in places]
        assert along == sorted(along)


@pytest.mark.parametrize(
    ("axes", "group"), [(("n0", "d1"), (0, 1, 2, 6, 7, 8)), (("d1", "n0"), (0, 6, 1, 7, 2, 8)), ((), (7,))]
)
def test_groups_by_eye(axes: tuple[str, ...], group: tuple[int, ...]) -> None:
    assert Mesh.of_nodes(2, 6).group(7, axes) == group
