"""The trainer behind `run`."""
