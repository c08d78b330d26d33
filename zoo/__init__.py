"""The papers' models in plain torch, with synthetic data; nothing here knows that conjoin exists."""

from zoo.catalog import build, names, sizes
from zoo.workload import Batch, Entry, Workload

__all__ = ["Batch", "Entry", "Workload", "build", "names", "sizes"]
