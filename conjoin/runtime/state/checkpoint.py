"""Checkpoints of a parallel module and its optimizer: whole or not there at all, and independent of plan and ranks.

A checkpoint is a directory of `torch.distributed.checkpoint` with an index of our own. It is written aside and renamed
when all ranks have written their part, so a save that is killed leaves the previous checkpoint in its place:

    .NAME.partial-…   being written
    NAME              complete
    .NAME.previous    the one before, for as long as the new one takes its place

Plain torch reads the module's tensors with `dcp.load({"model": model.state_dict()}, checkpoint_id=NAME)`. That
unpickles the `.metadata` file, as torch's checkpoints do, and is for directories that are trusted. `load_checkpoint`
unpickles nothing: it reads the index, which is JSON, and tensors, which torch loads with `weights_only=True`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from conjoin.errors import CheckpointError
from conjoin.ir import Pipeline, fingerprint_of, read_json
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.joint_action import exchange, meet, place, together
from conjoin.runtime.state.checkpoint_index import (
    Index,
    SavedFile,
    SavedOptimizer,
    check_settings,
    describe,
    index_from_json,
    index_to_text,
)
from conjoin.runtime.state.optimizer_state import GROUPS, PARAMS, STATE, state_by_name
from conjoin.runtime.state.pieces import count
from conjoin.runtime.state.target import target_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

INDEX = "conjoin.json"
_OURS = (".metadata", ".distcp", INDEX)
"""How the files of a checkpoint end; a directory with others is never replaced."""


def save_checkpoint(
    path: str | Path, step: ParallelModule, optimizer: Optimizer | None = None, extra: Mapping[str, Any] | None = None
) -> None:
    """Save a module, its optimizer and a few facts of your own (`extra`, as JSON) to a directory; on every rank.

    A checkpoint that is already there is replaced when the new one is complete.
    """
    target, step = target_of(path, step)
    _check_ranks(step)
    meet(step.communicator, "save_checkpoint")
    _check_alike(exchange(str(target)))
    draft, state = together(lambda: _draft(target, step, optimizer, extra))
    partial = target.with_name(exchange(f".{target.name}.partial-{uuid.uuid4().hex}")[0])
    try:
        metadata = together(lambda: _write_tensors(state, partial))
        shares = exchange(together(lambda: _digest_share(partial, metadata)))
        files = {name: file for share in shares for name, file in share.items()}
        drafts = exchange(draft.optimizer)
        saved = together(lambda: _of_all_stages(step, drafts))
        index = Index(draft.plan, files, describe(metadata), saved, draft.extra)
        together(lambda: _finish(target, partial, index) if place()[0] == 0 else None)
    except CheckpointError as error:
        if place()[0] == 0:
            shutil.rmtree(partial, ignore_errors=True)
        if str(target) in str(error):
            raise
        raise CheckpointError(f"{error}\n  at {target}") from error


def _draft(
    target: Path, step: ParallelModule, optimizer: Optimizer | None, extra: Mapping[str, Any] | None
) -> tuple[Index, dict[str, Any]]:
    """The index as far as it is known before the tensors are written, and the tensors."""
    check_target(target)
    state: dict[str, Any] = {"model": step.state_dict()}
    saved = None
    if optimizer is not None:
        saved, tensors = _draft_optimizer(step, optimizer)
        if tensors:
            state["optimizer"] = {STATE: tensors}
    return Index(fingerprint_of(step.plan), {}, {}, saved, _plain(extra or {})), state


def _check_alike(targets: list[str]) -> None:
    other = next((rank for rank, target in enumerate(targets) if target != targets[0]), None)
    if other is not None:
        raise CheckpointError(
            f"A checkpoint was to be saved as {targets[0]} by rank 0, and as {targets[other]} by rank {other}. All "
            f"ranks write their parts of one checkpoint. Give all the same path, for instance that of rank 0."
        )


def _check_ranks(step: ParallelModule) -> None:
    there, wanted = place()[1], step.plan.mesh.size
    if there != wanted:
        raise CheckpointError(
            f"A checkpoint of a plan for {count(wanted, 'rank')} was to be saved by {count(there, 'process')}. Every "
            f"rank must write its part at the same time. Call save_checkpoint in every process of the group."
        )


def check_target(path: str | Path) -> None:
    """Refuse a path that no checkpoint may be saved as."""
    target = Path(os.path.abspath(path))
    if not target.parent.is_dir():
        raise CheckpointError(
            f"A checkpoint was to be saved as {target}. There is no directory {target.parent}. Make it first."
        )
    if not target.exists():
        return
    names = [entry.name for entry in target.iterdir()] if target.is_dir() else [target.name]
    if names and (INDEX not in names or not all(name.endswith(_OURS) for name in names)):
        raise CheckpointError(
            f"A checkpoint was to be saved as {target}. That is there already and is not a checkpoint, or holds other "
            f"files too, which would be lost. Choose another path, or move it away."
        )


def _plain(extra: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(extra)), object_pairs_hook=_table)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"The extra facts of a checkpoint cannot be saved: {str(error)[:200]}. They are kept as JSON, which holds "
            f"numbers, text, lists and tables of them. Leave the rest out, or save it on its own."
        ) from None
    return plain


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"two of the keys {str([key for key, _ in pairs])[:100]} are the same as text")
    return found


def _draft_optimizer(step: ParallelModule, optimizer: Optimizer) -> tuple[SavedOptimizer, dict[str, dict[str, Any]]]:
    """What of an optimizer goes into the index, and its tensors."""
    found = state_by_name(step.store, optimizer)
    tensors: dict[str, dict[str, Any]] = {}
    values = []
    for name, entries in found[STATE].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors.setdefault(name, {})[key] = value
            else:
                values.append((name, key, value))
    keys = tuple((name, key) for name, entries in tensors.items() for key in entries)
    saved = SavedOptimizer(type(optimizer).__name__, tuple(found[GROUPS]), keys, tuple(values))
    try:
        check_settings([list(saved.groups), list(saved.values)])
        for name, key, *_ in (*saved.tensors, *saved.values):
            if not isinstance(key, str):
                raise ValueError(f"the state of {name} has the key {key!r:.60}, which is not text")
    except (ValueError, RecursionError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"A checkpoint of {saved.kind} was asked for, in whose settings {error}. Settings are kept as JSON. Use "
            f"numbers and text there, or save the optimizer on its own."
        ) from None
    return saved, tensors


def _of_all_stages(step: ParallelModule, drafts: Sequence[SavedOptimizer | None]) -> SavedOptimizer | None:
    """What goes into the index of an optimizer: of a pipeline, of which every rank has some parameters, all of it."""
    known = [draft for draft in drafts if draft is not None]
    if not known or not isinstance(step.plan, Pipeline):
        return drafts[0]
    first, order = known[0], {content.name: place for place, content in enumerate(step.store.contents)}
    for other in known[1:]:
        alike = [_settings(group) for group in other.groups] == [_settings(group) for group in first.groups]
        if other.kind != first.kind or not alike:
            raise CheckpointError(
                f"A checkpoint of a pipeline was asked for, whose stages have optimizers that differ: {first.kind} "
                f"with {count(len(first.groups), 'group')} and {other.kind} with {len(other.groups)}, or other "
                f"settings. A checkpoint keeps one. Make the optimizers alike on all ranks."
            )
    groups = [
        {**group, PARAMS: sorted({name for draft in known for name in draft.groups[i][PARAMS]}, key=order.__getitem__)}
        for i, group in enumerate(first.groups)
    ]
    tensors = dict.fromkeys(entry for draft in known for entry in draft.tensors)
    values = {(name, key): value for draft in known for name, key, value in draft.values}
    return SavedOptimizer(first.kind, tuple(groups), tuple(tensors), tuple((*k, v) for k, v in values.items()))


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != PARAMS}


def _write_tensors(state: dict[str, Any], partial: Path) -> Metadata:
    """Have torch write everyone's part, and give its own account of it."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        save(state, storage_writer=FileSystemWriter(partial))
    return FileSystemReader(partial).read_metadata()  # what `save` returns lacks the files' names in some releases


