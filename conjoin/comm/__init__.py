"""How a reshard is carried out: the choice of collectives, what each rank sends, and how many bytes that is."""

from conjoin.comm.bundling import BundleKind, Entry, ParameterBundle, find_bundles
from conjoin.comm.movement import Movement, move_regions, movement
from conjoin.comm.route import Route, Step, StepKind, backward_route, dual_layout, reshard
from conjoin.comm.volume import bytes_sent, route_bytes, total_bytes

__all__ = [
    "BundleKind", "Entry", "Movement", "ParameterBundle", "Route", "Step", "StepKind", "backward_route", "bytes_sent",
    "dual_layout", "find_bundles", "move_regions", "movement", "reshard", "route_bytes", "total_bytes",
]  # fmt: skip
