"""In which precision a model is trained, where that is asked for and not left to the model.

A precision is of a kind of device: autocast casts other operators on CUDA than on a CPU, and a model that is captured
where there is no GPU is captured as it would run on one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from conjoin.errors import UsageError
from conjoin.frontends.eight_bits import in_eight_bits
from conjoin.frontends.shared_casts import share_casts
from conjoin.ir import Graph, Rounding, copied_model


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a precision means."""

    dtype: torch.dtype
    """What everything is computed in, or, mixed, what autocast casts to around parameters that stay in float32."""
    rate: str
    """The rate that a GPU needs for it, by the name that machines have for it."""
    mixed: bool = False


_KINDS = {
    "float32": _Kind(torch.float32, "float32"),
    "tf32": _Kind(torch.float32, "tfloat32"),
    "bf16": _Kind(torch.bfloat16, "bfloat16"),
    "bf16-mixed": _Kind(torch.bfloat16, "bfloat16", mixed=True),
    "fp16-mixed": _Kind(torch.float16, "float16", mixed=True),
    "fp8-mixed": _Kind(torch.bfloat16, "float8", mixed=True),
}
PRECISIONS = tuple(_KINDS)
_SUMS = {"float32": None, "bf16": torch.bfloat16}
"""What gradients of a mixed precision in bfloat16 may be summed in over devices, after `reduce=`."""


@dataclass(frozen=True, slots=True)
class Precision:
    """A precision on a kind of device.

    >>> Precision.parse("bf16-mixed", "cuda"), str(Precision.parse("bf16@cpu"))
    (Precision(name='bf16-mixed', device='cuda', reduce='float32'), 'bf16@cpu')
    >>> print(Precision.parse("bf16-mixed,reduce=bf16@cuda"))
    bf16-mixed,reduce=bf16@cuda
    """

    name: str
    device: str
    reduce: str = "float32"
    """In which gradients are summed over devices, where parameters are in float32."""

    @classmethod
    def parse(cls, text: str, device: str = "cpu") -> Precision:
        """A precision by its name, which may be followed by what gradients are summed in and the kind of its device."""
        told, _, given = text.partition("@")
        name, comma, option = told.partition(",")
        if name not in _KINDS or (given or device) not in ("cpu", "cuda"):
            raise _unknown(told, given)
        reduce = option.removeprefix("reduce=") if comma else "float32"
        narrows = _KINDS[name].mixed and _KINDS[name].dtype == torch.bfloat16
        if comma and not (option.startswith("reduce=") and reduce in _SUMS and narrows):
            raise UsageError(
                f"The precision {told[:60]!r} was asked for. After a comma a mixed precision in bfloat16 says what "
                f"gradients are summed in over devices, reduce=float32 or reduce=bf16; others sum them as parameters "
                f"are stored. Write bf16-mixed,reduce=bf16, or {name} alone."
            )
        return cls(name, given or device, reduce)

    def __str__(self) -> str:
        return f"{self.title}@{self.device}"

    @property
    def title(self) -> str:
        """As it is asked for, whatever the device."""
        return self.name + (f",reduce={self.reduce}" if self.reduce != "float32" else "")

    @property
    def dtype(self) -> torch.dtype:
        """What products of matrices are computed in."""
        return _KINDS[self.name].dtype

    @property
    def rate(self) -> str:
        """The rate that a GPU needs for it."""
        return _KINDS[self.name].rate

    @property
    def autocast(self) -> tuple[tuple[str, torch.dtype], ...]:
        """The regions that the model is called in."""
        return ((self.device, self.dtype),) if _KINDS[self.name].mixed else ()

    @property
    def rounding(self) -> Rounding:
        """What graphs in it round more than their dtypes say."""
        return Rounding(tf32=self.name == "tf32", sums=_SUMS[self.reduce])

    def converted(self, model: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
        """The model and its batch with all floating-point tensors as they are to be; a copy, unless they are so."""
        dtype = torch.float32 if self.autocast else self.dtype
        tensors = (*model.parameters(), *model.buffers())
        for name, parameter in model.named_parameters() if self.dtype != torch.float32 else ():
            if parameter.is_complex():
                raise UsageError(
                    f"The precision {self.title} was asked for. The parameter {name} is of {parameter.dtype}, and of "
                    f"complex numbers torch has none in {self.dtype}. Leave the precision out: then the model is "
                    f"trained as it is."
                )
        if any(x.is_floating_point() and x.dtype != dtype for x in tensors):
            model = copied_model(model).to(dtype)
        return model, tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, batch)

    def applied(self, graph: Graph) -> Graph:
        """A graph that was captured in the regions of a precision, with what they do not say."""
        made = share_casts(graph) if self.autocast else graph
        made = made if made.rounding == self.rounding else replace(made, rounding=self.rounding)
        return in_eight_bits(made) if self.name == "fp8-mixed" else made

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


def _unknown(told: str, given: str) -> UsageError:
    name, known = told.partition(",")[0], ", ".join(PRECISIONS)
    near = [] if name in _KINDS else get_close_matches(name.lower(), (*PRECISIONS, *_ALSO), n=1, cutoff=0.5)
    meant = _ALSO.get(near[0], near[0]) if near else PRECISIONS[0]
    where = f" on {given[:20]!r}" if given not in ("", "cpu", "cuda") else ""
    return UsageError(
        f"The precision {told[:40]!r} was asked for{where}. Known are {known}, on cpu or cuda; mixed keeps parameters "
        f"and their updates in float32, and without one the model is trained as it is. Did you mean {meant}?"
    )


_ALSO = {
    "fp32": "float32", "full": "float32", "tfloat32": "tf32", "bfloat16": "bf16", "bf16-true": "bf16",
    "float16": "fp16-mixed", "fp16": "fp16-mixed", "half": "fp16-mixed", "amp": "bf16-mixed", "mixed": "bf16-mixed",
    "fp8": "fp8-mixed", "float8": "fp8-mixed",
}  # fmt: skip
"""What others call them."""
