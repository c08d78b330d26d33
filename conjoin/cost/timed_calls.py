"""Measure a call on this host's CPU or CUDA device: median seconds of its forward and of its backward.

A block of a few calls is timed at a time: several for small ones, so that what a single `autograd.grad` costs to start
is shared as it is in the backward pass of a whole model. Calls of a block read different operands, where these are
small, so that caches are no warmer than in training.

On a CUDA device two clocks run. The device's, by events: the queue is filled with other work first, so that the block
is enqueued before the device gets to it and no launch shows. The host's: how long enqueuing takes.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, quantiles

import torch

from conjoin.cost.clocks import Barrier, Block, CpuClock, CudaClock, Slowest, Times
from conjoin.cost.keys import write_key
from conjoin.cost.measurement import MAX_REASON_LENGTH, Absence, Measurement, Outcome
from conjoin.cost.real_calls import bind_run, make_operands
from conjoin.cost.work import CallWork, work_of
from conjoin.ops import Call

DEFAULT_SECONDS = 0.2
_MIN_REPEATS, _MAX_REPEATS = 5, 200
_BARRIER_REPEATS = 5
"""With a barrier the number of repeats must be known beforehand: ranks that count differently wait for ever."""
_TOGETHER_SECONDS = 0.06
"""Many times the milliseconds by which ranks leave a barrier apart and in which a host lets them take turns: a call
that fits into one turn would else seem to have a core for itself."""
_MAX_ROUNDS = 100
_STEADY = 0.03
"""Quartiles this near to each other, relative to the median, and measuring ends early."""
MAX_BLOCK = 16
_BLOCK_BYTES = {"cpu": 2**22, "cuda": 2**32}
_BLOCK_FLOPS = {"cpu": 1e8, "cuda": 1e12}
"""What a block of several calls may move and compute: a few milliseconds."""
_CACHED_BYTES = 2**33
"""What the allocator may keep between measurements: giving memory back takes longer than most measurements."""
_ROTATED_BYTES = 2**26
"""As much as the last level of cache holds, in orders of magnitude."""


def measure(
    call: Call,
    needs: tuple[int, ...],
    device: str | torch.device,
    *,
    seconds: float = DEFAULT_SECONDS,
    barrier: Barrier | None = None,
    slowest: Slowest | None = None,
) -> Outcome:
    """The seconds of a call on local tensors whose operands at `needs` get a gradient, or why there are none.

    Takes about as long as `seconds` says, and for slow calls as long as a few repeats take. A `barrier` is called
    before each timed block, so that ranks that all measure the same call do so at the same time, and of each block the
    time of the `slowest` rank counts: where ranks share cores some of them run first, and all wait for the last. On the
    CPU such a block is run many times over. The caller's random state is left as it is.

    >>> from conjoin.ops import TensorType
    >>> x = TensorType((4, 4), torch.float32)
    >>> measure(Call("mm", (x, x)), (0, 1), "cpu", seconds=0.01).forward > 0
    True
    """
    place = torch.device(device)
    key = write_key(call, needs)
    work = work_of(call, needs)
    try:
        _check_memory(call, work, place)
        with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []), torch.enable_grad(), _quietly():
            block = _prepare(call, needs, work, place)
            clock = CudaClock(block, place) if place.type == "cuda" else CpuClock(block)
            return _repeat(key, clock, seconds, barrier, slowest)
    except (RuntimeError, ValueError, TypeError, LookupError, NotImplementedError, AssertionError) as error:
        return Absence(key, _reason(error))
    finally:
        if place.type == "cuda" and torch.cuda.memory_reserved(place) > _CACHED_BYTES:
            torch.cuda.empty_cache()


@contextmanager
def _quietly() -> Iterator[None]:
    """Torch may warn that a slow kernel stands in for one that this processor lacks; its time is what is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _reason(error: BaseException) -> str:
    first = str(error).strip().splitlines() or [""]
    line = "".join(letter for letter in first[0] if letter.isprintable())
    return f"{type(error).__name__}: {line}"[:MAX_REASON_LENGTH]


