"""From a graph or a plan to what runs: generated code on one device, or this rank's part of a plan."""

from conjoin.runtime.captured import CapturedModule, to_module
from conjoin.runtime.checking import (
    TOLERANCE,
    Case,
    Difference,
    Reference,
    Verdict,
    check_made_for,
    compare_rank,
    train_alone,
    verdict,
    verify_in_process,
)
from conjoin.runtime.checkpoint import save_checkpoint
from conjoin.runtime.checkpoint_loading import load_checkpoint
from conjoin.runtime.launching import launch
from conjoin.runtime.loading import connect, load
from conjoin.runtime.optimizer_state import load_optimizer_state_dict, optimizer_state_dict
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.pieces import Piece, full_state_dict
from conjoin.runtime.threads import run_ranks

__all__ = [
    "TOLERANCE", "CapturedModule", "Case", "Difference", "ParallelModule", "Piece", "Reference", "Verdict",
    "check_made_for", "compare_rank", "connect", "full_state_dict", "launch", "load", "load_checkpoint",
    "load_optimizer_state_dict", "optimizer_state_dict", "run_ranks", "save_checkpoint", "to_module", "train_alone",
    "verdict", "verify_in_process",
]  # fmt: skip
