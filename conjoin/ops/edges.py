"""The edges of a graph in the order of the rows they come to, and of those they go from: made once for each graph.

A graph is two lists, the sources and the targets of its edges. What adds up over them needs the edges of each target
together, and its gradient those of each source. Both orders are kept for the graphs that were seen last, of large ones
four: a graph is the same if its lists lie where they did and were not written to since, or else if they say the same.
Memory that torch did not take itself, as an array of numpy, is written to without its tensors telling: there, what is
said is compared.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from math import ceil
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from conjoin.errors import UsageError


class EdgeWindow(NamedTuple):
    """Which rows are here of those that edges may come from and go to; edges to or from others are left out."""

    first_source: int
    num_sources: int
    first_target: int
    num_targets: int
    all_sources: int
    """The first that no edge may come from."""
    all_targets: int


class LastMade:
    """What was made last of a tensor, while its memory is held by others and not written to."""

    def __init__(self) -> None:
        self._held: tuple[weakref.ref[Any], _Key, Tensor] | None = None

    def find(self, tensor: Tensor, make: Callable[[], Tensor]) -> Tensor:
        held, memory, key = self._held, tensor.untyped_storage(), identity(tensor)
        if held is not None and held[0]() is memory and held[1] == key:
            return held[2]
        with torch.inference_mode(False):  # what is made in a test serves training too
            made = make()
        self._held = weakref.ref(memory, self._drop), key, made
        return made

    def _drop(self, gone: weakref.ref[Any]) -> None:
        held = self._held
        if held is not None and held[0] is gone:
            self._held = None


@dataclass(frozen=True, slots=True)
class Order:
    """The edges of each row together."""

    first: Tensor
    """Where those of each row begin, and where the last ones end."""
    others: Tensor
    """The row at the other end of each edge, in 32 bits."""
    edges: Tensor | None
    """Which edge of the graph each one is; None where they are all of them and as they were."""
    _last: LastMade = field(default_factory=LastMade)

    def of_edges(self, values: Tensor, *, stay: bool = False) -> Tensor:
        """What was said of every edge of the graph, in this order; kept where it is likely to `stay` the same."""
        if self.edges is None:
            return values.contiguous()
        make = partial(values.index_select, 0, self.edges)
        return self._last.find(values, make) if stay and tells_of_writes(values) else make()

    def to_edges(self, values: Tensor, num_edges: int) -> Tensor:
        """What is said in this order, of every edge of the graph; of those that are not here, 0."""
        if self.edges is None:
            return values
        return values.new_zeros(num_edges, *values.shape[1:]).index_copy_(0, self.edges, values)


class Edges:
    """The edges of one graph that are here, in both orders; what is made of them in a test serves training too."""

    def __init__(self, source: Tensor, target: Tensor, window: EdgeWindow) -> None:
        check_ends(source, "source", window.all_sources)
        check_ends(target, "target", window.all_targets)
        self.window, self.num_edges = window, source.shape[0]
        ends, firsts = (source, target), (window.first_source, window.first_target)
        source, target = ((ends - first).to(torch.int32) for ends, first in zip(ends, firsts, strict=True))
        here = (source >= 0) & (source < window.num_sources) & (target >= 0) & (target < window.num_targets)
        self._kept = None if bool(here.all()) else here.nonzero().flatten()
        if self._kept is not None:
            source, target = source[self._kept], target[self._kept]
        self._ends = source, target

    @cached_property
    @torch.inference_mode(False)
    def by_target(self) -> Order:
        """For every target the sources of its edges."""
        source, target = self._ends
        return self._order(target, source, self.window.num_targets)

    @cached_property
    @torch.inference_mode(False)
    def by_source(self) -> Order:
        """For every source the targets of its edges."""
        source, target = self._ends
        return self._order(source, target, self.window.num_sources)

    @cached_property
    @torch.inference_mode(False)
    def targets(self) -> Tensor:
        """The target of each edge in the order of targets."""
        rows = torch.arange(self.window.num_targets, device=self.by_target.first.device)
        return rows.repeat_interleave(self.by_target.first.diff())

    @cached_property
    @torch.inference_mode(False)
    def num_incoming(self) -> Tensor:
        """How many edges come to each target, at least 1."""
        return self.by_target.first.diff().clamp_(min=1)

    def _order(self, rows: Tensor, others: Tensor, num_rows: int) -> Order:
        is_sorted = rows.shape[0] < 2 or bool((rows[1:] >= rows[:-1]).all())
        edges = None if is_sorted else rows.sort(stable=True).indices
        first = torch.zeros(num_rows + 1, dtype=torch.int64, device=rows.device)
        first[1:] = torch.bincount(rows, minlength=num_rows).cumsum(0)
        others = (others if edges is None else others[edges]).to(torch.int32)
        if self._kept is not None:
            edges = self._kept if edges is None else self._kept[edges]
        return Order(first, others.contiguous(), edges)


class EdgesOnMeta(Edges):
    """Edges whose ends nobody knows: as many are here as if all vertices had as many, in neither order."""

    def __init__(self, source: Tensor, window: EdgeWindow) -> None:
        self.window, self.num_edges = window, source.shape[0]
        parts = window.num_sources * window.num_targets / max(window.all_sources * window.all_targets, 1)
        here = source[: ceil(self.num_edges * parts)]
        self._ends = here, here

    @property
    def targets(self) -> Tensor:
        return self._ends[1]

    def _order(self, rows: Tensor, others: Tensor, num_rows: int) -> Order:
        return Order(rows.new_empty(num_rows + 1), others.to(torch.int32), rows)


def check_ends(ends: Tensor, name: str, limit: int) -> None:
    """Refuse edges from or to vertices that do not exist."""
    if not ends.numel():
        return
    low, high = (int(value) for value in ends.aminmax())
    if low < 0 or high >= limit:
        raise UsageError(
            f"A graph was given with {name}s from {low} to {high}. Its vertices are 0 to {limit - 1}, and every edge "
            f"must go from one of them to one of them. Correct the edges, or give features to all vertices."
        )


T = TypeVar("T")
_Key = tuple[object, ...]


class _Seen(NamedTuple):
    key: _Key
    ends: tuple[Tensor, Tensor]
    """As they were given: while they are held, nothing else lies where they do."""
    use: Hashable
    made: Any

    @property
    def bytes(self) -> int:
        return sum(ends.nbytes for ends in self.ends)

    def says(self, source: Tensor, target: Tensor, use: Hashable) -> bool:
        """Whether it is of the same graph; what was written to since says something else than what was made of it."""
        return (
            self.use == use
            and self.key == _key(*self.ends, use)
            and all(map(are_equal, self.ends, (source, target)))
        )


_LARGE = 4
"""Graphs that are kept whatever their size: those of training and of evaluation, and of two more."""


class _Memory:
    """What was made of the graphs seen last, within so many bytes of edges; or of the last few, if they are larger."""

    def __init__(self, size: int, most_bytes: int) -> None:
        self._size, self._bytes, self._lock = size, most_bytes, Lock()
        self._seen: OrderedDict[_Key, _Seen] = OrderedDict()

    def find(self, source: Tensor, target: Tensor, use: Hashable, make: Callable[[Tensor, Tensor], Any]) -> Any:
        """What was made of a graph for a use before, or is made now."""
        tells, key = tells_of_writes(source) and tells_of_writes(target), _key(source, target, use)
        with self._lock:
            if tells and key in self._seen:
                self._seen.move_to_end(key)
                return self._seen[key].made
            known = tuple(reversed(self._seen.values()))
        same = next((seen for seen in known if seen.says(source, target, use)), None)
        with torch.inference_mode(False):  # what is made in a test serves training too
            if not tells:
                source, target = (source.clone(), target.clone()) if same is None else same.ends
                key = _key(source, target, use)
            made = make(source, target) if same is None else same.made
        with self._lock:
            if same is not None:  # a model that makes its edges in every step does not leave all of them here
                self._seen.pop(same.key, None)
            self._seen[key] = _Seen(key, (source, target), use, made)
            self._forget()
        return made

    def _forget(self) -> None:
        """Those that were seen longest ago, while there are too many."""
        while len(self._seen) > self._size:
            self._seen.popitem(last=False)
        graphs = {seen.key[:-1]: seen.bytes for seen in reversed(self._seen.values())}
        most = max(_LARGE * max(graphs.values()), self._bytes)
        held = dict(zip(graphs, accumulate(graphs.values()), strict=True))
        for key, seen in list(self._seen.items()):
            if held[seen.key[:-1]] > most:
                del self._seen[key]


def _key(source: Tensor, target: Tensor, use: Hashable) -> _Key:
    return (*identity(source), *identity(target), use)


def tells_of_writes(tensor: Tensor) -> bool:
    """Whether a tensor counts all writes to it: not in inference mode, nor in memory that torch did not take itself."""
    return not tensor.is_inference() and tensor.untyped_storage().resizable()


def identity(tensor: Tensor) -> _Key:
    """Where a tensor lies and how often that was written to: while it is held, equal only for what says the same."""
    version = -1 if tensor.is_inference() else tensor._version
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, version


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors say the same."""
    alike = one.shape == other.shape and one.device == other.device and one.dtype == other.dtype
    return alike and torch.equal(one, other)


