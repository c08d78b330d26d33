"""The one private name of torch that the simulator needs, where it can be replaced."""

from __future__ import annotations

from torch import Tensor


def storage_of(tensor: Tensor) -> int:
    """What is equal for tensors that share their memory, also where they have none because they are on meta."""
    number: int = tensor.untyped_storage()._cdata
    return number
