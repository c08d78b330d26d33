"""Machines that a program registers by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from conjoin.errors import UsageError
from conjoin.machine import Machine, parse_machine, register_machine, registered_names
from conjoin.machine.presets import OWN
from tests.ir.wording import assert_three_sentences

OFFICE = replace(Machine.preset("dgx-h100", 2), name="office")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    OWN.pop("office", None)


def test_a_registered_machine_is_found_by_its_name() -> None:
    assert register_machine(OFFICE) is OFFICE and "office" in registered_names()
    assert parse_machine("office") is OFFICE
    assert parse_machine("office:4").fingerprint() == OFFICE.with_nodes(4).fingerprint()
    assert parse_machine("office:1x4").num_devices == 4
    with pytest.raises(UsageError, match="Did you mean office"):
        parse_machine("offise")


@pytest.mark.parametrize("name", ["dgx-h100", "local", "a:2", "my/office", "office.toml"])
def test_a_name_that_could_not_be_asked_for(name: str) -> None:
    with pytest.raises(UsageError, match="could not be asked for by that name") as told:
        register_machine(replace(OFFICE, name=name))
    assert_three_sentences(told.value)


def test_what_is_no_machine() -> None:
    machine: Any = "dgx-h100"
    with pytest.raises(UsageError, match="A str was given") as told:
        register_machine(machine)
    assert_three_sentences(told.value)
