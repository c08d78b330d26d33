"""Pipeline schedules as data: tables of rows, the functions that make them, the checker and the player."""

from conjoin.schedules.check import Peaks, check, peaks
from conjoin.schedules.files import dump_schedule, load_schedule, read_rows
from conjoin.schedules.find import FoundSchedule, find_schedule, least_weight_delay
from conjoin.schedules.greedy import Taste, greedy, zero_bubble, zero_bubble_v
from conjoin.schedules.makers import (
    breadth_first,
    eager_one_f_one_b,
    gpipe,
    interleaved,
    one_f_one_b,
    there_and_back,
    with_late_weights,
)
from conjoin.schedules.play import Timeline, play
from conjoin.schedules.schedule import Edge, Kind, Row, Schedule, chain, looped, one_each, v_shaped
from conjoin.schedules.times import Memory, Problem, SharedLinks, Times
from conjoin.schedules.transfers import with_transfers

__all__ = [
    "Edge", "FoundSchedule", "Kind", "Memory", "Peaks", "Problem", "Row", "Schedule", "SharedLinks", "Taste",
    "Timeline", "Times", "breadth_first", "chain", "check", "dump_schedule", "eager_one_f_one_b", "find_schedule",
    "gpipe", "greedy", "interleaved", "least_weight_delay", "load_schedule", "looped", "one_each", "one_f_one_b",
    "peaks", "play", "read_rows", "there_and_back", "v_shaped", "with_late_weights", "with_transfers",
    "zero_bubble", "zero_bubble_v",
]  # fmt: skip
