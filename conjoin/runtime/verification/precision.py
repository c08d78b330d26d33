"""A plain torch program in double precision, or a rounding away from itself; neither knows of graphs.

`Doubled` widens what the program makes narrower by itself: `x.float()`, `torch.zeros(4)`, a float32 constant. `Rounded`
moves every result of arithmetic by at most one unit in its last place: how far two such runs are apart is how far two
right runs may be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from conjoin.ir import wide_dtype
from conjoin.runtime.torch_private import DispatchMode, makes_dtype, written_arguments

_EXACT = (
    "abs.", "alias", "amax", "amin", "arange", "arg", "as_strided", "bitwise", "cat.", "clamp", "clone", "constant",
    "copy", "detach", "diagonal", "embedding.", "empty", "eq.", "expand", "fill", "flip", "full", "gather", "ge.",
    "gt.", "hardtanh", "histc", "index.", "index_select", "item", "le.", "lift", "logical", "lt.", "masked", "max",
    "min", "ne.", "neg.", "one_hot", "ones", "permute", "relu", "repeat", "reshape", "roll", "scatter.", "select",
    "sign.", "slice", "sort", "split", "squeeze", "stack", "t.", "threshold", "topk", "transpose", "tril", "triu",
    "unbind", "unfold.", "unsqueeze", "view", "where", "zero",
)  # fmt: skip
"""What begins like this moves or counts numbers, and rounds none."""


class Doubled(DispatchMode):  # type: ignore[no-untyped-call]
    """Runs a program in double precision whose state and inputs are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = written_arguments(func, args, kwargs or {})

        def wide(x: Any) -> Any:
            if isinstance(x, torch.dtype):
                return wide_dtype(x)
            return _widened(x) if isinstance(x, Tensor) and not any(x is own for own in written) else x

        args, kwargs = tree_map(wide, (args, kwargs or {}))
        before = torch.get_rng_state() if makes_dtype(func) else None
        made = func(*args, **kwargs)
        if written or not isinstance(made, Tensor) or wide_dtype(made.dtype) == made.dtype:
            return tree_map(lambda x: _widened(x) if isinstance(x, Tensor) and not written else x, made)
        if before is None and torch.Tag.pointwise in func.tags:  # of integers torch makes its default dtype
            args, kwargs = tree_map(lambda x: x.double() if isinstance(x, Tensor) else x, (args, kwargs))
            return func(*args, **kwargs)
        if before is None:
            return _widened(made)
        torch.set_rng_state(before)  # draws of another dtype are other draws
        return func(*args, **{**kwargs, "dtype": wide_dtype(made.dtype)})


def _widened(tensor: Tensor) -> Tensor:
    wide = wide_dtype(tensor.dtype)
    return tensor if wide == tensor.dtype else tensor.to(wide)


class Rounded(DispatchMode):  # type: ignore[no-untyped-call]
    """Runs a program with every floating-point result of arithmetic a rounding away from what it is.

    With `moved`, what is only moved is a rounding away too: kernels round inside, where no result can be reached.
    """

    def __init__(self, seed: int, *, moved: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exact = () if moved else _EXACT
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = str(func.__name__).lstrip("_").removeprefix("native_")
        if name.startswith(self._exact) or torch.Tag.nondeterministic_seeded in func.tags:
            return made
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if name.startswith("to_copy") and not any(x.is_floating_point() for x in tensors):
            return made  # whole numbers, which floats are exact for
        given = {x.untyped_storage().data_ptr() for x in tensors}
        for tensor in made if isinstance(made, tuple | list) else (made,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and not _overlaps(tensor):
                if name.startswith(_EXACT) and tensor.untyped_storage().data_ptr() in given:
                    continue  # a view: what it is of would change
                apart = torch.rand(tensor.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
                tensor.copy_(tensor.double() * (1 + apart.to(tensor.device) * torch.finfo(tensor.dtype).eps))
        return made


def _overlaps(tensor: Tensor) -> bool:
    """Whether an element has several places, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
