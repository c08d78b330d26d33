"""Settings of the property tests of this room: the same examples in every run, and none that takes minutes."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ir",
    max_examples=50,
    deadline=timedelta(seconds=60),  # far above what any example takes on a busy host, far below a reader that hangs
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
