"""What all ranks do together: whatever fails on one fails on all, with the same message, so that none waits for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from conjoin.errors import CheckpointError, ConjoinError, RankError
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.session import waiting_for_all

T = TypeVar("T")


def place() -> tuple[int, int]:
    """This process's rank and how many there are; one alone when torch.distributed is not set up."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def exchange(value: T) -> list[T]:
    """What every rank has, in the order of ranks."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    with waiting_for_all():
        dist.all_gather_object(found, value)
    return found


def meet(communicator: Communicator, what: str) -> None:
    """Return when all ranks have come to do the same; RankError on every rank where they have not.

    Outside of all collectives: those of one that saves would be mixed up with those of a step that another takes.
    """
    if communicator.mesh.size == 1:
        return
    told = [json.loads(text)[0] for text in communicator.compare(json.dumps([what, ""]))]
    other = next((rank for rank, each in enumerate(told) if each != told[0]), None)
    if other is not None:
        raise RankError(
            f"Rank 0 came to {told[0]}, and rank {other} to {told[other]}. All ranks have part in either, and would "
            f"wait for each other for ever. Call the same on every rank, in the same order."
        )


def is_any(mine: bool, device: torch.device) -> bool:
    """Whether it is so on any rank, by one small collective."""
    if not dist.is_initialized():
        return mine
    flag = torch.tensor(int(mine), dtype=torch.int32, device=device)
    with waiting_for_all():
        dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def together(action: Callable[[], T]) -> T:
    """Do something on every rank; the result when it went well on all.

    What ends a program, as Ctrl-C does, stays what it is on the rank that it came to.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    result: T | None = None
    error: BaseException | None = None
    try:
        result = action()
    except (Exception, CheckpointException) as caught:  # torch's own is not an Exception
        error = caught
    messages = [message for message in exchange(None if error is None else _message(error)) if message is not None]
    end = _failures(error).get(place()[0])
    if end is not None and not isinstance(end, Exception):
        raise end from None
    if error is not None and not isinstance(error, ConjoinError | OSError | CheckpointException):
        raise error
    if messages:
        raise CheckpointError(messages[0]) from None
    return result  # type: ignore[return-value]  # it is there when there is no message


def _message(error: BaseException) -> str:
    if isinstance(error, ConjoinError):
        return str(error)
    rank, reason = next(iter(_failures(error).items()), (place()[0], error))
    if not isinstance(reason, Exception):
        return (
            f"A checkpoint was being written or read. Rank {rank} was told to end meanwhile ({type(reason).__name__}). "
            f"An earlier checkpoint is as it was: start again from it."
        )
    told = str(reason)[:300]
    if "inline_container" in told:  # torch's file format says so little of a full disk
        told = "a file ends too early, as on a disk that is full"
    return (
        f"A checkpoint could not be written or read: {told}. An earlier checkpoint is as it was. Look at "
        f"the file system that holds it."
    )


def _failures(error: BaseException | None) -> dict[int, BaseException]:
    """What went wrong on which rank, as torch's own error tells it."""
    return {rank: failure[0] for rank, failure in getattr(error, "failures", {}).items()}
