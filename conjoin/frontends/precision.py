"""In which precision a model is trained, where that is asked for and not left to the model.

A precision is of a kind of device: autocast casts other operators on CUDA than on a CPU, and a model that is captured
where there is no GPU is captured as it would run on one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from conjoin.errors import UsageError

PRECISIONS = {
    "float32": (torch.float32, False),
    "bf16": (torch.bfloat16, False),
    "bf16-mixed": (torch.bfloat16, True),
    "fp16-mixed": (torch.float16, True),
}
"""What everything is computed in, or, mixed, what autocast casts to around parameters that stay in float32."""


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision on a kind of device.

    >>> Precision.parse("bf16-mixed", "cuda"), str(Precision.parse("bf16@cpu"))
    (Precision(name='bf16-mixed', device='cuda'), 'bf16@cpu')
    """

    name: str
    device: str

    @classmethod
    def parse(cls, text: str, device: str = "cpu") -> Precision:
        """A precision by its name, which may be followed by the kind of its device."""
        name, _, given = text.partition("@")
        if name not in PRECISIONS or (given or device) not in ("cpu", "cuda"):
            raise UsageError(
                f"The precision {name[:40]!r} was asked for. Known are {', '.join(PRECISIONS)}; mixed keeps parameters "
                f"and sums of gradients in float32. Choose one of these, or none to keep what the model does."
            )
        return cls(name, given or device)

    def __str__(self) -> str:
        return f"{self.name}@{self.device}"

    @property
    def dtype(self) -> torch.dtype:
        """What products of matrices are computed in."""
        return PRECISIONS[self.name][0]

    @property
    def autocast(self) -> tuple[tuple[str, torch.dtype], ...]:
        """The regions that the model is called in."""
        return ((self.device, self.dtype),) if PRECISIONS[self.name][1] else ()

    def converted(self, model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
        """The model and its batch with all floating-point tensors as they are to be; a copy, unless they are so."""
        dtype = torch.float32 if self.autocast else self.dtype
        tensors = (*model.parameters(), *model.buffers())
        if any(x.is_floating_point() and x.dtype != dtype for x in tensors):
            model = copy.deepcopy(model).to(dtype)
        return model, tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)

    def running(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """What runs a model, in this precision."""

        def called(*args: Any, **kwargs: Any) -> Any:
            with self._regions():
                return run(*args, **kwargs)

        return called if self.autocast else run

    @contextmanager
    def _regions(self) -> Iterator[None]:
        with torch.autocast(self.device, dtype=self.dtype):
            yield
