"""A rank's state as a dictionary: whole tensors, and pieces of split ones that `torch.distributed.checkpoint` knows.

A `Piece` says where in the whole tensor it lies. That is all that torch's checkpoints ask for: a piece written by one
plan is read by another plan, by another number of ranks, or by plain torch, whatever the sizes of the pieces are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from conjoin.errors import CheckpointError
from conjoin.ir import Region, region_shape
from conjoin.runtime.carriers import carry_reshard
from conjoin.runtime.communicator import Communicator
from conjoin.runtime.storage import Store, is_persistent

_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Piece:
    """One rank's part of a tensor; methods between underscores are torch.distributed.checkpoint's protocol.

    >>> piece = Piece(torch.ones(2, 3), (4, 3), ((2, 4), (0, 3)))
    >>> piece
    Piece([2:4, 0:3] of (4, 3), torch.float32)
    """

    local: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    region: Region
    """Which part of it this is."""

    def __repr__(self) -> str:
        spans = ", ".join(f"{start}:{stop}" for start, stop in self.region)
        return f"Piece([{spans}] of {self.shape}, {self.dtype})"

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where in the whole tensor this part begins."""
        return tuple(start for start, _ in self.region)

    def size(self) -> torch.Size:
        """The shape of the whole tensor."""
        return torch.Size(self.shape)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What to write: this part, unless it is empty; of a tensor without elements, that it is there."""
        chunks = self.__create_chunk_list__() if prod(self.shape) else [_chunk([(0, size) for size in self.shape])]
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What to read; an empty part is left out, since it may begin where another one does."""
        return [_chunk(self.region)] if self.local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The tensor that holds the part which begins there."""
        if not prod(self.shape):
            return self.local.new_empty(self.shape)
        if index.offset is not None and tuple(index.offset) != self.offsets:
            raise ValueError(f"{index.fqn} begins at {self.offsets} on this rank, not at {tuple(index.offset)}")
        return self.local.detach()


def _chunk(region: Region | list[tuple[int, int]]) -> ChunkStorageMetadata:
    offsets, sizes = [start for start, _ in region], [stop - start for start, stop in region]
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def as_piece(store: Store, name: str, local: Tensor) -> Tensor | Piece:
    """A rank's tensor of a parameter's layout: as it is when it is the whole one."""
    shape = store.shape(name, local)
    region = store.region(name, shape)
    return local if region_shape(region) == shape else Piece(local, shape, region)


def state_tensors(store: Store) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers under all their names."""
    yield from store.root.named_parameters(remove_duplicate=False)
    for name, buffer in store.root.named_buffers(remove_duplicate=False):
        if is_persistent(store.root, name):
            yield name, buffer


def mark_pieces(store: Store, state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Put pieces into a module's `state_dict` where it has local tensors of split ones."""
    for name, _ in state_tensors(store):
        state[prefix + name] = as_piece(store, name, state[prefix + name])
    return state


class UnmatchedKeys(NamedTuple):
    """What `load_state_dict` passed over."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_pieces(store: Store, state: Mapping[str, Any], strict: bool) -> UnmatchedKeys:
    """Copy a state into the rank's tensors, all or nothing: whole tensors are cut, pieces must be those of this rank.

    Parameters keep their identity, so that optimizers find them. Buffers become new tensors, since a forward pass may
    have left one that shares memory with something else.
    """
    own = dict(state_tensors(store))
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    found = {name: local_part(store, name, local, state[name]) for name, local in own.items() if name in state}
    faults = [f"{name} {part}" for name, part in found.items() if isinstance(part, str)]
    if strict:
        faults += [f"{name} is missing" for name in missing]
        faults += [f"{name} is unexpected" for name in unexpected]
    if faults:
        raise CheckpointError(
            f"A state was given that does not fit the module on this rank in {count(len(faults), 'tensor')}. It is of "
            f"another model, or its pieces are of another plan. Give whole tensors or this plan's pieces:\n"
            f"{listed(faults)}"
        )
    _copy(store, {name: part for name, part in found.items() if isinstance(part, Tensor)})
    return UnmatchedKeys(missing, unexpected)


def local_part(store: Store, name: str, local: Tensor, value: Any) -> Tensor | str:
    """What a value has for this rank's tensor of a parameter's layout; in words why it does not fit."""
    shape = store.shape(name, local)
    region = store.region(name, shape)
    if not isinstance(value, Tensor | Piece):
        return f"is a {type(value).__name__}, not a tensor"
    if tuple(value.shape) != shape:
        return f"has shape {tuple(value.shape)} instead of {shape}"
    if isinstance(value, Tensor):
        return value.detach()[tuple(slice(*span) for span in region)]
    if value.region != region:
        return f"is {value} where this rank holds {Piece(local, shape, region)}"
    return value.local.detach()


def _copy(store: Store, parts: dict[str, Tensor]) -> None:
    buffers: dict[int, Tensor] = {}
    own = dict(state_tensors(store))
    with torch.no_grad():
        for name, part in parts.items():
            held = own[name]
            if not isinstance(held, nn.Parameter):
                buffers[id(held)] = part.to(held.device, held.dtype, copy=True)
            elif not _is_same(held, part):
                held.copy_(part)
    for name, buffer in list(store.root.named_buffers(remove_duplicate=False)):
        if id(buffer) in buffers:
            store.put_buffer(name, buffers[id(buffer)], is_persistent(store.root, name))


def _is_same(held: Tensor, part: Tensor) -> bool:
    """Whether a part is already where it should go: torch's checkpoints read into the tensors they are given."""
    same = held.data_ptr() == part.data_ptr() and held.stride() == part.stride()
    return same and held.dtype == part.dtype and held.device == part.device


def count(number: int, noun: str) -> str:
    """A number of things in words."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(faults: list[str]) -> str:
    """The first faults, one on each line."""
    more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    return "\n".join(f"  {fault}" for fault in [*faults[:_SHOWN], *more])


class Gathering(Protocol):
    """A module with pieces, and the way to other ranks."""

    store: Store
    communicator: Communicator


def full_state_dict(step: Gathering, everywhere: bool = False) -> dict[str, Tensor]:
    """The module's state as whole tensors on the CPU, on rank 0 or everywhere; called on every rank.

    Tensors are gathered one at a time.
    """
    keep = everywhere or step.communicator.rank == 0
    gathered: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, local in state_tensors(step.store):
        if id(local) not in gathered:
            whole = _gathered(step, name, local)
            gathered[id(local)] = whole.to("cpu", copy=True) if keep else torch.empty(0)
        if keep:
            state[name] = gathered[id(local)]
    return state


def _gathered(step: Gathering, name: str, local: Tensor) -> Tensor:
    layout = step.store.layout(name)
    if not layout:
        return local.detach()
    carry = carry_reshard(step.store.shape(name, local), layout, (), step.communicator)
    with torch.no_grad():
        whole: Tensor = carry(local.detach())
    return whole
