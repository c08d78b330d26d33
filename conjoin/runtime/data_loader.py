"""Batches of a dataset for a module: one global order whatever the number of ranks, of which each reads its part.

The order of an epoch depends on the seed and the epoch alone. A global batch is the next `batch_size` samples in it; a
rank reads those that its parts of the inputs need, and a sample that draws random numbers draws the same ones wherever
and whenever it is read. So losses do not depend on the number of ranks or of workers, nor on where a run was resumed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from conjoin.errors import UsageError
from conjoin.ir import calling_graph, flatten_tree, unflatten_tree
from conjoin.ops import drawing
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.program.call_forms import Calling, InputPart

_STATE = ("seed", "epoch", "samples", "num_samples", "shuffle")


class Loader:
    """The batches of a dataset that a module trains on, epoch after epoch: each `for` is one epoch.

    Batches are as large as the plan's, and come as this rank's parts, on its device, in the containers that
    `collate_fn` makes; samples lie along the first dim. What is left of an epoch after full batches is dropped, or with
    `drop_last=False` comes whole, as smaller plans take it. `state_dict` is plain data, to be saved with a checkpoint.
    """

    def __init__(  # noqa: PLR0913 – what may be chosen of batches
        self,
        dataset: Dataset[Any],
        step: ParallelModule,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        _check_step(step)
        self.num_samples = _size_of(dataset)
        self._dataset, self._num_workers, self._collate = dataset, num_workers, collate_fn or collate_samples
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._step, self._parts, self._device = step, step.input_parts(), step.store.device
        graph, accumulation = step.plan.graph, step.plan.accumulation
        self._calling = Calling(graph if accumulation is None else calling_graph(graph, accumulation))
        self.batch_size = _batch_size(self._parts)
        spans = [part.region[0] for part in self._parts if part.region[0][0] < part.region[0][1]] or [(0, 1)]
        self._rows = range(min(first for first, _ in spans), max(last for _, last in spans))
        self.epoch = 0
        """The one that the next `for` goes through, or goes on with."""
        self._samples = 0
        self._is_resumed = False
        if drop_last and self.num_samples < self.batch_size:
            raise UsageError(
                f"A dataset of {self.num_samples:,} samples was given for batches of {self.batch_size:,}. There is not "
                f"one full batch in it. Give a larger dataset, or make a plan with a smaller batch."
            )

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return -(-self._end(0) // self.batch_size)

    def _end(self, start: int) -> int:
        """Where an epoch ends that is read from a sample on."""
        left = self.num_samples - start
        return start + (left // self.batch_size * self.batch_size if self._drop_last else left)

    def __iter__(self) -> Iterator[Any]:
        self._samples, self._is_resumed = self._samples if self._is_resumed else 0, False
        loader: DataLoader[Any] = DataLoader(
            _Samples(self._dataset, self._seed, self.epoch),
            batch_sampler=self._batches(self._samples),
            num_workers=self._num_workers,
            collate_fn=self._collate,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator().manual_seed(0),  # else it would draw from the caller's
        )
        for batch in loader:
            size = min(self.batch_size, self.num_samples - self._samples)
            self._samples += size
            yield self._part_of(batch) if size == self.batch_size else self._as_whole(batch)
        self.epoch, self._samples = self.epoch + 1, 0

    def _batches(self, begin: int) -> Iterator[list[tuple[int, int]]]:
        """The samples of every batch that this rank reads, from a sample on, each with its position in the order."""
        order = None
        if self._shuffle:
            order = _drawn_order(self.num_samples, self._seed + self.epoch)
        for start in range(begin, self._end(begin), self.batch_size):
            size = min(self.batch_size, self.num_samples - start)
            rows = self._rows if size == self.batch_size else range(size)
            positions = range(start + rows.start, start + rows.stop)
            indices = positions if order is None else order[positions.start : positions.stop].tolist()
            yield list(zip(indices, positions, strict=True))

    def _part_of(self, batch: Any) -> Any:
        """This rank's parts of the inputs, from the samples that it has read."""
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        parts: dict[int, InputPart] = {}
        for tensor, part in zip(self._calling.arrange((batch,), {}), self._parts, strict=True):
            self._check(tensor, part)
            if parts.setdefault(id(tensor), part).region != part.region:
                raise UsageError(
                    f"One tensor came for {parts[id(tensor)].name} and {part.name}, which lie on the ranks in "
                    f"different ways. This rank would need two parts of it. Let collate_fn give each one of its own."
                )
        leaves, spec = flatten_tree(batch)
        cut = [self._cut(x, parts[id(x)]) if isinstance(x, Tensor) else x for x in leaves]
        return unflatten_tree(cut, spec)

    def _check(self, tensor: Tensor, part: InputPart) -> None:
        wanted = (len(self._rows), *part.shape[1:])
        if tuple(tensor.shape) != wanted:
            raise UsageError(
                f"{len(self._rows)} samples of the dataset were put together as {part.name} of shape "
                f"{tuple(tensor.shape)}. The plan takes {part.shape} as a whole, and so {wanted} of so many samples, "
                f"which lie along the first dim. Let the dataset and collate_fn make such tensors, or make the plan "
                f"with a batch of theirs."
            )
        if tensor.is_meta:
            raise UsageError(
                f"{len(self._rows)} samples of the dataset were put together as {part.name} on the meta device. Such "
                f"tensors have no values, as if made inside `with torch.device('meta')`. Let the dataset make them on "
                f"the CPU."
            )
        if tensor.dtype != part.dtype:
            raise UsageError(
                f"{len(self._rows)} samples of the dataset were put together as {part.name} of {tensor.dtype}. The "
                f"plan takes {part.dtype}, and each dtype would be another program. Let the dataset make it so, as by "
                f"x.to({part.dtype}), or make the plan with a batch of theirs."
            )

    def _cut(self, tensor: Tensor, part: InputPart) -> Tensor:
        (first, last), *others = part.region
        rows = slice(first - self._rows.start, last - self._rows.start) if first < last else slice(0, 0)
        cut = tensor[(rows, *(slice(*span) for span in others))]
        return cut if part.on_host else cut.to(self._device, non_blocking=True)

    def _as_whole(self, batch: Any) -> Any:
        """A batch that is not full, which may be as large as a part of a full one."""
        leaves, spec = flatten_tree(batch)
        moved = [x.to(self._device, non_blocking=True) if isinstance(x, Tensor) else x for x in leaves]
        self._step.note_whole(x for x in moved if isinstance(x, Tensor))
        return unflatten_tree(moved, spec)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, after the batch that was given last; the same on every rank."""
        values = self._seed, self.epoch, self._samples, self.num_samples, self._shuffle
        return dict(zip(_STATE, values, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the batch after a state, on whatever number of ranks it was saved and with whatever batch size."""
        missing = [key for key in _STATE if not isinstance(state.get(key), int)]
        differing = [key for key in ("num_samples", "shuffle") if state.get(key) != self.state_dict()[key]]
        if missing or differing:
            key = (missing or differing)[0]
            raise UsageError(
                f"A state with {key}={state.get(key)!r} was given to a loader with {key}={self.state_dict()[key]!r}. "
                f"It is of other data, or not of a loader, and would go on with other samples. Give the state that was "
                f"saved with this dataset."
            )
        self._seed, self.epoch, self._samples = state["seed"], state["epoch"], state["samples"]
        if self._end(self._samples) <= self._samples:  # it was saved after the last batch
            self.epoch, self._samples = self.epoch + 1, 0
        self._is_resumed = True


