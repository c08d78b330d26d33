"""Which files hold a model's weights, and what tensors they have: safetensors and torch's own, one or many.

A path is a file, or a folder as Hugging Face's models are: one file, or shards with an index in JSON that says which
tensor stands in which. Only names, shapes and dtypes are read here; the values come by parts, later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from conjoin.errors import CheckpointError
from conjoin.ir import Region, read_json
from conjoin.ops import TensorType
from conjoin.runtime.state.safetensors_file import Reader, read_header

_WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEX_SUFFIX = ".index.json"
SAFETENSORS, PICKLED = ".safetensors", (".bin", ".pt", ".pth")
_MAPPED_BYTES = 256 * 2**20
"""Pages of a file that were looked at count as memory until the file is let go: it is opened again after so many."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A part of a tensor of a file, and where it is to be copied to."""

    name: str
    region: Region
    into: Tensor


class TensorFile(Protocol):
    """A file with tensors."""

    path: Path
    types: dict[str, TensorType]

    def read(self, wanted: Sequence[Wanted]) -> None:
        """Copy parts of tensors, converted to the dtypes they go to."""


class _Safetensors:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_header(path)
        self.types = {name: TensorType(entry.shape, entry.dtype) for name, entry in self._entries.items()}

    def read(self, wanted: Sequence[Wanted]) -> None:
        with self.path.open("rb") as file:
            reader = Reader(file)
            for part in sorted(wanted, key=lambda part: self._entries[part.name].start):
                reader.read(self._entries[part.name], part.region, part.into)


class _Pickled:
    """What `torch.save` wrote: mapped into memory, and unpickled with `weights_only=True`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.types = {name: TensorType(tuple(x.shape), x.dtype) for name, x in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        if not self.path.is_file():
            raise OSError("it is not a file")
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # whatever a stranger's file makes torch raise
            raise ValueError(_why_not_loaded(error)) from None
        return _state_in(found)

    def read(self, wanted: Sequence[Wanted]) -> None:
        left = list(wanted)
        while left:
            tensors, num_bytes = self._tensors(), 0
            while left and num_bytes < _MAPPED_BYTES:
                part = left.pop()
                found = tensors[part.name].detach()
                if part.into.numel():
                    part.into.copy_(found[tuple(slice(*span) for span in part.region)])
                    num_bytes += found.nbytes


def _why_not_loaded(error: Exception) -> str:
    said = str(error)
    if "mmap can only be used" in said:
        return "it is in the form of torch before 1.6, which can only be read as a whole; save it again by torch.save"
    if "weights_only" in said.lower():
        return f"it holds more than weights, which could run code when it is read ({said.splitlines()[-1][:100]})"
    return said.partition("\n")[0][:200] or type(error).__name__


def _state_in(found: Any) -> dict[str, Tensor]:
    """The table of tensors that a file is, or the one table of tensors that stands in it."""
    if _is_state(found):
        return dict(found)
    inside = [key for key, value in found.items() if _is_state(value)] if isinstance(found, Mapping) else []
    if len(inside) == 1:
        return dict(found[inside[0]])
    if inside:
        raise ValueError(f"it holds {len(inside)} tables of tensors: {', '.join(map(repr, inside[:4]))}")
    raise ValueError("it holds no table of tensors by name")


def _is_state(found: Any) -> bool:
    if not isinstance(found, Mapping) or not found:
        return False
    return all(isinstance(name, str) and _is_plain(value) for name, value in found.items())


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_quantized or value.is_meta)


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """All tensors of a model's weights, and the files that hold them."""

    path: Path
    files: tuple[TensorFile, ...]
    holders: Mapping[str, int]
    """For every tensor which of the files has it."""

    def types(self) -> dict[str, TensorType]:
        return {name: self.files[holder].types[name] for name, holder in self.holders.items()}

    def read(self, wanted: Iterable[Wanted]) -> None:
        """Copy parts of tensors to their places, file by file."""
        by_file: dict[int, list[Wanted]] = {}
        for part in wanted:
            by_file.setdefault(self.holders[part.name], []).append(part)
        for holder, parts in by_file.items():
            try:
                self.files[holder].read(parts)
            except (OSError, ValueError, LookupError) as error:
                raise _unreadable(self.files[holder].path, error) from None


