"""What a graph may round more than its dtypes say: products of matrices, and sums of gradients over devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conjoin.ops import dtype_name, parse_dtype


@dataclass(frozen=True, slots=True)
class Rounding:
    """By default nothing. Written into the first line of a graph.

    >>> print(Rounding(tf32=True, sums=torch.bfloat16))
     products=tf32 sums=bf16
    """

    tf32: bool = False
    """Operands of float32 products and convolutions are rounded to TF32 where a device has tensor cores for it."""
    sums: torch.dtype | None = None
    """In which gradients of parameters in bundles are summed over devices; None for the dtype of the parameter."""

    def __str__(self) -> str:
        products = " products=tf32" if self.tf32 else ""
        return products + (f" sums={dtype_name(self.sums)}" if self.sums is not None else "")

    def summed_in(self, stored: torch.dtype) -> torch.dtype:
        """In which the gradient of a parameter is summed: as asked, but never wider than it is stored.

        >>> Rounding(sums=torch.bfloat16).summed_in(torch.float32), Rounding().summed_in(torch.float32)
        (torch.bfloat16, torch.float32)
        """
        return self.sums if self.sums is not None and self.sums.itemsize < stored.itemsize else stored


EXACT = Rounding()


def parse_rounding(text: str) -> Rounding:
    """Read what `str` writes; ValueError for anything else."""
    words = dict(word.partition("=")[::2] for word in text.split())
    sums = parse_dtype(words["sums"]) if "sums" in words else None
    made = Rounding("products" in words, sums)
    if sums not in (None, torch.bfloat16, torch.float16) or str(made) != text:
        raise ValueError(f"expected products=tf32 or sums=bf16, found {text[:40]!r}")
    return made
