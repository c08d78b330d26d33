"""What carries tensors between ranks, as the rest of the runtime sees it: collectives of groups, and single messages.

Process groups of torch.distributed (`process_groups.py`, `channels.py`) and threads of one process that play ranks
(`threads.py`) speak the same four collectives over a set of mesh axes, flat tensors in and out, so that a rank's
program is the same in training and in a check without a cluster. Members of a group stand in the order of their ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from conjoin.errors import RankError, UsageError
from conjoin.machine import Mesh
from conjoin.runtime.ranks.progress import Passage
from conjoin.runtime.torch_private import compiler_follows, leave_uncompiled

F = TypeVar("F", bound=Callable[..., Any])


def uncompiled(function: F) -> F:
    """Keep `torch.compile` out of what talks to other ranks: it compiles what stands before and after.

    The switch loads the compiler, which eager runs do without, and takes a while in every call. So the compiler is told
    to leave this alone, where it meets the call and where it would go on with what is called.
    """
    switched: list[F] = []

    @leave_uncompiled
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiler_follows():
            return function(*args, **kwargs)
        if not switched:
            switched.append(torch.compiler.disable(function))  # type: ignore[no-untyped-call]
        return switched[0](*args, **kwargs)

    return cast(F, call)


Axes = tuple[str, ...]
"""Axis names in the order of the mesh."""
Sizes = tuple[Sequence[int], Sequence[int]]
"""How many elements come from each member of a group, and how many go to each."""


Messages = Sequence[tuple[int, Tensor]]
"""Flat tensors, each with the rank at its other end."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return when its result may be read."""


class Communicator(Protocol):
    """The collectives of one rank; each returns at once, the result is there after `wait`."""

    mesh: Mesh
    rank: int
    bytes_sent: int
    """Payload that left this rank so far, counted for the algorithm each collective is known to use."""
    num_started: int
    """How many collectives this rank has started so far."""

    @property
    def device(self) -> torch.device:
        """Where tensors lie that it carries, unless the caller knows better."""

    def prepare(self, axes: Axes) -> None:
        """Make ready to communicate over these axes; all ranks prepare the same sets of axes in the same order."""

    def compare(self, text: str) -> Sequence[str]:
        """What every rank says, asked outside of all collectives; all ranks ask."""

    def all_reduce(self, tensor: Tensor, axes: Axes, largest: bool = False) -> Work:
        """Sum (or take the largest) over the group, in place."""

    def all_gather(self, output: Tensor, tensor: Tensor, axes: Axes) -> Work:
        """Everyone's flat tensor, one after the other."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, axes: Axes) -> Work:
        """The sum over the group of the part of a flat tensor that belongs to this rank."""

    def all_to_all(self, output: Tensor, tensor: Tensor, sizes: Sizes, axes: Axes) -> Work:
        """Parts of a flat tensor to everyone, parts from everyone; sizes received, then sizes sent."""


class Parcel(Protocol):
    """Messages under way."""

    def wait(self, count: int | None = None) -> object:
        """Return when they are over; of those that are received, then those that are sent, the first ones at least."""


class Channel(Protocol):
    """Single messages between some ranks; those from one rank to another come in the order they were sent."""

    bytes_sent: int
    are_apart: bool
    """Whether messages are over one by one, in any order; else those that start together are, before later ones."""

    def start(self, sends: Messages, receives: Messages) -> Parcel:
        """Start to send and to receive; both are over after `wait`."""


class World(Communicator, Protocol):
    """The communicator of all ranks, from which those of some are made."""

    def among(self, mesh: Mesh, ranks: tuple[int, ...]) -> Communicator:
        """This rank on a mesh of some of the ranks, which all make it."""

    def prepare_channels(self) -> None:
        """Make ready for channels; all ranks do."""

    def channel(self, name: str, ranks: tuple[int, ...]) -> Channel:
        """A channel of some ranks, which all make it in the same order."""

    def to_sum(self, tensor: Tensor, last: int) -> Work:
        """Get ready to sum a few numbers over all ranks, in place, when all wait for it; one of them is expected to
        come last. What is summed is what they are by then."""

    @property
    def can_break_off(self) -> bool:
        """Whether this rank can leave what is under way among some of the ranks, and go on later."""

    def break_off(self) -> None:
        """Leave what is under way in channels and among ranks of other meshes; who waits there for this rank is told
        by a `BrokenOff`, also when it comes later. What all ranks do together goes on."""

    def renew(self) -> None:
        """After some have broken off, connect anew; all ranks do."""

    def fail(self, error: BaseException) -> None:
        """Where it cannot break off: have those end who wait for this rank."""


class Done:
    """A collective that is over already."""

    def wait(self) -> None:
        return None


def closed(wanted: str = "send each other tensors") -> UsageError:
    """What is said where ranks were to do something together after their session was closed."""
    return UsageError(
        f"Ranks were to {wanted} after their session was closed. They are not connected any more. Open another session "
        f"and load the plan there."
    )


class Guard(Protocol):
    """Who notes what this rank enters and waits for, and knows who holds it up."""

    def enter(self, members: tuple[int, ...], may_break: bool = False) -> Passage: ...

    def begin_waiting(self, passage: Passage) -> None: ...

    def end_waiting(self, passage: Passage) -> None: ...

    def explain(self, error: BaseException, passage: Passage) -> RankError: ...


class Session(Protocol):
    """Who makes process groups, and watches over what is done in them."""

    device: torch.device
    patience_seconds: float

    @property
    def guard(self) -> Guard: ...

    def look_for(self, ranks: list[int], groups: Sequence[tuple[int, ...]]) -> None: ...

    def group(self, ranks: tuple[int, ...], name: str = "") -> dist.ProcessGroup: ...

    def started(
        self, ranks: tuple[int, ...], start: Callable[[], Work | None], may_break: bool = False
    ) -> Work | None: ...

    def break_off(self) -> None: ...

    def renew(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...
