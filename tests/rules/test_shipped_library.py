"""The library that ships: rules are proven again, and survive trials.

`conjoin rules prove` proves all of them again; making the library tries each out a hundred times.
"""

from __future__ import annotations

import pytest

from conjoin.rules import Entry, Library, prove, try_out

ENTRIES = Library.shipped().entries


@pytest.mark.parametrize("entry", ENTRIES[::2], ids=lambda entry: entry.name)
def test_it_is_proven_with_its_conditions(entry: Entry) -> None:
    found = prove(entry.rule)
    assert found.proven and found.conditions == entry.conditions


@pytest.mark.parametrize("entry", ENTRIES[::7], ids=lambda entry: entry.name)
def test_it_survives_trials(entry: Entry) -> None:
    trials = try_out(entry.rule, 20, when=entry.conditions)
    assert trials.num_run >= 20 and trials.counterexample is None
