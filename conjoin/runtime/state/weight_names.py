"""Which tensor of a file is which of the model: names, tied weights, prefixes, and what is left on either side.

Nothing is guessed: names are the model's own, or all of them with one prefix more or less where only one prefix fits,
as between a model and the same model under a head. Every other difference is told with the nearest name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from conjoin.ops import TensorType
from conjoin.runtime.state.storage import is_persistent

_NEAREST_SHOWN = 8
"""Differences for which the nearest name is looked for, which takes a while among thousands."""


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """A parameter or persistent buffer of the model, under all its names."""

    names: tuple[str, ...]
    type: TensorType


@dataclass(frozen=True, slots=True)
class OwnNames:
    """What a model has to be loaded, and what it says of names that differ."""

    tensors: tuple[OwnTensor, ...]
    derived: frozenset[str]
    """Buffers that are no part of its state."""
    may_lack: tuple[str, ...]
    """Patterns of what files may lack, as models of transformers state them."""
    may_have: tuple[str, ...]
    """Patterns of what files may have more."""


def own_names(model: nn.Module) -> OwnNames:
    """What a model has to be loaded."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    derived = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        tensors[id(parameter)] = parameter
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if not is_persistent(model, name):
            derived.append(name)
            continue
        names.setdefault(id(buffer), []).append(name)
        tensors[id(buffer)] = buffer
    own = [OwnTensor(tuple(names[key]), TensorType(tuple(x.shape), x.dtype)) for key, x in tensors.items()]
    may_lack, may_have = (_stated(model, kind) for kind in ("missing", "unexpected"))
    return OwnNames(tuple(own), frozenset(derived), may_lack, may_have)


def _stated(model: nn.Module, kind: str) -> tuple[str, ...]:
    found = getattr(model, f"_keys_to_ignore_on_load_{kind}", None)
    return tuple(found) if isinstance(found, list | tuple | set) else ()


@dataclass(frozen=True, slots=True)
class Pairing:
    """What is read for each tensor of the model, what is told of it, and why it cannot be."""

    sources: Mapping[str, tuple[str, ...]]
    """For the first name of a tensor its names in the files; where there are several, their values must be the same."""
    notes: tuple[str, ...]
    faults: tuple[str, ...]


def pair(own: OwnNames, files: Mapping[str, TensorType], new: Iterable[str], unused: Iterable[str]) -> Pairing:
    """Find every tensor of the model in files, but for those that are `new`; `unused` ones of the files are left."""
    lacking, unneeded = _matching(new, own.may_lack), _matching((), own.may_have)
    is_unused = _matching(unused, ())
    taken = [name for name in files if not is_unused(name)]
    rename, told = _renaming({name for tensor in own.tensors for name in tensor.names}, taken)
    by_own_name = {rename(name): name for name in taken}
    sources: dict[str, tuple[str, ...]] = {}
    missing: list[str] = []
    anew: list[str] = []
    faults: list[str] = []
    for tensor in own.tensors:
        found = tuple(by_own_name.pop(name) for name in tensor.names if name in by_own_name)
        if found:
            sources[tensor.names[0]] = found
            faults += [fault for name in found for fault in _unlike(name, files[name], tensor.type)]
        else:
            (anew if any(map(lacking, tensor.names)) else missing).append(tensor.names[0])
    left = [name for name in files if is_unused(name)]
    left += [found for name, found in by_own_name.items() if name in own.derived or unneeded(name)]
    unexpected = sorted(set(by_own_name.values()) - set(left))
    faults += _with_nearest(missing, unexpected, "is not in the files")
    faults += _with_nearest(unexpected, missing, "is no tensor of the model")
    notes = [
        *told,
        *_conversions(own, sources, files),
        *_counted(left, "of the files not used"),
        *_counted(anew, "not in the files, which begin anew"),
    ]
    return Pairing(sources, tuple(notes), tuple(faults))


def _matching(patterns: Iterable[str], stated: Iterable[str]) -> Callable[[str], bool]:
    """Whether a name, or a module that it lies in, is one of these; `stated` are regular expressions."""
    own, expressions = list(patterns), [re.compile(text) for text in stated]

    def matches(name: str) -> bool:
        parts = name.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))]
        asked = any(fnmatchcase(path, pattern) for pattern in own for path in paths)
        return asked or any(expression.search(name) for expression in expressions)

    return matches


def _renaming(own: set[str], files: list[str]) -> tuple[Callable[[str], str], list[str]]:
    """What the model calls a tensor of the files, and what is to be told of that."""
    if any(name in own for name in files):
        return str, []
    longer = [p for p in {name.partition(".")[0] for name in own} if any(f"{p}.{name}" in own for name in files)]
    stems = {name.partition(".")[0] for name in files}
    shorter = [p for p in stems if any(n.startswith(f"{p}.") and n.removeprefix(f"{p}.") in own for n in files)]
    if len(longer) + len(shorter) != 1:
        return str, []
    if longer:
        return lambda name: f"{longer[0]}.{name}", [f"names in the files are taken with {longer[0]}. before them"]
    return lambda name: name.removeprefix(f"{shorter[0]}."), [f"names in the files are taken without {shorter[0]}."]


def _kind(dtype: torch.dtype) -> str:
    """Between dtypes of one kind values are converted."""
    if dtype.is_floating_point:
        return "float"
    return "complex" if dtype.is_complex else str(dtype)


def _unlike(name: str, found: TensorType, wanted: TensorType) -> list[str]:
    if found.shape == wanted.shape and _kind(found.dtype) == _kind(wanted.dtype):
        return []
    return [f"{name} is {found} in the files and {wanted} in the model"]


def _with_nearest(names: list[str], others: list[str], what: str) -> list[str]:
    told = []
    for i, name in enumerate(names):
        near = get_close_matches(name, others, n=1) if i < _NEAREST_SHOWN else []
        told.append(f"{name} {what}" + (f"; the nearest is {near[0]}" if near else ""))
    return told


def _conversions(own: OwnNames, sources: Mapping[str, tuple[str, ...]], files: Mapping[str, TensorType]) -> list[str]:
    counts: dict[tuple[torch.dtype, torch.dtype], int] = {}
    for tensor in own.tensors:
        for name in sources.get(tensor.names[0], ())[:1]:
            if files[name].dtype != tensor.type.dtype:
                key = files[name].dtype, tensor.type.dtype
                counts[key] = counts.get(key, 0) + 1
    return [f"{number} tensors converted from {have} to {want}" for (have, want), number in counts.items()]


def _counted(names: list[str], what: str) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    return [f"{len(names)} {what}: {shown}"]
