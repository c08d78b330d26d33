"""Before the first collective: do all ranks run the same plan of the same model? Asked through the rendezvous store."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from conjoin.errors import PlanError, RankError

WAIT_SECONDS = 60.0
_LOOK_SECONDS = 1.0
"""Between two looks at ranks that have not come: as often as they report."""
_PAUSE_SECONDS = 0.005


class KeyStore(Protocol):
    """What is used of torch.distributed's rendezvous store."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def add(self, key: str, amount: int, /) -> int: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...

    def check(self, keys: list[str], /) -> bool: ...


def check_world(num_ranks: int, plan_ranks: int, name: str) -> None:
    """Refuse to run a plan on another number of ranks."""
    if num_ranks != plan_ranks:
        raise PlanError(
            f"The plan of {name} is for {plan_ranks} ranks and {num_ranks} are running. Every rank has its own part of "
            f"the work. Start {plan_ranks} ranks (torchrun --nproc-per-node {plan_ranks}), or make a plan for "
            f"{num_ranks}."
        )


def agree(store: KeyStore, what: str, mine: str, rank: int, num_ranks: int, seconds: float = WAIT_SECONDS) -> None:
    """Raise RankError on every rank unless all say the same."""
    said = compare(store, what, mine, rank, num_ranks, seconds)
    others = sorted(rank for rank, text in said.items() if text != said[0])
    if others:
        shown = ", ".join(map(str, others[:8])) + (" …" if len(others) > 8 else "")
        raise RankError(
            f"The ranks do not agree on the {what}: rank {shown} has another than rank 0. They would wait for each "
            f"other or train different models. Give every rank the same {what}."
        )


Look = Callable[[list[int]], None]
"""Asked now and then about ranks that have not come; it raises what is known of them."""


def compare(  # noqa: PLR0913 – who says what to whom, and for how long
    store: KeyStore,
    what: str,
    mine: str,
    rank: int,
    num_ranks: int,
    seconds: float = WAIT_SECONDS,
    look: Look | None = None,
) -> dict[int, str]:
    """What every rank says within some seconds."""
    store.set(f"{what}/{rank}", mine)
    _wait_for_all(store, what, range(num_ranks), f"compare the {what}", seconds, look)
    return {other: store.get(f"{what}/{other}").decode() for other in range(num_ranks)}


def all_connected(store: KeyStore, ranks: Sequence[int], rank: int, seconds: float = WAIT_SECONDS) -> None:
    """Return when each of these ranks has made the process group that this one has made.

    Gloo's ranks connect in pairs: one that is through and ends at once, without any collective, closes connections
    that others are still making, and they fail.
    """
    store.set(f"connected/{rank}", "")
    _wait_for_all(store, "connected", ranks, "connect with the others", seconds)


def _wait_for_all(
    store: KeyStore, what: str, ranks: Sequence[int], purpose: str, seconds: float, look: Look | None = None
) -> None:
    keys = {other: f"{what}/{other}" for other in ranks}
    if not (_wait(store, [*keys.values()], seconds) if look is None else _wait_looking(store, keys, seconds, look)):
        missing = [other for other, key in keys.items() if not store.check([key])]
        raise RankError(
            f"Rank {', '.join(map(str, missing[:8]))} did not come to {purpose} within "
            f"{seconds:g} s. It stopped, or runs another program. See its own error."
        )


def _wait(store: KeyStore, keys: list[str], seconds: float) -> bool:
    """Whether all keys are there in time."""
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def _wait_looking(store: KeyStore, keys: Mapping[int, str], seconds: float, look: Look) -> bool:
    """The same, with a look at those who are missing once in a while."""
    start = looked = time.monotonic()
    while not store.check([*keys.values()]):
        time.sleep(_PAUSE_SECONDS)
        now = time.monotonic()
        if now - looked >= _LOOK_SECONDS:
            looked = now
            look([other for other, key in keys.items() if not store.check([key])])
        if now - start >= seconds:
            return False
    return True


def digest(model: nn.Module) -> str:
    """A quick mark of a model's values: sums and first elements, exact enough to tell two initialisations apart."""
    marks = hashlib.sha256()
    for name, tensor in _tensors(model):
        marks.update(name.encode())
        if tensor.numel():
            wide = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)
            marks.update(repr((wide.sum().item(), wide.reshape(-1)[0].item())).encode())
    return marks.hexdigest()


def share_values(
    store: KeyStore, model: nn.Module, rank: int, num_ranks: int, device: torch.device, seconds: float = WAIT_SECONDS
) -> None:
    """Ranks that initialised their models differently all take the values of rank 0, as in DistributedDataParallel."""
    if len(set(compare(store, "values", digest(model), rank, num_ranks, seconds).values())) == 1:
        return
    for _, tensor in _tensors(model):
        moved = tensor.detach().to(device).contiguous()
        dist.broadcast(moved, 0)
        with torch.no_grad():
            tensor.copy_(moved)


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def draw_alike(store: KeyStore, rank: int, num_ranks: int) -> None:
    """Ranks whose generators are in different states all take the state of rank 0's."""
    said = compare(store, "random state", torch.get_rng_state().numpy().tobytes().hex(), rank, num_ranks)
    if len(set(said.values())) > 1:
        torch.set_rng_state(torch.frombuffer(bytearray.fromhex(said[0]), dtype=torch.uint8))
