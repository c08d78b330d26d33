"""Segments of a rank's program of which nothing inside is kept: the backward pass runs them again.

Every segment becomes a function of its own, called through `torch.utils.checkpoint`: what it is given is kept, what it
makes inside is not, and is made again when the backward pass first asks for any of it. Bundles of parameters are
brought inside, where they are first used, in the second run too: they know whether that is to gather them again. Random
operators draw the same numbers again. Values of buffers come out of the first run only. What a plan keeps of a segment
lies on a shelf: autograd sees the same calls in both runs, and the kernels of these are called in the first alone.

The second run ends where nothing more is needed, which is before the last operator computes, when that keeps only what
it reads. All ranks have to end between the same two collectives: the last operator is marked by a tensor of no size
that every rank keeps, and what it sends after it has computed lies outside of the segment.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from conjoin.runtime.program.randomness import Streams
from conjoin.runtime.program.tensors_on_host import GivenAgain, Offloading
from conjoin.runtime.torch_private import DispatchMode, memory_of

SEGMENT = "segment"
"""Under this name the nodes of a program say to which segment they belong."""
PART = "part"
"""Under this name nodes say that they cut micro-batches, or join them: the part, which of both, the dim, how many."""
Function = Callable[..., Any]


class _Mark(torch.autograd.Function):
    """Keeps a tensor of no size."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nobody reads a mark")


