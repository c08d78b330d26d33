"""TF32 for a step: switched on while it runs, forward and backward, and put back as it was.

torch has the choice once for the whole process and reads it when a product is launched. A backward pass runs later, on
autograd's own threads, and may run inside a forward pass, as micro-batches do. So runs are counted: the first switches
it on, the last puts it back. What other threads compute in float32 on a GPU meanwhile is rounded too. A backward pass
that fails does not tell its end; the next step of the module puts back what it left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from conjoin.runtime.torch_private import at_end_of_backward, is_in_backward


class _Switch:
    """What torch does with float32 on the tensor cores of a GPU: matrix products, and what cuDNN computes."""

    def __init__(self) -> None:
        self._lock, self._running = Lock(), 0
        self._before: list[tuple[Any, list[tuple[Any, str]]]] = []

    def on(self) -> None:
        with self._lock:
            self._running += 1
            if self._running == 1:
                products: Any = torch.backends.cuda.matmul
                cudnn: Any = torch.backends.cudnn
                self._set(products, (products,))
                self._set(cudnn, (cudnn.conv, cudnn.rnn))

    def _set(self, owner: Any, parts: Sequence[Any]) -> None:
        """By the older name: torch refuses to compute where only the newer one was set."""
        before = [(part, part.fp32_precision) for part in parts]
        if any(precision != "tf32" for _, precision in before):
            self._before.append((owner, before))
            owner.allow_tf32 = True

    def off(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running > 0:
                return
            for owner, before in self._before:
                owner.allow_tf32 = False
                for part, precision in before:
                    part.fp32_precision = precision
            self._before.clear()


_SWITCH = _Switch()
"""One for the process, as the setting is."""


class TensorCores:
    """The passes of one module that are computed in TF32."""

    def __init__(self) -> None:
        self._backward = 0
        """Passes under way, or failed."""

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward pass."""
        if not is_in_backward():  # which may run a forward pass again
            while self._backward:
                self._leave()
        _SWITCH.on()
        try:
            yield
        finally:
            _SWITCH.off()

    def before_backward(self, outputs: list[Any]) -> list[Any]:
        """The outputs of a forward pass; backward from them is computed so too."""
        return [_Begin.apply(self, x) if _is_trained(x) else x for x in outputs]  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """A backward pass has begun; autograd tells when it ends."""
        self._backward += 1
        _SWITCH.on()
        at_end_of_backward(self._leave)

    def _leave(self) -> None:
        if self._backward:
            self._backward -= 1
            _SWITCH.off()


def _is_trained(output: Any) -> bool:
    return isinstance(output, Tensor) and output.requires_grad


class _Begin(torch.autograd.Function):
    """Made last in a forward pass, so the first of its backward pass."""

    @staticmethod
    def forward(ctx: Any, passes: TensorCores, x: Tensor) -> Tensor:
        ctx.passes = passes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        ctx.passes.enter()
        return None, gradient
