"""From a graph or a plan to what runs: generated code on one device, or this rank's part of a plan."""

from conjoin.runtime.captured import CapturedModule, to_module

__all__ = ["CapturedModule", "to_module"]
