"""What is asked of a device, as torch's own dispatcher sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every kernel that is asked for, by its name and with what it is given but tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.asked: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [x for x in (*args, *(kwargs or {}).values()) if not isinstance(x, Tensor | list | torch.dtype)]
        self.asked.append((str(func).removeprefix("aten."), str(plain)))
        return func(*args, **(kwargs or {}))