_SEEN = _Memory(64, 64 << 20)
"""Several layers of a model share one graph; several ranks may be threads of one process."""


def of_graph(source: Tensor, target: Tensor, use: Hashable, make: Callable[[Tensor, Tensor], T]) -> T:
    """What is made of a graph, once for each use while the graph is the same."""
    made: T = _SEEN.find(source, target, use, make)
    return made


def edges_of(source: Tensor, target: Tensor, window: EdgeWindow, *, loops: bool = False) -> Edges:
    """The edges of a graph in both orders, made at first use; with `loops` one from each vertex to itself instead of
    those that it has."""
    if source.is_meta:
        return EdgesOnMeta(source.new_empty(source.shape[0] + loops * window.all_targets), window)
    if not loops:
        return of_graph(source, target, window, partial(Edges, window=window))
    return of_graph(source, target, ("loops", window), lambda u, v: Edges(*with_loops(u, v, window), window))


def with_loops(source: Tensor, target: Tensor, window: EdgeWindow) -> tuple[Tensor, Tensor]:
    """Both ends of the edges between different vertices, and of one from each vertex to itself.

    >>> ends = torch.tensor([0, 1, 1]), torch.tensor([1, 1, 1])
    >>> [some.tolist() for some in with_loops(*ends, EdgeWindow(0, 3, 0, 3, 3, 3))]
    [[0, 0, 1, 2], [1, 0, 1, 2]]
    """
    own, kept = torch.arange(window.all_targets, dtype=source.dtype, device=source.device), source != target
    return torch.cat((source[kept], own)), torch.cat((target[kept], own))
