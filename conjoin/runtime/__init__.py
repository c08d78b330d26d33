"""From a graph or a plan to what runs: generated code on one device, or this rank's part of a plan."""

from conjoin.runtime.captured import CapturedModule, to_module
from conjoin.runtime.checking import (
    TOLERANCE,
    Case,
    Difference,
    Verdict,
    check_made_for,
    compare_rank,
    train_alone,
    verdict,
    verify_in_process,
)
from conjoin.runtime.launching import launch
from conjoin.runtime.loading import connect, load
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.threads import run_ranks

__all__ = [
    "TOLERANCE", "CapturedModule", "Case", "Difference", "ParallelModule", "Verdict", "check_made_for",
    "compare_rank", "connect", "launch", "load", "run_ranks", "to_module", "train_alone", "verdict",
    "verify_in_process",
]  # fmt: skip
