"""What `run --data` may name: files of tokens, or a function of the user's that makes a dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from conjoin.cli.models import call_function, run_own
from conjoin.errors import UsageError
from conjoin.ir import Graph, Leaf, LeafKind

_FORMS = "a .txt, .bin or .npy file of tokens, or file.py:function that returns a dataset"
_NUM_BLOCKS, _BLOCK = 256, 1024
"""Of how many places of a file of tokens, and how many tokens at each, a digest is made."""


def make_dataset(name: str, batch: Any, graph: Graph) -> Dataset[Any]:
    """The dataset of this name, whose samples are put together as the batch is that the model was captured with."""
    if ":" in name and not Path(name).exists():
        made = call_function(name)
        if not hasattr(type(made), "__getitem__") or not hasattr(type(made), "__len__"):
            raise UsageError(
                f"{name} returned {type(made).__name__} to train on. Samples are asked for by their numbers, so a "
                f"dataset has __len__ and __getitem__. Let the function return one."
            )
        return _Own(name, made)
    return Tokens(name, read_tokens(name), batch, _num_words(graph))


class _Own(Dataset[Any]):
    """A dataset of the user's; what it raises is told with its line."""

    def __init__(self, name: str, dataset: Any) -> None:
        self._name, self._dataset = name, dataset

    def __len__(self) -> int:
        return int(run_own(f"The length of {self._name}", lambda: len(self._dataset)))

    def __getitem__(self, index: int) -> Any:
        return run_own(f"Sample {index} of {self._name}", lambda: self._dataset[index])


def read_tokens(name: str) -> np.ndarray[Any, Any]:
    """The tokens of a file, one after the other, mapped into memory: bytes of text, numbers of 16 bits, or an array."""
    path, suffix = Path(name), Path(name).suffix
    try:
        if suffix == ".npy":
            found: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        elif suffix in (".txt", ".bin"):
            found = np.memmap(path, np.uint8 if suffix == ".txt" else np.dtype("<u2"), "r")
        else:
            raise ValueError(f"it is named {suffix or 'without an ending'}")
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ValueError(f"it holds {found.dtype} of shape {found.shape}, not one row of whole numbers")
    except (OSError, ValueError, EOFError) as error:
        why = str(error)[:200].rstrip(".")
        raise UsageError(
            f"The data {name} were to be trained on, and cannot be read: {why}. Data are {_FORMS}. Check "
            f"the path, or write the tokens with numpy.save."
        ) from None
    return found


def digest_of_tokens(name: str) -> str | None:
    """What tells a file of tokens from another: its length, and what stands in many places; None of other datasets."""
    if ":" in name and not Path(name).exists():
        return None
    tokens = read_tokens(name)
    found = hashlib.sha256(f"{tokens.dtype} {len(tokens)}".encode())
    for start in range(0, len(tokens), max(_BLOCK, len(tokens) // _NUM_BLOCKS)):
        found.update(tokens[start : start + _BLOCK].tobytes())
    return found.hexdigest()


class Tokens(Dataset[Any]):
    """Pieces of a row of tokens, each as long as the model's sequences, one behind the other.

    A model that takes two rows gets the tokens and those that follow each of them; one that takes `input_ids` and
    `labels` by name, as those of transformers, gets the same tokens twice, for it looks for the next ones itself.
    """

    def __init__(self, name: str, tokens: np.ndarray[Any, Any], batch: Any, num_words: int | None) -> None:
        self._name, self._tokens, self._num_words = name, tokens, num_words
        self._keys = tuple(batch) if isinstance(batch, Mapping) else None
        rows = list(batch.values() if isinstance(batch, Mapping) else batch if _is_row(batch) else [batch])
        self._count, self._length = len(rows), _length_of(name, rows, self._keys)
        if len(self) < 1:
            raise UsageError(
                f"The data {name} were to be trained on. They have {len(tokens):,} tokens, and a sample takes "
                f"{self._length:,} and the one that follows. Give more of them, or plan for shorter sequences."
            )

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._length

    def __getitem__(self, index: int) -> Any:
        start = index * self._length
        found = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        least, largest = int(found.min()), int(found.max())
        if least < 0 or (self._num_words is not None and largest >= self._num_words):
            raise UsageError(
                f"The data {self._name} have the token {least if least < 0 else largest} at or behind position "
                f"{start:,}. The model has a table of {self._num_words} words. Give a model with as many words as the "
                f"data have, or tokens that were made for this one."
            )
        now, following = found[:-1], found[1:]
        if self._keys is not None:
            return {key: torch.ones_like(now) if key == "attention_mask" else now for key in self._keys}
        return (now, following)[: self._count]


def _is_row(batch: Any) -> bool:
    return isinstance(batch, Iterable) and not isinstance(batch, Tensor)


def _length_of(name: str, rows: list[Any], keys: tuple[str, ...] | None) -> int:
    """How long the sequences are that a model takes, if it takes nothing else."""
    shapes = {tuple(x.shape) if isinstance(x, Tensor) and x.dtype == torch.int64 else () for x in rows}
    known = {"input_ids", "labels", "attention_mask"}
    fits = len(rows) <= 2 if keys is None else set(keys) <= known
    if fits and len(shapes) == 1 and len(shape := shapes.pop()) == 2:
        return int(shape[1])
    told = ", ".join(f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in rows[:4])
    raise UsageError(
        f"The tokens {name} were to be trained on by a model that takes {told or 'nothing'}. Tokens are for models "
        f"that take them as int64 of [samples, length], alone or with what follows them, or as input_ids, labels and "
        f"attention_mask. Give file.py:function that returns a dataset of such samples."
    )


def _num_words(graph: Graph) -> int | None:
    """The rows of the table that the inputs are looked up in."""
    sizes = [
        node.inputs[0].type.shape[0]
        for node in graph.nodes
        if node.op == "embedding" and isinstance(node.inputs[1].owner, Leaf)
        and node.inputs[1].owner.kind is LeafKind.INPUT
    ]  # fmt: skip
    return min(sizes, default=None)
