"""Where a model holds the tensors of a graph's leaves, and that they are the ones the graph was captured with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from conjoin.errors import UsageError
from conjoin.ir import Leaf, whole_type
from conjoin.ops import TensorType

Slot = tuple[nn.Module, str]
"""A module and the name under which it holds a parameter or buffer."""


def _find_slot(model: nn.Module, name: str) -> Slot | None:
    owner, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return None
    return (module, last) if read_slot((module, last)) is not None else None


def read_slot(slot: Slot) -> Tensor | None:
    """The parameter or buffer in its dictionary: an attribute of that name may be something else."""
    module, name = slot
    found = module._parameters.get(name)
    return module._buffers.get(name) if found is None else found


def find_slots(model: nn.Module, leaf: Leaf) -> tuple[Slot, ...]:
    """Where the model holds the tensor of a leaf: once for every name it has."""
    found: list[Slot] = []
    for name in leaf.names:
        slot = _find_slot(model, name)
        tensor = read_slot(slot) if slot else None
        if slot is None or tensor is None:
            told = "the model has no tensor of that name" if name == leaf.names[0] else f"{name} is missing"
            raise mismatch(leaf, told)
        type = TensorType(tuple(tensor.shape), tensor.dtype)
        if type != whole_type(leaf).laid_out(()):
            raise mismatch(leaf, f"the model's is {type}")
        if found and tensor is not read_slot(found[0]):
            raise mismatch(leaf, f"{name} is another tensor in the model, where the graph has one under both names")
        found.append(slot)
    return tuple(found)


def mismatch(leaf: Leaf, why: str) -> UsageError:
    return UsageError(
        f"The graph needs {leaf} of type {leaf.type}, but {why}. The graph was captured from another model or another "
        f"dtype. Capture this model again, or pass the model the graph came from."
    )


def find_constant(model: nn.Module, leaf: Leaf) -> Tensor:
    """A copy of a constant: of the model's attribute of that name, which may have changed since the graph was captured;
    else of what is in the graph.
    """
    owner, _, name = leaf.name.rpartition(".")
    try:
        found = getattr(model.get_submodule(owner), name)
    except AttributeError:
        found = None
    held = found if isinstance(found, Tensor) and (leaf.data is None or not found.is_meta) else None
    if held is not None and TensorType(tuple(held.shape), held.dtype) == leaf.type.laid_out(()):
        return held.detach().clone()
    if leaf.data is None:
        raise mismatch(leaf, "the graph was captured without its values and the model has no such attribute")
    if not leaf.data:
        return torch.empty(leaf.type.shape, dtype=leaf.type.dtype)
    return torch.frombuffer(bytearray(leaf.data), dtype=leaf.type.dtype).reshape(leaf.type.shape).clone()
