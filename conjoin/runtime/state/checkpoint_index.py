"""The index of a checkpoint: small, JSON, written last. What it does not describe exactly is not a checkpoint.

It names every tensor with its shape and dtype and says in which file and where its chunks stand, so that a checkpoint
is read without unpickling torch's own `.metadata`; and it has the size and digest of every data file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

FORMAT = "conjoin.checkpoint"
VERSION = 1
_DIGEST = "sha256"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor and where it stands; the names are those that torch's file reader asks for."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor as a whole, and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class SavedFile:
    """What a data file must be."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """An optimizer's kind, its groups in torch's form, and what of its state is no tensor, by parameter and key."""

    kind: str
    groups: tuple[dict[str, Any], ...]
    tensors: tuple[tuple[str, str], ...]
    values: tuple[tuple[str, str, Any], ...]


@dataclass(frozen=True, slots=True)
class Index:
    """All that must be known to read a checkpoint."""

    plan: str
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]
    optimizer: SavedOptimizer | None
    extra: dict[str, Any]


def describe(metadata: Metadata) -> dict[str, SavedTensor]:
    """The tensors of what torch has just written."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    found: dict[str, SavedTensor] = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), f"{name} is no tensor"
        chunks = []
        for chunk in entry.chunks:
            where = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            place = (where.relative_path, where.offset, where.length)
            chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), *place))
        found[name] = SavedTensor(tuple(entry.size), entry.properties.dtype, tuple(chunks))
    return found


