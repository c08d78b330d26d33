"""Plan, machine, costs → timeline: when everything runs, where the time goes, how much memory is held."""

from conjoin.sim.autograd_keeps import Kept, kept_of
from conjoin.sim.breakdown import Breakdown, break_down
from conjoin.sim.chunk_counts import fastest_chunks, with_fastest_chunks
from conjoin.sim.crossings import Crossing, Crossings, crossing_seconds, streams_seconds, transfer_seconds
from conjoin.sim.engine import COMPUTE, Instruction, Phase, Ticks, Timeline, rerun, run, to_seconds, to_ticks
from conjoin.sim.expected_error import ALIKE, Published, expected_error, published_for
from conjoin.sim.fragments import Drafts
from conjoin.sim.gains import Gain, gain_of
from conjoin.sim.least_step import least_step
from conjoin.sim.memory import kept_tensors, measure_memory
from conjoin.sim.memory_walk import Memory
from conjoin.sim.moves import make_change, random_change
from conjoin.sim.offloads import Offloads, OnHost
from conjoin.sim.pipelines import (
    PipelinePrediction,
    StagePrediction,
    predict_pipeline,
    rescheduled,
    simulate_stage,
    stage_memory,
    stage_spans,
)
from conjoin.sim.prediction import Prediction, predict
from conjoin.sim.prices import OPTIMIZER_COPIES, HostLink, MachinePrices, Prices
from conjoin.sim.program import Change, Program, task_numbers
from conjoin.sim.simulation import Simulation, new_drafts, offloads_of, simulate, simulate_layouts
from conjoin.sim.skeleton import Layouts, Operator, Skeleton, put_together, take_apart, take_graph_apart
from conjoin.sim.stretches import Stretch, rank_stretches, true_runs
from conjoin.sim.symmetry import Classes
from conjoin.sim.wanted import Wanted, measure_wanted, wanted_by

__all__ = [
    "ALIKE", "COMPUTE", "OPTIMIZER_COPIES", "Breakdown", "Change", "Classes", "Crossing", "Crossings", "Drafts", "Gain",
    "HostLink", "Instruction", "Kept", "Layouts", "MachinePrices", "Memory", "Offloads", "OnHost", "Operator", "Phase",
    "PipelinePrediction", "Prediction", "Prices", "Program", "Published", "Simulation", "Skeleton", "StagePrediction",
    "Stretch", "Ticks", "Timeline", "Wanted", "break_down", "crossing_seconds", "expected_error", "fastest_chunks",
    "gain_of", "kept_of", "kept_tensors", "least_step", "make_change", "measure_memory", "measure_wanted", "new_drafts",
    "offloads_of", "predict", "predict_pipeline", "published_for", "put_together", "random_change", "rank_stretches",
    "rerun", "rescheduled", "run", "simulate", "simulate_layouts", "simulate_stage", "stage_memory", "stage_spans",
    "streams_seconds", "take_apart", "take_graph_apart", "task_numbers", "to_seconds", "to_ticks", "transfer_seconds",
    "true_runs", "wanted_by", "with_fastest_chunks",
]  # fmt: skip
