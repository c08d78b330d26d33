"""The machine itself: its derived facts, its fingerprint, and what it refuses to be."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from conjoin.errors import UsageError
from conjoin.machine import Machine, Mesh
from tests.ir.wording import assert_three_sentences

MACHINE = Machine("office", num_nodes=2, devices_per_node=6, device="cuda")


def test_derived_facts() -> None:
    assert MACHINE.num_devices == MACHINE.mesh.size == 12
    assert MACHINE.mesh == Mesh.of_nodes(2, 6)
    assert MACHINE.backend == "nccl" and replace(MACHINE, device="cpu").backend == "gloo"
    assert str(Machine("one", 1, 1, "cpu")) == "one: 1 node × 1 cpu"


def test_it_is_frozen_and_hashable() -> None:
    with pytest.raises(FrozenInstanceError):
        MACHINE.num_nodes = 3  # type: ignore[misc]
    assert len({MACHINE, replace(MACHINE)}) == 1


def test_the_fingerprint_sees_what_matters() -> None:
    seen: list[dict[str, Any]] = [{"num_nodes": 3}, {"devices_per_node": 3}, {"device": "cpu"}]
    speeds = Machine.preset("summit", nodes=2)
    unseen: list[dict[str, Any]] = [{"name": "other"}, {"description": "other"}, {"nodes": speeds.nodes}]
    ours = MACHINE.fingerprint()
    assert ours == "machine-v1:a5cc8a3c5adf195a986bd105e6f60bf355c3aeeb49ecbb5832cdedd2fb40d7f9"
    assert len({ours, *(replace(MACHINE, **change).fingerprint() for change in seen)}) == 4
    assert {replace(MACHINE, **change).fingerprint() for change in unseen} == {ours}
    assert replace(MACHINE, num_nodes=6, devices_per_node=2).fingerprint() != ours


@pytest.mark.parametrize(
    ("change", "pieces"),
    [
        ({"num_nodes": 0}, ["num_nodes is 0", "whole number from 1 to 1,048,576", "Change num_nodes"]),
        ({"num_nodes": -4}, ["num_nodes is -4"]),
        ({"num_nodes": True}, ["num_nodes is true"]),
        ({"num_nodes": 2.0}, ["num_nodes is of type float"]),
        ({"num_nodes": 2**20 + 1}, ["num_nodes is 1048577"]),
        ({"num_nodes": 16**5000}, ["num_nodes is a number of more than 15 digits"]),
        ({"devices_per_node": "4"}, ["devices_per_node is '4'"]),
        ({"devices_per_node": None}, ["devices_per_node is of type NoneType"]),
        ({"num_nodes": 2**11, "devices_per_node": 2**10}, ["2,048 nodes of 1,024 devices", "2,097,152 devices"]),
        ({"device": "coda"}, ["device is 'coda'", "Known kinds are cpu, cuda", "Did you mean cuda?"]),
        ({"device": "CUDA"}, ["Did you mean cuda?"]),
        ({"device": "tpu-v4"}, ["Use one of cpu, cuda."]),
        ({"device": ["cpu"]}, ["device is of type list", "in quotes"]),
        ({"name": ""}, ["name is ''", "1 to 100 printable characters"]),
        ({"name": "  "}, ["name is '  '"]),
        ({"name": "a\nb"}, ["name is 'a\\nb'"]),
        ({"name": "\udc80"}, ["name is '\\udc80'"]),
        ({"name": "x" * 101}, ["(101 characters)"]),
        ({"name": 4}, ["name is 4"]),
        ({"description": "x" * 1001}, ["description is 'xxx", "at most 1,000 printable characters"]),
        ({"description": "\x1b[2J"}, ["description is '\\x1b[2J'"]),
        ({"description": {}}, ["description is of type dict"]),
    ],
)
def test_what_no_machine_is(change: dict[str, Any], pieces: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        replace(MACHINE, **change)
    assert_three_sentences(caught.value)
    assert [piece for piece in pieces if piece not in str(caught.value)] == []


def test_the_largest_machine() -> None:
    machine = Machine("x" * 100, 2**10, 2**10, "cpu", "y" * 1000)
    assert machine.num_devices == 2**20
    assert len(machine.mesh.axes) == 20