def as_metadata(tensors: Mapping[str, SavedTensor]) -> Metadata:
    """What torch's reader needs to know of tensors."""
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Chunk] = {}
    for name, tensor in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in tensor.chunks]
        properties = TensorProperties(dtype=tensor.dtype)
        entries[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        places.update((MetadataIndex(name, chunk.offsets), chunk) for chunk in tensor.chunks)
    return Metadata(state_dict_metadata=entries, storage_data=places)


def index_to_text(index: Index) -> str:
    """The index as it stands in its file, with a digest of itself."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "plan": index.plan,
        "files": {name: asdict(file) for name, file in index.files.items()},
        "tensors": {name: _tensor_to_json(tensor) for name, tensor in index.tensors.items()},
        "optimizer": _optimizer_to_json(index.optimizer),
        "extra": index.extra,
    }
    return json.dumps({**data, _DIGEST: _digest(data)}, separators=(",", ":")) + "\n"


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _tensor_to_json(tensor: SavedTensor) -> dict[str, Any]:
    chunks = [[list(c.offsets), list(c.sizes), c.relative_path, c.offset, c.length] for c in tensor.chunks]
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "chunks": chunks}


def _optimizer_to_json(optimizer: SavedOptimizer | None) -> dict[str, Any] | None:
    if optimizer is None:
        return None
    return {
        "kind": optimizer.kind,
        "groups": [{key: encode(value) for key, value in group.items()} for group in optimizer.groups],
        "tensors": [list(entry) for entry in optimizer.tensors],
        "values": [[name, key, encode(value)] for name, key, value in optimizer.values],
    }


def encode(value: Any) -> Any:
    """A setting of an optimizer as plain data: numbers, text, collections and one-element tensors.

    >>> encode((0.9, 0.999))
    {'tuple': [0.9, 0.999]}
    """
    match value:
        case None | bool() | int() | float() | str():
            return value
        case tuple():
            return {"tuple": [encode(item) for item in value]}
        case list():
            return {"list": [encode(item) for item in value]}
        case dict() if all(isinstance(key, str) for key in value):
            return {"dict": {key: encode(item) for key, item in value.items()}}
        case Tensor() if value.numel() == 1 and not value.is_complex():
            return {"tensor": [value.item(), str(value.dtype).removeprefix("torch."), list(value.shape)]}
        case _:
            raise ValueError(f"a {type(value).__name__} has no form in a checkpoint")


def check_settings(value: Any) -> None:
    """Raise ValueError for settings that would not come back from a file as they are."""
    written = json.dumps(encode(value))
    if json.dumps(encode(decode(json.loads(written)))) != written:
        raise ValueError(f"{str(value)[:60]} would not come back as it is")


def decode(data: Any) -> Any:
    """Read what `encode` wrote.

    >>> decode({"tuple": [0.9, 0.999]})
    (0.9, 0.999)
    """
    match data:
        case None | bool() | int() | float() | str():
            return data
        case {"tuple": list(items), **rest} if not rest:
            return tuple(decode(item) for item in items)
        case {"list": list(items), **rest} if not rest:
            return [decode(item) for item in items]
        case {"dict": dict(entries), **rest} if not rest:
            return {key: decode(item) for key, item in entries.items()}
        case {"tensor": [bool() | int() | float() as item, str(dtype), list(shape)], **rest} if not rest:
            sizes = _sizes(shape, "the shape of a setting")
            if prod(sizes) != 1:
                raise ValueError("a setting has more than one element")
            return torch.tensor(item, dtype=_dtype(dtype)).reshape(sizes)
        case _:
            raise ValueError(f"{str(data)[:60]} is not a setting of an optimizer")


def index_from_json(data: Any) -> Index:
    """Rebuild an index from plain data; ValueError, LookupError or TypeError says what is wrong with it."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"its 'format' is not {FORMAT!r}")
    if type(data.get("version")) is not int or data["version"] != VERSION:
        raise ValueError(f"its format version is not {VERSION}")
    body = {key: value for key, value in data.items() if key != _DIGEST}
    if data.get(_DIGEST) != _digest(body):
        raise ValueError("its digest is not that of its content")
    if body.keys() != {"format", "version", "plan", "files", "tensors", "optimizer", "extra"}:
        raise ValueError("it has other entries than an index")
    files = {_file_name(name): _file(entry) for name, entry in _mapping(data["files"], "files").items()}
    tensors = {name: _tensor(name, entry, files) for name, entry in _mapping(data["tensors"], "tensors").items()}
    return Index(
        _text(data["plan"]), files, tensors, _optimizer(data["optimizer"], tensors), _mapping(data["extra"], "extra")
    )


def _mapping(data: Any, what: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{what} is not a table")
    return data


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise ValueError(f"{str(data)[:60]} is not text")
    return data


def _number(data: Any, what: str) -> int:
    if type(data) is not int or not 0 <= data < 2**62:
        raise ValueError(f"{what} is {str(data)[:40]}, no size")
    return data


def _sizes(data: Any, what: str) -> tuple[int, ...]:
    if not isinstance(data, list) or len(data) > 64:
        raise ValueError(f"{what} is not a list of sizes")
    return tuple(_number(size, what) for size in data)


def _dtype(data: Any) -> torch.dtype:
    found = vars(torch).get(_text(data))
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{data[:40]!r} is not a dtype")
    return found


def _file_name(name: str) -> str:
    if not name.endswith(".distcp") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"{name[:60]!r} is not the name of a data file")
    return name


def _file(data: Any) -> SavedFile:
    match data:
        case {"bytes": size, "sha256": str(digest), **rest} if not rest:
            return SavedFile(_number(size, "the size of a file"), digest)
        case _:
            raise ValueError(f"{str(data)[:60]} does not describe a file")


def _tensor(name: str, data: Any, files: Mapping[str, SavedFile]) -> SavedTensor:
    match data:
        case {"shape": shape, "dtype": dtype, "chunks": list(entries), **rest} if not rest:
            pass
        case _:
            raise ValueError(f"{name[:60]} is not described as a tensor")
    sizes, kind = _sizes(shape, f"the shape of {name[:60]}"), _dtype(dtype)
    chunks = tuple(_chunk(name, entry, sizes, files) for entry in entries)
    if any(chunk.length < prod(chunk.sizes) * kind.itemsize for chunk in chunks):
        raise ValueError(f"a chunk of {name[:60]} is larger than its place in the file")
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(sizes) or not chunks:
        raise ValueError(f"the chunks of {name[:60]} are not the whole of it")
    return SavedTensor(sizes, kind, chunks)


def _chunk(name: str, data: Any, shape: tuple[int, ...], files: Mapping[str, SavedFile]) -> Chunk:
    match data:
        case [offsets, sizes, str(file), start, length] if file in files:
            pass
        case _:
            raise ValueError(f"{str(data)[:60]} is not a chunk of {name[:60]}")
    what = f"a chunk of {name[:60]}"
    chunk = Chunk(_sizes(offsets, what), _sizes(sizes, what), file, _number(start, what), _number(length, what))
    if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        raise ValueError(f"{what} has other dims than the whole")
    if any(o + s > whole for o, s, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
        raise ValueError(f"{what} lies outside of it")
    if chunk.offset + chunk.length > files[file].bytes:
        raise ValueError(f"{what} lies outside of its file")
    return chunk


def _optimizer(data: Any, tensors: Mapping[str, SavedTensor]) -> SavedOptimizer | None:
    match data:
        case None:
            return None
        case {"kind": str(kind), "groups": list(groups), "tensors": list(names), "values": list(values), **rest}:
            if rest:
                raise ValueError("the optimizer has unknown entries")
        case _:
            raise ValueError("the optimizer is not described as one")
    return SavedOptimizer(
        kind,
        tuple(_group(group) for group in groups),
        tuple(_state_name(entry, tensors) for entry in names),
        tuple(_state_value(entry) for entry in values),
    )


def _group(data: Any) -> dict[str, Any]:
    group = {key: decode(value) for key, value in _mapping(data, "a parameter group").items()}
    names = group.get("params")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError("a parameter group does not name its parameters")
    return group


def state_key(parameter: str, key: str) -> str:
    """The name in the checkpoint of a tensor that an optimizer keeps of a parameter."""
    return f"optimizer.state.{parameter}.{key}"


def _state_name(data: Any, tensors: Mapping[str, SavedTensor]) -> tuple[str, str]:
    match data:
        case [str(parameter), str(key)] if state_key(parameter, key) in tensors:
            return parameter, key
        case _:
            raise ValueError(f"{str(data)[:60]} does not name a tensor of the optimizer")


def _state_value(data: Any) -> tuple[str, str, Any]:
    match data:
        case [str(parameter), str(key), value]:
            return parameter, key, decode(value)
        case _:
            raise ValueError(f"{str(data)[:60]} is not a value of the optimizer")
