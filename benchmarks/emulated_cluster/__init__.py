"""A cluster emulated on one Linux host, to check predicted step times against measured ones."""

from benchmarks.emulated_cluster.cluster import Cluster
from benchmarks.emulated_cluster.switch import Link, Traffic

__all__ = ["Cluster", "Link", "Traffic"]
