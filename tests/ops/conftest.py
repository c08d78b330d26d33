"""Settings of the property tests of this room: few examples each, the same in every run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("ops", max_examples=8, deadline=None, derandomize=True, database=None)