def _check_step(step: Any) -> None:
    if not isinstance(step, ParallelModule):
        raise UsageError(
            f"A {type(step).__name__} was given to load batches for. Which part of a batch this rank takes, and where "
            f"to, is known of a module that conjoin.load gave. Load the plan first, and give that."
        )


def _size_of(dataset: Any) -> int:
    try:
        size = None if isinstance(dataset, IterableDataset | DataLoader) else len(dataset)
    except TypeError:
        size = None
    if size is None:
        raise UsageError(
            f"A {type(dataset).__name__} was given to be loaded. Every rank reads other samples, by their numbers, and "
            f"this one is read from the beginning. Give a dataset of samples, with __len__ and __getitem__."
        )
    if not size:
        raise UsageError(
            "A dataset without samples was given to be loaded. Its __len__ is 0, so there is nothing to read. Check "
            "where it reads its samples from."
        )
    return size


def _drawn_order(num_samples: int, seed: int) -> Tensor:
    try:
        return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))
    except RuntimeError:
        raise UsageError(
            f"A dataset that says to have {num_samples:,} samples was to be shuffled. The order of an epoch has all of "
            f"their numbers, which do not fit into memory. Let __len__ say after how many samples an epoch ends, or do "
            f"not shuffle."
        ) from None


def _batch_size(parts: list[InputPart]) -> int:
    sizes = {part.shape[0] if part.shape else 0 for part in parts}
    if len(sizes) == 1 and 0 not in sizes:
        return sizes.pop()
    told = ", ".join(f"{part.name} {part.shape}" for part in parts[:4]) or "none"
    raise UsageError(
        f"Batches were asked for from a dataset, for a plan with the inputs {told}. Samples are put together along the "
        f"first dim, which then has the same size for all inputs. Call the module with batches of your own."
    )


def collate_samples(samples: list[Any]) -> Any:
    """A batch of samples, as torch makes it; those that do not go together are told of with their shapes."""
    try:
        return default_collate(samples)
    except (RuntimeError, TypeError, ValueError, KeyError) as error:
        seen = dict.fromkeys(_described(sample) for sample in samples)
        raise UsageError(
            f"{len(samples)} samples of the dataset do not go together: {str(error)[:200]}. They are "
            f"{'; '.join(list(seen)[:3])[:300]}. Let them all have the same shapes, by padding or cutting, or give a "
            f"collate_fn that puts them together."
        ) from None


def _described(sample: Any) -> str:
    leaves = flatten_tree(sample)[0]
    return ", ".join(str(tuple(x.shape)) if isinstance(x, Tensor | np.ndarray) else type(x).__name__ for x in leaves)


class _Samples(Dataset[Any]):
    """A dataset that is asked for samples with their positions in the order; what a sample draws hangs on its own."""

    def __init__(self, dataset: Dataset[Any], seed: int, epoch: int) -> None:
        self._dataset, self._seed, self._epoch = dataset, seed, epoch

    def __getitems__(self, wanted: list[tuple[int, int]]) -> list[Any]:
        found = []
        with _own_draws():
            for index, position in wanted:
                _draw_from(f"{self._seed}/{self._epoch}/{position}")
                found.append(self._dataset[index])
        return found


@contextmanager
def _own_draws() -> Iterator[None]:
    """Leave the generators of a program as they are: ranks read other samples, and must draw alike elsewhere."""
    with drawing if get_worker_info() is None else nullcontext():
        kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            torch.set_rng_state(kept[0])
            random.setstate(kept[1])
            np.random.set_state(kept[2])


def _draw_from(position: str) -> None:
    seed = int.from_bytes(hashlib.blake2b(position.encode(), digest_size=8).digest(), "little") >> 1
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