def find_weights(path: str | Path) -> WeightFiles:
    """The files that a path means, each of them checked as far as it can be without reading it through."""
    asked = Path(path)
    target = _chosen(asked) if asked.is_dir() else asked
    if not target.exists():
        raise CheckpointError(
            f"Weights were to be loaded from {asked}. There is no such file or folder here, and nothing is downloaded. "
            f"Check the path, or fetch the weights first."
        )
    if target.name.endswith(INDEX_SUFFIX):
        return _sharded(asked, target)
    file = _opened(target)
    return WeightFiles(asked, (file,), dict.fromkeys(file.types, 0))


def _chosen(folder: Path) -> Path:
    """The file of a folder to begin with, as `from_pretrained` chooses it; else the only one there is."""
    for name in (known for whole in _WHOLE for known in (whole, whole + INDEX_SUFFIX)):
        if (folder / name).exists():
            return folder / name
    found = sorted(entry for entry in folder.iterdir() if entry.suffix in (SAFETENSORS, *PICKLED))
    if len(found) != 1:
        told = "none" if not found else f"{len(found)}, as {', '.join(entry.name for entry in found[:3])}"
        raise CheckpointError(
            f"Weights were to be loaded from the folder {folder}. It has neither {' nor '.join(_WHOLE)} nor an index "
            f"of shards, {_WHOLE[0]}{INDEX_SUFFIX}; of other files with weights it has {told}. Name the file itself, "
            f"or the right folder."
        )
    return found[0]


def _opened(path: Path) -> TensorFile:
    try:
        if path.suffix == SAFETENSORS:
            return _Safetensors(path)
        if path.suffix in PICKLED:
            return _Pickled(path)
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(path, error) from None
    raise CheckpointError(
        f"Weights were to be loaded from {path}. Files of weights are known by their endings, "
        f"{', '.join((SAFETENSORS, *PICKLED))}, and this has another one. Name such a file, or a folder of them."
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"The weights in {path} cannot be read: {str(error)[:300] or type(error).__name__}. The file is damaged, cut "
        f"short or of another kind, and nothing was loaded from it. Fetch it again, or name another one."
    )


def _sharded(asked: Path, index: Path) -> WeightFiles:
    shards = _shards_of(index)
    names = sorted(set(shards.values()))
    files = tuple(_opened(index.parent / name) for name in names)
    numbers = {name: number for number, name in enumerate(names)}
    for name, shard in shards.items():
        if name not in files[numbers[shard]].types:
            raise _bad_index(index, f"{name[:80]} is said to stand in {shard}, which does not have it")
    told = [name for file in files for name in file.types if name not in shards]
    if told:
        raise _bad_index(index, f"{told[0][:80]} stands in a shard and not in the index")
    return WeightFiles(asked, files, {name: numbers[shard] for name, shard in shards.items()})


def _shards_of(index: Path) -> dict[str, str]:
    """For every tensor the file that an index names; only files beside the index may be named."""
    match read_json(index, "index of weights", CheckpointError):
        case {"weight_map": dict(shards)} if shards:
            pass
        case _:
            raise _bad_index(index, "it has no table weight_map")
    for name, shard in shards.items():
        if not isinstance(shard, str) or Path(shard).name != shard or "\\" in shard:
            raise _bad_index(index, f"{name[:80]} is said to stand in {str(shard)[:80]!r}, which is no file beside it")
        if not (index.parent / shard).exists():
            raise _bad_index(index, f"{name[:80]} is said to stand in {shard[:80]!r}, which is not there")
    return dict(shards)


def _bad_index(index: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The weights of {index} cannot be read: {why}. The folder is not complete, or its index is of other weights. "
        f"Fetch it again, or name another folder."
    )
