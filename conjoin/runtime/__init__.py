"""From a graph or a plan to what runs: generated code on one device, or this rank's part of a plan."""

from conjoin.runtime.data_loader import Loader, collate_samples
from conjoin.runtime.loading import connect, load
from conjoin.runtime.movement.dealt_edges import RowExchange
from conjoin.runtime.movement.layer_clock import LayerClock, timed_layers
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.pipelines.stage_transfers import Crossing
from conjoin.runtime.program.captured import CapturedModule, to_module
from conjoin.runtime.program.failed_calls import place_of_failure
from conjoin.runtime.program.other_plans import Planner
from conjoin.runtime.ranks.collective_times import (
    Communication,
    Concurrency,
    Timed,
    axis_sets,
    calibrate_collectives,
    measure_communication,
    time_collectives,
)
from conjoin.runtime.ranks.communicator import World
from conjoin.runtime.ranks.joint_action import is_any
from conjoin.runtime.ranks.pace import Pace, communicator_over, join_ranks
from conjoin.runtime.ranks.rank_processes import Site, launch
from conjoin.runtime.ranks.rendezvous import check_world
from conjoin.runtime.ranks.session import Session
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.recording import COMMUNICATING, COMPUTING, Recorded, record
from conjoin.runtime.state.checkpoint import check_target, has_checkpoint, save_checkpoint
from conjoin.runtime.state.checkpoint_loading import load_checkpoint
from conjoin.runtime.state.initialization import check_init
from conjoin.runtime.state.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from conjoin.runtime.state.pieces import Piece, full_state_dict
from conjoin.runtime.state.weight_export import check_weights_target, save_weights
from conjoin.runtime.state.weight_files import find_weights
from conjoin.runtime.state.weights import Weights
from conjoin.runtime.verification.capture_check import AgainstModel, check_capture, copied_for_check
from conjoin.runtime.verification.differences import TOLERANCE, Difference
from conjoin.runtime.verification.plain_model import PlainModel
from conjoin.runtime.verification.plan_check import (
    Case,
    Verdict,
    check_made_for,
    compare_rank,
    compare_with_model,
    train_alone,
    verdict,
    verify_in_process,
)
from conjoin.runtime.verification.steps import Reference

__all__ = [
    "COMMUNICATING", "COMPUTING", "TOLERANCE", "AgainstModel", "CapturedModule", "Case", "Communication", "Concurrency",
    "Crossing", "Difference", "LayerClock", "Loader", "Pace", "ParallelModule", "Piece", "PlainModel", "Planner",
    "Recorded", "Reference", "RowExchange", "Session", "Site", "Timed", "Verdict", "Weights", "World", "axis_sets",
    "calibrate_collectives", "check_capture", "check_init", "check_made_for", "check_target", "check_weights_target",
    "check_world", "collate_samples", "communicator_over", "compare_rank", "compare_with_model", "connect",
    "copied_for_check", "find_weights", "full_state_dict", "has_checkpoint", "is_any", "join_ranks", "launch", "load",
    "load_checkpoint", "load_optimizer_state_dict", "measure_communication", "optimizer_state_dict",
    "place_of_failure", "record",
    "run_ranks", "save_checkpoint", "save_weights", "time_collectives", "timed_layers", "to_module", "train_alone",
    "verdict", "verify_in_process",
]  # fmt: skip
