"""Whether forward and backward passes come to their ends, and whether the ranks may go on after one that did not.

A pass may be cut short by an error that the caller catches, as when memory ran out. What it left undone on this rank is
forgotten when the next one begins. Other ranks may have come farther: then the collectives of the next pass would meet
those of the last. So after such a pass the ranks compare, outside of all collectives, how many they have started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from conjoin.errors import RankError
from conjoin.ir import Leaf
from conjoin.runtime.ranks.agreement import Agreement
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.torch_private import after_backward, is_in_backward


class Passes:
    """The passes of one module on one rank."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._agreement: Agreement | None = None
        """Of the program whose pass it is."""
        self._is_open = False
        """Whether a pass has begun and not ended."""
        self._compares = False
        """Whether the ranks compare this one."""

    def begin(self, agreement: Agreement) -> None:
        """A forward pass of a program begins; one that runs again inside a backward pass is part of that."""
        if is_in_backward():
            return
        if self._is_open and self._communicator.mesh.size > 1:
            self._compare()
        self._is_open = True
        self._agreement, self._compares = agreement, agreement.begin()

    def end(self, given: Mapping[Leaf, Tensor], outputs: Sequence[Any], loss: int | None) -> None:
        """A forward pass has made its outputs; from the first gradient that comes to one the backward is followed."""
        if is_in_backward():
            return
        self._is_open, agreement = False, self._agreement
        assert agreement is not None
        if self._compares:
            agreement.compare_inputs(given, None if loss is None else outputs[loss])
        for output in outputs:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(partial(self._turn_back, agreement))  # type: ignore[no-untyped-call]

    def _turn_back(self, agreement: Agreement, gradient: Tensor) -> None:
        if not self._is_open:
            self._is_open = True
            after_backward(partial(self._close, agreement))

    def _close(self, agreement: Agreement) -> None:
        self._is_open = False
        agreement.compare_gradients()

    def _compare(self) -> None:
        """Go on only if all ranks were cut short, and at the same point."""
        counts = self._communicator.compare(str(self._communicator.num_started))
        if len(set(counts)) > 1:
            told = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(counts[:8]))
            raise RankError(
                f"A step was begun after one that failed, and the ranks failed at different points: they had started "
                f"{told} collectives. What one rank sends next would meet what another still waits for. Start again "
                f"from the last checkpoint."
            )
