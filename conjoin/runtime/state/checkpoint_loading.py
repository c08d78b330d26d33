"""Loading a checkpoint: everything is checked before anything changes, then every rank reads its own pieces."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conjoin.errors import CheckpointError
from conjoin.ir import read_json
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.joint_action import exchange, meet, place, together
from conjoin.runtime.state.checkpoint import INDEX, digest_of, previous_of
from conjoin.runtime.state.checkpoint_index import (
    Index,
    SavedOptimizer,
    as_metadata,
    index_from_json,
    index_to_text,
    state_key,
)
from conjoin.runtime.state.optimizer_state import (
    GROUPS,
    PARAMS,
    STATE,
    group_faults,
    is_split_state,
    load_optimizer_state_dict,
    parameter_names,
)
from conjoin.runtime.state.pieces import as_piece, count, listed, state_tensors
from conjoin.runtime.state.target import target_of

_MODEL = "model."


@dataclass(frozen=True, slots=True)
class _Checked:
    """A checkpoint that is whole and fits."""

    folder: Path
    index: Index


def load_checkpoint(path: str | Path, step: ParallelModule, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Load what `save_checkpoint` wrote, whatever its plan and number of ranks, and give its `extra`; on every rank.

    Files, names, shapes and dtypes are checked first: when a checkpoint is refused nothing has changed.
    """
    target, step = target_of(path, step)
    meet(step.communicator, "load_checkpoint")
    checked = together(lambda: _check(target, step, optimizer))
    _check_alike(target, exchange(hashlib.sha256(index_to_text(checked.index).encode()).hexdigest()))
    together(lambda: _read(checked, step, optimizer))
    return checked.index.extra


def _check_alike(target: Path, indices: list[str]) -> None:
    other = next((rank for rank, index in enumerate(indices) if index != indices[0]), None)
    if other is not None:
        raise CheckpointError(
            f"The checkpoint {target} was to be loaded. Rank {other} has another one than rank 0 there. Give all ranks "
            f"the same checkpoint, or a copy of it."
        )


def _check(target: Path, step: ParallelModule, optimizer: Optimizer | None) -> _Checked:
    folder = target if target.exists() else previous_of(target)
    index = _read_index(target, folder)
    faults = _model_faults(step, index)
    if optimizer is not None:
        faults += _optimizer_faults(step, optimizer, index)
    if faults:
        raise CheckpointError(
            f"The checkpoint {target} does not fit in {count(len(faults), 'place')}. It is of another model or another "
            f"optimizer. Load it into what it was saved from:\n{listed(faults)}"
        )
    damages = _damages(folder, index)
    if damages:
        raise CheckpointError(
            f"The checkpoint {target} is damaged in {count(len(damages), 'file')}. A copy was cut short or a disk lost "
            f"data. Copy it again, or load another one:\n{listed(damages)}"
        )
    return _Checked(folder, index)


def _read_index(target: Path, folder: Path) -> Index:
    if not folder.is_dir():
        raise CheckpointError(
            f"A checkpoint was to be loaded from {target}. There is no such directory. Check the path."
        )
    if not (folder / INDEX).exists():
        raise CheckpointError(
            f"A checkpoint was to be loaded from {target}. It has no {INDEX}, so it is not complete or was not written "
            f"by save_checkpoint. Load another one; what plain torch wrote is read into the module's "
            f"state_dict() by torch.distributed.checkpoint.load."
        )
    try:
        return index_from_json(read_json(folder / INDEX, "checkpoint index", CheckpointError))
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"The checkpoint {target} cannot be read: in its {INDEX} {str(error)[:200]}. It was damaged, or written by "
            f"another release. Load another one."
        ) from None


def _model_faults(step: ParallelModule, index: Index) -> list[str]:
    own = {_MODEL + content.name: content for content in step.store.contents}
    saved = {key for key in index.tensors if key.startswith(_MODEL)}
    faults = [f"it does not have {content.name}" for key, content in own.items() if key not in saved]
    faults += [f"it has {key.removeprefix(_MODEL)}, which the module has not" for key in saved if key not in own]
    for key, content in own.items():
        if key in saved:
            tensor, wanted = index.tensors[key], content.type
            if (tensor.shape, tensor.dtype) != (wanted.shape, wanted.dtype):
                there, here = f"{tensor.dtype} {tensor.shape}", f"{wanted.dtype} {wanted.shape}"
                faults.append(f"{content.name} is {there} there, {here} in the module")
    return faults


