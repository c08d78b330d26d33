"""How long tests wait for what they start before they say that it hangs."""

HUNG_SECONDS = 600
"""Shared machines stand still for a minute at times: a shorter limit says something about them, not about the test."""
