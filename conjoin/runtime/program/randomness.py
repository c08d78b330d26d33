"""Random draws on a mesh: independent along axes that split what is drawn, equal along all others.

Operators that are split along the same axes share a stream: a state of the device's generator that is swapped in while
they run. At every forward pass the streams start from one number drawn from the caller's own generator, so
`torch.manual_seed` and activation checkpointing mean what they mean on one device. Ranks that must draw alike and whose
generators differ are found out.

For checks there is also one stream for everything, in which every rank draws what one device would. One device by
itself draws from the caller's generator, as the plain model does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from conjoin.errors import RankError
from conjoin.ops import drawing
from conjoin.runtime.ranks.communicator import Communicator, Work, uncompiled

Function = Callable[..., Any]
StreamState = tuple[int, Tensor | None]
"""Where a stream stands: its seed, and the state of the generator once something was drawn."""


class Stream:
    """A generator state of its own for the operators that are split along the same axes."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._state: Tensor | None = None

    def restart(self, seed: int) -> None:
        self._seed, self._state = seed, None

    @property
    def place(self) -> StreamState:
        """Where the stream stands."""
        return self._seed, self._state

    def go_to(self, place: StreamState) -> None:
        self._seed, self._state = place

    def run(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call with the device's generator in the state of this stream."""
        device = _device_of(args, kwargs)
        state = _state_of(device)
        if self._state is None:
            self._state = torch.Generator(device).manual_seed(self._seed).get_state()
        with drawing:
            outside = state.read()
            state.write(self._state)
            try:
                return function(*args, **kwargs)
            finally:
                self._state = state.read()
                state.write(outside)


class _Outside(Stream):
    """The caller's generator itself."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")

    @property
    def place(self) -> StreamState:
        return 0, _state_of(self.device).read()

    def go_to(self, place: StreamState) -> None:
        _, state = place
        assert state is not None
        _state_of(self.device).write(state)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for item in (*args, *kwargs.values()):
        if isinstance(item, Tensor):
            return item.device
        if isinstance(item, torch.device):
            return item
    return torch.device("cpu")


def _state_of(device: torch.device) -> _HostState | _DeviceState:
    return _HostState() if device.type == "cpu" else _DeviceState(device)


class _HostState:
    """The state of the CPU's generator."""

    def read(self) -> Tensor:
        return torch.get_rng_state()

    def write(self, state: Tensor) -> None:
        torch.set_rng_state(state)


class _DeviceState:
    """The state of an accelerator's generator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device.type)

    def read(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(self._device)
        return state

    def write(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self._device)


class Streams:
    """The streams of one rank's program; an exact one is there alone, and draws what one device would.

    Programs of several shapes go on with the same exact stream. A stage of a pipeline draws from streams also where it
    has one device, since it runs micro-batches in an order of its own.
    """

    def __init__(self, communicator: Communicator, exact: Stream | None = None, *, is_stage: bool = False) -> None:
        self._communicator = communicator
        self.exact = exact is not None
        self._streams: dict[tuple[str, ...], Stream] = {}
        self._outside = _Outside() if exact is None and communicator.mesh.size == 1 and not is_stage else None
        if exact is not None:
            self._streams[()] = exact
        self.must_agree = False
        """Whether some ranks have to draw the same numbers."""
        self._check: tuple[Work, Tensor] | None = None

    def draw(self, function: Function, axes: tuple[str, ...]) -> Function:
        """The function with its draws from the stream of these axes."""
        if self._outside is not None:
            self._streams[()] = self._outside
            return function
        key = () if self.exact else tuple(sorted(axes))
        stream = self._streams.setdefault(key, Stream())
        if not self.exact and set(key) != set(self._communicator.mesh.names):
            self.must_agree = True
            self._communicator.prepare(self._communicator.mesh.names)

        @uncompiled
        def drawn(*args: Any, **kwargs: Any) -> Any:
            return stream.run(function, args, kwargs)

        return drawn

    def states(self) -> tuple[StreamState, ...]:
        """Where all streams stand."""
        return tuple(stream.place for stream in self._streams.values())

    def rerun(self, states: Sequence[StreamState], function: Function, *args: Any) -> Any:
        """Call with the streams where they once stood; after it they stand where they do now."""
        now = self.states()
        self._go_to(states)
        try:
            return function(*args)
        finally:
            self._go_to(now)

    def _go_to(self, states: Sequence[StreamState]) -> None:
        for stream, place in zip(self._streams.values(), states, strict=True):
            stream.go_to(place)

    def begin(self, device: torch.device) -> None:
        """Start all streams anew for a forward pass."""
        if self._outside is not None:
            self._outside.device = device
        if not self._streams or self.exact or self._outside is not None:
            return
        with drawing:
            base = int(torch.randint(2**52, (), dtype=torch.int64))
        self.restart(str(base))
        if self.must_agree:
            self._compare(base, device)

    def restart(self, base: str) -> None:
        """Start all streams anew from what all ranks have in common."""
        places = self._communicator.mesh.coordinates(self._communicator.rank)
        for axes, stream in self._streams.items():
            where = ",".join(f"{axis}={places[axis]}" for axis in axes)
            digest = hashlib.sha256(f"{base}:{where}".encode()).digest()
            stream.restart(int.from_bytes(digest[:7], "big"))

    def go_to(self, place: StreamState) -> None:
        """Have the one stream of a comparison with one device go on from where that stands."""
        for stream in self._streams.values():
            stream.go_to(place)

    def _compare(self, base: int, device: torch.device) -> None:
        """Ask whether all ranks drew the same number; the answer is looked at when the next pass begins."""
        if self._check is not None:
            work, found = self._check
            work.wait()
            highest, lowest = found.tolist()
            if highest != -lowest:
                raise RankError(
                    "The ranks drew different random numbers where the plan needs the same ones. Their generators "
                    "were seeded differently, or one rank drew more than another. Call torch.manual_seed with one "
                    "seed on all ranks, and use generators of your own for what differs between them."
                )
        found = torch.tensor([base, -base], dtype=torch.int64, device=device)
        self._check = self._communicator.all_reduce(found, self._communicator.mesh.names, largest=True), found
