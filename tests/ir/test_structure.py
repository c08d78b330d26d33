"""The nesting of inputs and outputs, as data."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings

from conjoin.ir import LEAF, Structure
from conjoin.ir.structure import structure_from_json, structure_to_json
from tests.ir.graphs import STRUCTURES


@given(STRUCTURES)
@settings(settings.get_profile("ir"))
def test_structures_round_trip(structure: Structure) -> None:
    assert structure_from_json(json.loads(json.dumps(structure_to_json(structure)))) == structure
    assert len(list(structure.paths())) == structure.num_leaves


def test_paths_name_the_way_to_every_leaf() -> None:
    inner = Structure("tuple", (), (LEAF, LEAF))
    assert list(Structure("dict", ("a", 7), (inner, LEAF)).paths()) == [("a", 0), ("a", 1), (7,)]
    assert list(LEAF.paths()) == [()]


def _deep(levels: int) -> Any:
    return None if levels == 0 else {"kind": "list", "keys": [], "children": [_deep(levels - 1)]}


@pytest.mark.parametrize(
    "data",
    [
        3,
        [],
        {"kind": "leaf", "keys": [], "children": []},
        {"kind": "tuple", "keys": []},
        {"kind": "tuple", "keys": [], "children": [], "more": 1},
        {"kind": "dict", "keys": ["a"], "children": []},
        {"kind": "dict", "keys": [1.5], "children": [None]},
        {"kind": "dict", "keys": [10**5000], "children": [None]},
        {"kind": "dict", "keys": [2**63], "children": [None]},
        {"kind": "set", "keys": [], "children": []},
        _deep(34),
    ],
    ids=range(11),
)
def test_other_data_is_refused(data: Any) -> None:
    with pytest.raises(ValueError):
        structure_from_json(data)


def test_thirty_two_levels_are_enough() -> None:
    assert structure_from_json(_deep(32)).num_leaves == 1
