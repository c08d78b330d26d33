"""A rank's state as a dictionary: whole tensors, and pieces of split ones that `torch.distributed.checkpoint` knows.

A `Piece` says where in the whole tensor it lies. That is all that torch's checkpoints ask for: a piece written by one
plan is read by another plan, by another number of ranks, or by plain torch, whatever the sizes of the pieces are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from conjoin.errors import CheckpointError, UsageError
from conjoin.ir import Region
from conjoin.runtime.movement.carriers import carry_reshard
from conjoin.runtime.ranks.communicator import Communicator
from conjoin.runtime.ranks.joint_action import meet
from conjoin.runtime.state.blocks import Blocks, cut_out, dim_of, views_of
from conjoin.runtime.state.storage import Content, Store, is_persistent
from conjoin.runtime.torch_private import no_torch_function, wrapper_of

if TYPE_CHECKING:  # loaded where a checkpoint is written or read: it takes as long as torch's own export
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

_SHOWN = 8


class Piece(Tensor):
    """One rank's part of a tensor: of the shape of the whole, with the memory of the part. Of a packed weight it is
    several regions, one after the other.

    Methods between underscores are the protocol of torch.distributed.checkpoint, which asks for a tensor. It can be
    copied, moved and written from a piece of the same place; to compute, use `local` or `full_state_dict`.

    >>> Piece(torch.ones(2, 3), (4, 3), ((2, 4), (0, 3)))
    Piece([2:4, 0:3] of (4, 3), torch.float32)
    """

    local: Tensor
    regions: Blocks
    """Which parts of the whole it is."""

    @staticmethod
    def __new__(cls, local: Tensor, shape: tuple[int, ...], *regions: Region) -> Piece:
        made: Piece = wrapper_of(cls, shape, local)
        made.local, made.regions = local, regions
        return made

    def __init__(self, local: Tensor, shape: tuple[int, ...], *regions: Region) -> None:
        """All is done in `__new__`, as tensors are made."""

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        packet, first = func.overloadpacket, args[0]
        if packet in _COPIES and isinstance(first, Piece):
            return Piece(func(first.local, *args[1:], **(kwargs or {})), tuple(first.shape), *first.regions)
        if packet is _SAME_SIZE and tuple(args[1]) == tuple(first.shape):  # so asynchronous saves begin their copies
            return Piece(func(first.local, first.local.shape, **(kwargs or {})), tuple(first.shape), *first.regions)
        if packet is _WRITE and all(isinstance(x, Piece) and x.regions == first.regions for x in args[:2]):
            first.local.copy_(args[1].local)
            return first
        raise UsageError(
            f"{packet} was called on a piece of a tensor. This rank has only a part of its values. Use .local for the "
            f"part, or full_state_dict for whole tensors."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Piece, (self.local, tuple(self.shape), *self.regions)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        spans = (", ".join(f"{start}:{stop}" for start, stop in region) for region in self.regions)
        return f"Piece({' and '.join(f'[{span}]' for span in spans)} of {tuple(self.shape)}, {self.dtype})"

    @property
    def region(self) -> Region:
        """Which part of the whole it is, or the first of its parts."""
        return self.regions[0]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What to write: this part, unless it is empty; of a tensor without elements, that it is there."""
        from torch.distributed.checkpoint import metadata, planner

        chunks = self.__create_chunk_list__() if prod(self.shape) else [_chunk([(0, size) for size in self.shape])]
        properties = metadata.TensorProperties(dtype=self.dtype)
        return [
            planner.WriteItem(
                index=metadata.MetadataIndex(fqn, chunk.offsets),
                type=planner.WriteItemType.SHARD,
                tensor_data=planner.TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """What to read; an empty part is left out, since it may begin where another one does."""
        return [_chunk(region) for region in self.regions] if self.local.numel() else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The tensor that holds the part which begins there."""
        if not prod(self.shape):
            return self.local.new_empty(self.shape)
        starts = [tuple(start for start, _ in region) for region in self.regions]
        wanted = starts[0] if index.offset is None else tuple(index.offset)
        if wanted not in starts:
            raise ValueError(f"{index.fqn} begins at {', '.join(map(str, starts))} on this rank, not at {wanted}")
        return views_of(self.local.detach(), self.regions)[starts.index(wanted)]


_COPIES = frozenset({torch.ops.aten.detach, torch.ops.aten.clone, torch.ops.aten._to_copy, torch.ops.aten.empty_like})
_SAME_SIZE, _WRITE = torch.ops.aten.new_empty, torch.ops.aten.copy_


def _chunk(region: Region | list[tuple[int, int]]) -> ChunkStorageMetadata:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    offsets, sizes = [start for start, _ in region], [stop - start for start, stop in region]
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))


def as_piece(store: Store, name: str, local: Tensor) -> Tensor:
    """A rank's tensor of a parameter's layout: as it is when it is the whole one."""
    shape = store.shape(name, local)
    return local if store.is_whole(name, shape) else Piece(local, shape, *store.blocks(name, shape))


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
            f"another model, or its pieces are of another plan. Give whole tensors or this plan's pieces"
            f"{_wrapped(own, unexpected)}:\n{listed(faults)}"
        )
    _copy(store, {name: part for name, part in found.items() if isinstance(part, Tensor)})
    return UnmatchedKeys(missing, unexpected)


def _wrapped(own: Iterable[str], given: Sequence[str]) -> str:
    """What a wrapper has put before all names, as `DistributedDataParallel` and `torch.compile` do."""
    prefix = given[0].partition(".")[0] + "." if given else ""
    if prefix == "." or {name.removeprefix(prefix) for name in given if name.startswith(prefix)} != set(own):
        return ""
    return f", under names without {prefix!r}, which a wrapper has put there"


def local_part(store: Store, name: str, local: Tensor, value: Any) -> Tensor | str:
    """What a value has for this rank's tensor of a parameter's layout; in words why it does not fit."""
    shape = store.shape(name, local)
    blocks = store.blocks(name, shape)
    if not isinstance(value, Tensor):
        return f"is a {type(value).__name__}, not a tensor"
    if tuple(value.shape) != shape:
        return f"has shape {tuple(value.shape)} instead of {shape}"
    if not isinstance(value, Piece):
        return cut_out(value.detach(), blocks)
    if value.regions != blocks:
        return f"is {value} where this rank holds {Piece(local, shape, *blocks)}"
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

    @property
    def communicator(self) -> Communicator: ...

    def members(self, name: str) -> Communicator | None:
        """Who holds a parameter or buffer; None where this rank has no part in it."""

    def speaker(self, name: str) -> int | None:
        """In a pipeline the rank that tells all others of a parameter or buffer; None where all have part in it."""


def check_loaded(step: Any) -> None:
    """Refuse what is no module of a plan; a compiled one is."""
    if not isinstance(getattr(step, "store", None), Store):
        raise UsageError(
            f"A {type(step).__name__} was given instead of a module. What knows which pieces of the weights are on "
            f"which rank is the module that conjoin.load gave. Pass that one."
        )


def full_state_dict(step: Gathering, everywhere: bool = False) -> dict[str, Tensor]:
    """The module's state as whole tensors on the CPU, on rank 0 or everywhere; called on every rank.

    Tensors are gathered one at a time.
    """
    check_loaded(step)
    meet(step.communicator, "full_state_dict")
    keep = everywhere or step.communicator.rank == 0
    state: dict[str, Tensor] = {}
    gathered: dict[str, Tensor] = {}
    for content in step.store.contents:
        if content.first not in gathered:
            whole = gathered_whole(step, content)
            gathered[content.first] = whole.to("cpu", copy=True) if keep else torch.empty(0)
        if keep:
            state[content.name] = gathered[content.first]
    return state


def gathered_whole(step: Gathering, content: Content) -> Tensor:
    """The whole of a tensor of which ranks have pieces; called on every rank."""
    members, speaker, whole = step.members(content.name), step.speaker(content.name), None
    if members is not None:
        local = dict(state_tensors(step.store))[content.name].detach()
        with torch.no_grad():
            whole = _gathered(step.store, content, local, members)
    if speaker is None:
        assert whole is not None, "all ranks have part in it"
        return whole
    return _told(step, content, whole if step.communicator.rank == speaker else None)


def _gathered(store: Store, content: Content, local: Tensor, members: Communicator) -> Tensor:
    """A whole tensor on all ranks that hold pieces of it, section by section."""
    layout, leaves = store.layout(content.name), store.leaves(content.name)
    if not layout:
        return local
    shapes = [leaf.type.shape if leaf.section else content.type.shape for leaf in leaves]
    blocks = store.blocks(content.name, content.type.shape)
    carried = zip(shapes, views_of(local, blocks), strict=True)
    parts = [carry_reshard(shape, layout, (), members)(part.contiguous()) for shape, part in carried]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim_of(blocks))


def _told(step: Gathering, content: Content, whole: Tensor | None) -> Tensor:
    """A tensor that one rank has, on all ranks: the sum of its bytes and of zeros."""
    communicator, device = step.communicator, step.store.device
    if whole is None:
        whole = torch.zeros(content.type.shape, dtype=content.type.dtype, device=device)
    flat = whole.contiguous().clone().view(-1)
    sent = flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)
    if sent.numel():
        communicator.prepare(communicator.mesh.names)
        communicator.all_reduce(sent, communicator.mesh.names).wait()
    return flat.view(content.type.shape)
