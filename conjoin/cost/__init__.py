"""Seconds of an operator on a device and of a collective on a machine, always with their source."""

from conjoin.cost.communication import collective_seconds, point_to_point_seconds
from conjoin.cost.device_costs import OperatorCost
from conjoin.cost.kernels import ATTENTION, HALVES, MASK, fuses_attention
from conjoin.cost.keys import read_key, write_key
from conjoin.cost.local_calls import LocalCall, local_calls
from conjoin.cost.measurement import Absence, Measurement, Outcome, mean_outcomes
from conjoin.cost.medians import Fit, fit_efficiencies
from conjoin.cost.model import CostModel
from conjoin.cost.nccl import Way, nccl_ways
from conjoin.cost.pair_links import PairLinks
from conjoin.cost.patterns import Groups
from conjoin.cost.profile import Profile, load_profile, save_profile, shipped_profiles
from conjoin.cost.roofline import rate_name
from conjoin.cost.seconds import NO_SECONDS, Seconds, Source, weakest
from conjoin.cost.store import MeasurementStore
from conjoin.cost.timed_calls import measure
from conjoin.cost.transfers import OPTIMIZERS, copy_key, measure_copy, measure_update, update_key
from conjoin.cost.work import FAMILIES, CallWork, Work, is_product, work_of

__all__ = [
    "ATTENTION", "FAMILIES", "HALVES", "MASK", "NO_SECONDS", "OPTIMIZERS", "Absence", "CallWork", "CostModel", "Fit",
    "Groups", "LocalCall", "Measurement", "MeasurementStore", "OperatorCost", "Outcome", "PairLinks", "Profile",
    "Seconds", "Source", "Way", "Work", "collective_seconds", "copy_key", "fit_efficiencies", "fuses_attention",
    "is_product", "load_profile", "local_calls", "mean_outcomes", "measure", "measure_copy", "measure_update",
    "nccl_ways", "point_to_point_seconds", "rate_name", "read_key", "save_profile", "shipped_profiles", "update_key",
    "weakest", "work_of", "write_key",
]  # fmt: skip
