"""Weights written to files under the model's own names, for everyone who reads safetensors or torch's files.

Tensors are gathered one at a time, and rank 0 writes each as it comes. Files are written aside; the last that gets its
name is the one that readers begin with, so a save that is killed leaves what was there before.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from conjoin.errors import CheckpointError, UsageError
from conjoin.ir import read_json
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.joint_action import meet, together
from conjoin.runtime.state.pieces import full_state_dict, gathered_whole
from conjoin.runtime.state.safetensors_file import DTYPES, data_of, header_bytes, read_header
from conjoin.runtime.state.storage import Content
from conjoin.runtime.state.target import target_of
from conjoin.runtime.state.weight_files import INDEX_SUFFIX, PICKLED, SAFETENSORS

_WHOLE = "model.safetensors"
_ASIDE = ".weights-"
MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True)
class _Exported:
    """A tensor to be written."""

    content: Content
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.content.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.content.type.shape

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


_Shard = list[_Exported]


def save_weights(
    path: str | Path, step: ParallelModule, *, max_shard_bytes: int = MAX_SHARD_BYTES, dtype: torch.dtype | None = None
) -> None:
    """Write a module's weights under the model's own names, as safetensors; on every rank.

    A folder gets one file, or several with an index where one would have more than `max_shard_bytes`, as Hugging Face's
    models do; weights that are there already are replaced when all is written, other files stay. A path that ends in
    .safetensors is one file, in .pt, .pth or .bin one of torch, which rank 0 holds as a whole. A tied weight is written
    once. Floats are written in `dtype`, or as they are.
    """
    target, step = target_of(path, step)
    if max_shard_bytes < 1 or (dtype is not None and not dtype.is_floating_point):
        raise UsageError(
            f"Weights were to be saved as {target} in files of at most {max_shard_bytes:,} bytes, in {dtype}. A file "
            f"needs some bytes, and only floats are converted. Give more than 0 bytes, and a dtype as torch.bfloat16."
        )
    meet(step.communicator, "save_weights")
    shards = together(lambda: _draft(target, step, max_shard_bytes, dtype))
    if target.suffix in PICKLED:
        state = full_state_dict(step)
        together(lambda: _write_pickled(target, state, dtype) if step.communicator.rank == 0 else None)
        return
    writing = _Writing(target, shards) if step.communicator.rank == 0 else None
    for number, shard in enumerate(shards):
        for tensor in shard:
            whole = gathered_whole(step, tensor.content)
            if writing is not None:
                writing.add(number, whole.to(tensor.dtype))
    together(lambda: None if writing is None else writing.finish())


def _draft(target: Path, step: ParallelModule, max_shard_bytes: int, dtype: torch.dtype | None) -> list[_Shard]:
    """What goes into which file; refused before anything is written where it cannot be."""
    is_file = _is_file(target)
    check_weights_target(target)
    shards: list[_Shard] = [[]]
    for tensor in _exported(step, dtype):
        filled = sum(other.bytes for other in shards[-1])
        if shards[-1] and not is_file and filled + tensor.bytes > max_shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
        if target.suffix not in PICKLED and tensor.dtype not in DTYPES.values():
            raise CheckpointError(
                f"Weights were to be saved as {target}. {tensor.name} is {tensor.dtype}, which safetensors has no word "
                f"for. Save them as a file that ends in .pt, or by save_checkpoint."
            )
    return shards


def _is_file(target: Path) -> bool:
    return target.suffix in (SAFETENSORS, *PICKLED)


def check_weights_target(target: str | Path) -> None:
    """Refuse, before what is to be saved is computed, a path where no weights can be written."""
    target = Path(target).absolute()
    folder = target.parent if _is_file(target) or not target.exists() else target
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and not (_is_file(target) and target.is_dir()):
        return
    raise CheckpointError(
        f"Weights were to be saved as {target}. There is no folder {folder} that may be written to, or something else "
        f"has that name. Make the folder first, or choose another path."
    )


def _exported(step: ParallelModule, dtype: torch.dtype | None) -> Iterator[_Exported]:
    for content in step.store.contents:
        if content.first == content.name:
            own = content.type.dtype
            yield _Exported(content, dtype if dtype is not None and own.is_floating_point else own)


class _Writing:
    """Files under way. What fails is told at the end: until then the other ranks gather, and must not wait for this."""

    def __init__(self, target: Path, shards: Sequence[_Shard]) -> None:
        self._target, self._shards = target, shards
        self._is_file = target.suffix == SAFETENSORS
        self._folder = target.parent if self._is_file else target
        self._asides: list[Path] = []
        self._file: BinaryIO | None = None
        self._error: OSError | None = None

    def add(self, number: int, whole: Tensor) -> None:
        """Write a tensor to the file of a number; files are written one after the other."""
        if self._error is not None:
            return
        try:
            if number == len(self._asides):
                self._open(self._shards[number])
            assert self._file is not None
            for block in data_of(whole):
                self._file.write(block)
        except OSError as error:
            self._error = error
            self._discard()

    def _open(self, shard: _Shard) -> None:
        self._close()
        self._folder.mkdir(exist_ok=True)
        self._asides.append(self._folder / f"{_ASIDE}{uuid.uuid4().hex}")
        self._file = self._asides[-1].open("xb")
        self._file.write(header_bytes({tensor.name: (tensor.shape, tensor.dtype) for tensor in shard}))

    def _close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        self._file = None

    def _discard(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # closing writes what is left, for which there is no room either
                self._file.close()
            self._file = None
        for aside in self._asides:
            aside.unlink(missing_ok=True)

    def finish(self) -> None:
        """Give the files their names."""
        try:
            if self._error is None:
                if not self._asides:  # a model without tensors is a file with none
                    self._open([])
                self._close()
                self._place()
        except OSError as error:
            self._error = error
            self._discard()
        if self._error is not None:
            raise _not_written(self._target, self._error)

    def _place(self) -> None:
        for aside in self._asides:
            read_header(aside)
        if self._is_file:
            self._asides[0].replace(self._target)
            return
        before = _weights_in(self._folder)
        if len(self._asides) == 1:
            self._asides[0].replace(self._folder / _WHOLE)
            new = {self._folder / _WHOLE}
        else:
            new = self._place_shards()
        for old in before - new:
            old.unlink(missing_ok=True)

    def _place_shards(self) -> set[Path]:
        names = _free_names(self._folder, len(self._asides))
        for aside, name in zip(self._asides, names, strict=True):
            aside.rename(self._folder / name)
        tensors = [tensor for shard in self._shards for tensor in shard]
        index = {
            "metadata": {
                "total_parameters": sum(prod(tensor.shape) for tensor in tensors),
                "total_size": sum(tensor.bytes for tensor in tensors),
            },
            "weight_map": {t.name: name for shard, name in zip(self._shards, names, strict=True) for t in shard},
        }
        aside, place = self._folder / f"{_ASIDE}{uuid.uuid4().hex}", self._folder / (_WHOLE + INDEX_SUFFIX)
        aside.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        aside.replace(place)
        return {place, *(self._folder / name for name in names)}


def _free_names(folder: Path, count: int) -> list[str]:
    """Names for shards that no file has: those of weights that are to be replaced are read until the index is new."""
    version = 1
    while True:
        stem = "model" if version == 1 else f"model.{version}"
        names = [f"{stem}-{i + 1:05d}-of-{count:05d}{SAFETENSORS}" for i in range(count)]
        if not any((folder / name).exists() for name in names):
            return names
        version += 1


def _weights_in(folder: Path) -> set[Path]:
    """The files of weights that stand in a folder, and what killed saves have left there."""
    index = folder / (_WHOLE + INDEX_SUFFIX)
    names = {_WHOLE, index.name}
    if index.exists():
        with suppress(CheckpointError):  # one that cannot be read names nothing
            match read_json(index, "index of weights", CheckpointError):
                case {"weight_map": dict(shards)}:
                    names |= {str(shard) for shard in shards.values() if str(shard).endswith(SAFETENSORS)}
    return {entry for entry in folder.iterdir() if entry.name in names or entry.name.startswith(_ASIDE)}


def _write_pickled(target: Path, state: dict[str, Tensor], dtype: torch.dtype | None) -> None:
    made: dict[int, Tensor] = {}
    for tensor in state.values():
        made[id(tensor)] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
    aside = target.with_name(f"{_ASIDE}{uuid.uuid4().hex}")
    try:
        with aside.open("xb") as file:
            torch.save({name: made[id(tensor)] for name, tensor in state.items()}, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
    except (OSError, RuntimeError) as error:  # torch's own comes while it closes a file that the disk had no room for
        aside.unlink(missing_ok=True)
        raise _not_written(target, error.__context__ if isinstance(error.__context__, OSError) else error) from None
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _not_written(target: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"Weights were to be saved as {target}. Writing failed: {error}. What was there before is as it was; make "
        f"room, or choose another path."
    )