def _digest_share(partial: Path, metadata: Metadata) -> dict[str, SavedFile]:
    """This rank's share of the data files with size and digest."""
    names = sorted({chunk.relative_path for chunk in metadata.storage_data.values()})
    rank, ranks = place()
    return {name: SavedFile((partial / name).stat().st_size, digest_of(partial / name)) for name in names[rank::ranks]}


def digest_of(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return str(hashlib.file_digest(file, "sha256").hexdigest())


def _finish(target: Path, partial: Path, index: Index) -> None:
    """Write the index and let the new checkpoint take the place of the old one."""
    with (partial / INDEX).open("x", encoding="utf-8") as file:
        file.write(index_to_text(index))
        file.flush()
        os.fsync(file.fileno())
    _check_readable(target, partial, index)
    _sync(partial)
    previous = previous_of(target)
    if target.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(target, previous)
    os.rename(partial, target)
    _sync(target.parent)
    for entry in list(target.parent.iterdir()):
        if entry == previous or entry.name.startswith(f".{target.name}.partial-"):
            shutil.rmtree(entry, ignore_errors=True)  # also what killed saves left behind


def _check_readable(target: Path, partial: Path, index: Index) -> None:
    """Nothing takes the place of a checkpoint that could not be loaded again."""
    try:
        read = index_from_json(read_json(partial / INDEX, "checkpoint index", CheckpointError))
        if index_to_text(read) != index_to_text(index):
            raise ValueError("it would not come back as it is")
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError, CheckpointError) as error:
        raise CheckpointError(
            f"A checkpoint was to be saved as {target}. Its {INDEX} could not be read again: {str(error)[:200]}. What "
            f"is there already stays; leave out of the optimizer's settings and of extra what is named here."
        ) from None


def has_checkpoint(path: str | Path) -> bool:
    """Whether `load_checkpoint` would find one there, also where a save was killed that was about to replace it."""
    target = Path(os.path.abspath(path))
    is_empty = target.is_dir() and not any(target.iterdir())
    return (target.exists() and not is_empty) or os.path.exists(previous_of(target))


def previous_of(target: Path) -> Path:
    """Where the checkpoint before stands while the new one takes its place."""
    return target.with_name(f".{target.name}.previous")


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