def _share(step: ParallelModule, saved: SavedOptimizer) -> SavedOptimizer:
    """What of an optimizer's state is this rank's: in a pipeline that of its stages' parameters."""
    elsewhere = {content.name for content in step.store.contents if not step.store.holds(content.name)}
    if not elsewhere:
        return saved
    return SavedOptimizer(
        saved.kind,
        tuple({**g, PARAMS: [name for name in g[PARAMS] if name not in elsewhere]} for g in saved.groups),
        tuple(entry for entry in saved.tensors if entry[0] not in elsewhere),
        tuple(entry for entry in saved.values if entry[0] not in elsewhere),
    )


def _optimizer_faults(step: ParallelModule, optimizer: Optimizer, index: Index) -> list[str]:
    saved, kind = index.optimizer, type(optimizer).__name__
    if saved is None:
        return ["it was saved without an optimizer"]
    if saved.kind != kind:
        return [f"it has the state of {saved.kind}, the optimizer is {kind}"]
    saved = _share(step, saved)
    names = parameter_names(step.store, optimizer)
    by_name: dict[str, Any] = {name: {} for name, *_ in (*saved.tensors, *saved.values)}
    faults = group_faults(names, optimizer, {STATE: by_name, GROUPS: list(saved.groups)})
    parameters = {name: parameter for parameter, name in names.items()}
    for name, key in saved.tensors:
        shape = index.tensors[state_key(name, key)].shape
        if name in parameters and is_split_state(step.store, name, parameters[name], shape):
            whole = step.store.shape(name, parameters[name])
            if shape != whole:
                faults.append(f"{key} of {name} has shape {shape} there, the parameter {whole}")
    return faults


def _damages(folder: Path, index: Index) -> list[str]:
    """What is wrong with the data files: all sizes are looked at, and this rank's share of digests."""
    found = []
    rank, ranks = place()
    for i, (name, file) in enumerate(index.files.items()):
        path = folder / name
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != file.bytes:
            found.append(f"{name} has {path.stat().st_size:,} bytes instead of {file.bytes:,}")
        elif i % ranks == rank and digest_of(path) != file.sha256:
            found.append(f"{name} has other content than was saved")
    return found


def _read(checked: _Checked, step: ParallelModule, optimizer: Optimizer | None) -> None:
    """Read this rank's pieces into place; the whole checkpoint has been checked."""
    state = {_MODEL + name: value for name, value in _model_targets(step).items()}
    kept: dict[str, dict[str, Any]] = {}
    saved = None if checked.index.optimizer is None else _share(step, checked.index.optimizer)
    if optimizer is not None and saved is not None:
        for name, key, value in _optimizer_targets(step, optimizer, checked.index):
            kept.setdefault(name, {})[key] = state[state_key(name, key)] = value
        for name, key, value in saved.values:
            kept.setdefault(name, {})[key] = value
    try:
        _read_tensors(checked, state)
    except Exception as error:
        raise CheckpointError(
            f"Reading {checked.folder} broke off: {type(error).__name__}, {str(error)[:200]}. Some parameters have "
            f"their new values, others not. Load again before going on."
        ) from error
    step.load_state_dict({name: state[_MODEL + name] for name, _ in state_tensors(step.store)})
    if optimizer is not None and saved is not None:
        load_optimizer_state_dict(step, optimizer, {STATE: kept, GROUPS: list(saved.groups)})


def _model_targets(step: ParallelModule) -> dict[str, Tensor]:
    """Where to read to: into the parameters, and into new tensors for buffers."""
    targets = {}
    for name, local in state_tensors(step.store):
        into = local.detach() if isinstance(local, nn.Parameter) else torch.empty_like(local)
        targets[name] = as_piece(step.store, name, into)
    return targets


def _optimizer_targets(step: ParallelModule, optimizer: Optimizer, index: Index) -> list[tuple[str, str, Tensor]]:
    """New tensors to read the state of an optimizer to, split as the parameters are."""
    parameters = {name: parameter for parameter, name in parameter_names(step.store, optimizer).items()}
    targets: list[tuple[str, str, Tensor]] = []
    for name, key in _share(step, index.optimizer).tensors if index.optimizer else ():
        tensor, parameter = index.tensors[state_key(name, key)], parameters[name]
        if tensor.shape == step.store.shape(name, parameter):
            into = torch.empty_like(parameter, dtype=tensor.dtype, requires_grad=False)
            targets.append((name, key, as_piece(step.store, name, into)))
        else:
            targets.append((name, key, torch.empty(tensor.shape, dtype=tensor.dtype)))
    return targets


def _read_tensors(checked: _Checked, state: dict[str, Tensor]) -> None:
    """Let torch find and read the chunks that this rank needs; ranks need nothing from each other for that."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    metadata = as_metadata({name: checked.index.tensors[name] for name in state})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(state), metadata, is_coordinator=True)
    reader = FileSystemReader(checked.folder)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(planner.finish_plan(plan), planner).wait()
