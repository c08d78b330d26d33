"""Pretrained weights: every rank reads its own pieces out of the files, after all names and shapes were checked."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from conjoin.errors import CheckpointError, UsageError
from conjoin.runtime.state.blocks import views_of
from conjoin.runtime.state.pieces import count, listed, state_tensors
from conjoin.runtime.state.storage import Store
from conjoin.runtime.state.weight_files import Wanted, WeightFiles, find_weights
from conjoin.runtime.state.weight_names import Pairing, own_names, pair

_log = logging.getLogger("conjoin")


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a model's weights come from, and how far they may differ from the model.

    `path` is a file (.safetensors, .pt, .pth, .bin) or a folder, as those of Hugging Face are. What of the model the
    files need not have is `new`, and is initialised as without weights; what they may have besides is `unused`. Both
    name tensors or modules, as "score" or "layers.*.mask".
    """

    path: str | Path
    new: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(isinstance(names, str) for names in (self.new, self.unused)):
            raise UsageError(
                f"Weights were given with new={self.new!r} and unused={self.unused!r}. Each is a tuple of names, and a "
                f"text is not one. Write new=('score',)."
            )


def as_weights(given: Weights | str | PathLike[str]) -> Weights:
    """Weights, or those at a path."""
    match given:
        case Weights():
            return given
        case str() | PathLike():
            return Weights(Path(given))
    raise UsageError(
        f"A {type(given).__name__} was given as weights. Weights are the path of a file or a folder, or "
        f"conjoin.Weights. Pass one of these."
    )


@dataclass(frozen=True, slots=True)
class CheckedWeights:
    """Weights that fit a model."""

    files: WeightFiles
    pairing: Pairing

    @property
    def names(self) -> frozenset[str]:
        """The tensors that they have, each by the first of its names."""
        return frozenset(self.pairing.sources)


def check_weights(weights: Weights, model: nn.Module) -> CheckedWeights:
    """Find the files and compare their names, shapes and dtypes with those of a model; nothing is read."""
    files = find_weights(weights.path)
    pairing = pair(own_names(model), files.types(), weights.new, weights.unused)
    if pairing.faults:
        raise CheckpointError(
            f"The weights in {files.path} do not fit the model in {count(len(pairing.faults), 'place')}. They are of "
            f"another model, or of this one under another head. Give weights that fit, or say by conjoin.Weights what "
            f"is new in the model and what of the files is unused:\n{listed(list(pairing.faults))}"
        )
    return CheckedWeights(files, pairing)


def tell(checked: CheckedWeights) -> None:
    """Say where the weights differ from the model."""
    if checked.pairing.notes:
        _log.warning("weights in %s: %s", checked.files.path, "; ".join(checked.pairing.notes))


def read_weights(checked: CheckedWeights, store: Store) -> None:
    """Read this rank's pieces into its parameters and buffers; a tied weight that the files have twice must be one."""
    tensors, start = dict(state_tensors(store)), time.perf_counter()
    with torch.no_grad():
        checked.files.read(_wanted(checked, store, tensors))
        for name, sources in checked.pairing.sources.items():
            for other in sources[1:]:
                _check_alike(checked, store, name, tensors[name], other)
    num_bytes = sum(tensors[name].nbytes for name in checked.names)
    _log.info("%s bytes of %s were read in %.2f s", num_bytes, checked.files.path, time.perf_counter() - start)


def _wanted(checked: CheckedWeights, store: Store, tensors: dict[str, Tensor]) -> Iterator[Wanted]:
    for name, sources in checked.pairing.sources.items():
        into = tensors[name]
        yield from _parts_wanted(store, name, sources[0], into.detach())


def _parts_wanted(store: Store, name: str, source: str, into: Tensor) -> Iterator[Wanted]:
    """What a rank holds of a tensor, block by block."""
    blocks = store.blocks(name, store.shape(name, into))
    return (Wanted(source, block, part) for block, part in zip(blocks, views_of(into, blocks), strict=True))


def _check_alike(checked: CheckedWeights, store: Store, name: str, local: Tensor, other: str) -> None:
    again = torch.empty_like(local)
    checked.files.read(_parts_wanted(store, name, other, again))
    if not torch.equal(again, local):
        raise CheckpointError(
            f"The weights in {checked.files.path} have {checked.pairing.sources[name][0]} and {other} with other "
            f"values. In the model both are one tensor. Build the model without tying them, or name one as unused."
        )