def mark(x: Tensor) -> Tensor:
    """Have autograd keep something here on every rank."""
    return _Mark.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Shelf(DispatchMode):  # type: ignore[no-untyped-call]
    """What the kernels of some calls made in the first run of a segment; in the second run these are not called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made: list[Any] = []
        self._memory: set[int] = set()
        """Where it lies."""
        self._next: int | None = None
        """Of what was made, in a second run."""

    def again(self) -> None:
        """A second run begins, or a third."""
        self._next = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and self._next is not None:
            written = _written(func._schema, args, kwargs or {})
            if written and self._memory.issuperset(map(memory_of, written)):  # it was written to before it was kept
                if torch.Tag.nondeterministic_seeded in func.tags:  # what is drawn next comes after these numbers
                    func(*tree_map_only(Tensor, torch.empty_like, args), **(kwargs or {}))
                return written[0] if len(written) == 1 else written
        if any(given.alias_info is not None for given in (*func._schema.returns, *func._schema.arguments)):
            return func(*args, **(kwargs or {}))  # a view, or a write
        if self._next is None:
            made = func(*args, **(kwargs or {}))
            self._made.append(_detached(made))
            self._memory.update(memory_of(part) for part in tree_leaves(made) if isinstance(part, Tensor))
            return made
        self._next += 1
        return _detached(self._made[self._next - 1])


def _written(schema: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
    """What a call writes to."""
    given = {**dict(zip((each.name for each in schema.arguments), args, strict=False)), **kwargs}
    changed = (each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write)
    return tuple(part for part in tree_leaves([given.get(name) for name in changed]) if isinstance(part, Tensor))


def _detached(made: Any) -> Any:
    """What a kernel made, apart from what autograd notes on it."""
    if isinstance(made, Tensor):
        return made.detach()
    return tuple(map(_detached, made)) if isinstance(made, tuple | list) else made


_running = threading.local()


def keeping(function: Function) -> Function:
    """A call in a segment whose result is kept: in the second run its kernels are not called."""

    def run(*args: Any, **kwargs: Any) -> Any:
        shelf = getattr(_running, "shelf", None)
        with shelf if shelf is not None else nullcontext():
            return function(*args, **kwargs)

    return run


def _with_shelf(shelf: _Shelf, function: Function, *args: Any) -> Any:
    before = getattr(_running, "shelf", None)
    _running.shelf = shelf
    try:
        return function(*args)
    finally:
        _running.shelf = before


class Again:
    """A segment as a function: in backward it is run again, with the numbers it drew before."""

    def __init__(self, function: Function, streams: Streams, offloading: Offloading | None = None) -> None:
        self._function, self._streams, self._offloading = function, streams, offloading

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._function(*args)
        shelf, drawn, first = _Shelf(), self._streams.states(), [args]
        kept = args if self._offloading is None else tuple(map(self._offloading.keep, args))

        def run(*given: Any) -> Any:
            if first:
                return _with_shelf(shelf, self._function, *first.pop())
            shelf.again()
            there = (x.tensor() if isinstance(x, GivenAgain) else x for x in given)
            return _with_shelf(shelf, partial(self._streams.rerun, drawn, self._function), *there)

        # streams know where they stood, on one device alone that of the device's own generator; torch need not
        return checkpoint(run, *kept, use_reentrant=False, preserve_rng_state=False)


@dataclass(frozen=True, slots=True)
class Fold:
    """A segment of a program, of its own nodes."""

    number: int
    """From 0 on for what is run again in the backward pass, below for parts that run in micro-batches."""
    program: fx.Graph
    count: int = 1
    """Of micro-batches."""
    cut: tuple[int | None, ...] = ()
    """By what it reads the dim along which micro-batches are cut; None where all read the same."""
    joined: tuple[int, ...] = ()
    """By what it makes the dim along which they are joined."""


def fold_segments(program: fx.Graph, make: Callable[[Fold], Function]) -> fx.Graph:
    """The program with every segment as one call of the function that `make` makes of its nodes.

    Nodes that stand among those of a segment without being of it depend on nothing inside: they come before it. What
    cuts micro-batches and joins them is part of the call.
    """
    segments: dict[int, list[fx.Node]] = {}
    for node in program.nodes:
        if SEGMENT in node.meta:
            segments.setdefault(node.meta[SEGMENT], []).append(node)
    if not segments:
        return program
    folded, env = fx.Graph(), dict[fx.Node, fx.Node]()
    lasts = {nodes[-1]: number for number, nodes in segments.items()}
    for node in program.nodes:
        if node in lasts:
            call = _call_segment if lasts[node] >= 0 else _call_part
            call(folded, env, lasts[node], segments[lasts[node]], make)
        elif SEGMENT not in node.meta and PART not in node.meta:
            env[node] = folded.node_copy(node, env.__getitem__)
    return folded


def _read_by(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(nodes)
    return list(dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside))


def _program_of(nodes: Sequence[fx.Node], read: Sequence[fx.Node], made: Sequence[fx.Node]) -> fx.Graph:
    part = fx.Graph()
    within = {source: part.placeholder(source.name) for source in read}
    for node in nodes:
        within[node] = part.node_copy(node, within.__getitem__)
    part.output(tuple(within[node] for node in made))
    return part


def _call_segment(
    folded: fx.Graph,
    env: dict[fx.Node, fx.Node],
    number: int,
    nodes: Sequence[fx.Node],
    make: Callable[[Fold], Function],
) -> None:
    inside, read = set(nodes), _read_by(nodes)
    made = [node for node in nodes if any(user not in inside for user in node.users)]
    function = make(Fold(number, _program_of(nodes, read, made)))
    called = folded.call_function(function, tuple(env[source] for source in read))
    for i, node in enumerate(made):
        env[node] = folded.call_function(operator.getitem, (called, i))


def _call_part(
    folded: fx.Graph,
    env: dict[fx.Node, fx.Node],
    number: int,
    nodes: Sequence[fx.Node],
    make: Callable[[Fold], Function],
) -> None:
    """What cuts and joins is not called: it says which dims of what is given and made are those of micro-batches."""
    read = _read_by(nodes)
    marks = [source.meta[PART] if source.meta.get(PART, (0, False))[1] else None for source in read]
    joins = [node for node in _after(nodes) if PART in node.meta and node.meta[PART][0] == number]
    made = [_source(node) for node in joins]
    count = joins[0].meta[PART][3]
    cut = tuple(None if mark is None else mark[2] for mark in marks)
    fold = Fold(number, _program_of(nodes, read, made), count, cut, tuple(node.meta[PART][2] for node in joins))
    sources = [source if mark is None else _source(source) for source, mark in zip(read, marks, strict=True)]
    called = folded.call_function(make(fold), tuple(env[source] for source in sources))
    for i, node in enumerate(joins):
        env[node] = folded.call_function(operator.getitem, (called, i))


def _after(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Who reads nodes, each once."""
    inside = set(nodes)
    return list(dict.fromkeys(user for node in nodes for user in node.users if user not in inside))


def _source(node: fx.Node) -> fx.Node:
    """What is cut in micro-batches, or joined of them."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source