def _check_memory(call: Call, work: CallWork, device: torch.device) -> None:
    """Refuse what would not fit, before the operating system kills the process for it."""
    needed = sum(t.bytes for t in call.tensors) + 2 * max(work.forward.bytes, work.backward.bytes)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _free_host_bytes()
    if needed > 0.8 * free:
        raise MemoryTooSmall(f"about {needed / 2**30:.1f} GiB are needed and {free / 2**30:.1f} GiB are free")


class MemoryTooSmall(RuntimeError):
    """A call that would not fit the memory that is free."""


def _free_host_bytes() -> float:
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            found = [line for line in file if line.startswith("MemAvailable:")]
        return float(found[0].split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        return float(2**32)  # where the system does not say: what any host has


def _prepare(call: Call, needs: tuple[int, ...], work: CallWork, device: torch.device) -> Block:
    size = block_size(call, work, device.type)
    operand_bytes = sum(tensor.bytes for tensor in call.tensors)
    num_sets = min(size, max(1, _ROTATED_BYTES // max(operand_bytes, 1)))
    generator = torch.Generator(device).manual_seed(0)
    sets = [make_operands(call, device, generator) for _ in range(num_sets)]
    runs, wanted = [], []
    for i in range(size):
        # Leaves of its own for each call, over shared memory: gradients of different calls are not added up.
        operands = [tensor.detach() for tensor in sets[i % num_sets]]
        leaves = [
            operands[k].requires_grad_() for k in needs if operands[k].is_floating_point() or operands[k].is_complex()
        ]
        wanted += leaves
        runs.append(bind_run(call, operands, device))
    return Block(runs, wanted)


def block_size(call: Call, work: CallWork, kind: str) -> int:
    """The same on every rank: it depends on the call alone."""
    moved = sum(t.bytes for t in call.tensors) + work.forward.bytes + work.backward.bytes
    by_bytes = _BLOCK_BYTES[kind] / max(moved, 1)
    by_flops = _BLOCK_FLOPS[kind] / max(work.forward.flops, 1)
    return max(1, min(MAX_BLOCK, int(by_bytes), int(by_flops)))


def _repeat(
    key: str, clock: CpuClock | CudaClock, seconds: float, barrier: Barrier | None, slowest: Slowest | None
) -> Measurement:
    times: list[Times] = []
    if slowest is not None and isinstance(clock, CpuClock):
        clock.num_rounds = _rounds_together(clock, slowest)
    with _steady_collector():
        end = time.perf_counter() + seconds
        while not _enough(times, time.perf_counter() > end, barrier is not None):
            found = clock.time(barrier or _no_barrier)
            times.append(found if slowest is None else Times(*slowest(found.forward, found.backward)))
    forward, backward = median(t.forward for t in times), median(t.backward for t in times)
    host = clock.host
    return Measurement(key, forward, backward, host.forward, host.backward, _spread([t.forward for t in times]))


def _rounds_together(clock: CpuClock, slowest: Slowest) -> int:
    """How many rounds make the time long in which all ranks compute; the same on every rank.

    Ranks leave a barrier one after the other. Where they share cores, who is first has a core for itself until the
    others come: for a short call alone that would be all of its time.
    """
    begin = time.perf_counter()
    clock.warm_up()
    seconds = slowest(time.perf_counter() - begin)[0]
    return max(1, min(_MAX_ROUNDS, round(_TOGETHER_SECONDS / max(seconds, 1e-6))))


def _enough(times: list[Times], late: bool, counted: bool) -> bool:
    if counted:
        return len(times) >= _BARRIER_REPEATS
    if len(times) < _MIN_REPEATS:
        return late and len(times) >= 2
    return (
        late
        or len(times) >= _MAX_REPEATS
        or (_spread([t.forward for t in times]) < _STEADY and _spread([t.backward for t in times]) < _STEADY)
    )


def _spread(values: list[float]) -> float:
    low, middle, high = quantiles(values, n=4)
    return (high - low) / middle if middle > 0 else 0.0


def _no_barrier() -> None:
    pass


@contextmanager
def _steady_collector() -> Iterator[None]:
    """Python's cycle collector would run inside some blocks and not in others."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
