"""Copies between a device and pinned memory of its host, in both directions beside what the device computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
"""Where a copy goes, and what is copied."""


class Engines:
    """The copies of a device in both directions, beside what it computes; on a CPU they are done at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out: Any = None
        self._in: Any = None
        if device.type == "cuda":
            self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, pairs: Sequence[Pair], after: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """Copy to the host what was computed so far, when what the buffers had before was brought back."""
        return self._copy(self._out, pairs, after)

    def bring(self, pairs: Sequence[Pair], after: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """Copy from the host, when it has come there, into memory that was free when this was called."""
        return self._copy(self._in, pairs, after)

    def _copy(
        self, stream: Any, pairs: Sequence[Pair], after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        if stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        stream.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            done: torch.cuda.Event = stream.record_event()
            return done

    def wait(self, done: torch.cuda.Event | None) -> None:
        """Compute nothing more before a copy is done."""
        if done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def settle(self) -> None:
        """Let the host wait for all that is on its way to it."""
        if self._out is not None:
            self._out.synchronize()
