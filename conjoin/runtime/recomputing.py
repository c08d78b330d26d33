"""Segments of a rank's program of which nothing inside is kept: the backward pass runs them again.

Every segment becomes a function of its own, called through `torch.utils.checkpoint`: what it is given is kept, what it
makes inside is not, and is made again when the backward pass first asks for any of it. Bundles of parameters are
brought inside, where they are first used, in the second run too: they know whether that is to gather them again. Random
operators draw the same numbers again. Values of buffers come out of the first run only.

The second run ends where nothing more is needed, which is before the last operator computes, when that keeps only what
it reads. All ranks have to end between the same two collectives: the last operator is marked by a tensor of no size
that every rank keeps, and what it sends after it has computed lies outside of the segment.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from conjoin.runtime.randomness import Streams

SEGMENT = "segment"
"""Under this name the nodes of a program say to which segment they belong."""
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


class Again:
    """A segment as a function: in backward it is run again, with the numbers it drew before."""

    def __init__(self, function: Function, streams: Streams) -> None:
        self._function, self._streams = function, streams

    def __call__(self, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._function(*args)
        drawn, runs = self._streams.states(), iter((self._function,))
        again = partial(self._streams.rerun, drawn, self._function)
        # streams know where they stood, on one device alone that of the device's own generator; torch need not
        return checkpoint(
            lambda *given: next(runs, again)(*given), *args, use_reentrant=False, preserve_rng_state=False
        )


def fold_segments(program: fx.Graph, make: Callable[[int, fx.Graph], Function]) -> fx.Graph:
    """The program with every segment as one call of the function that `make` makes of its nodes.

    Nodes that stand among those of a segment without being of it depend on nothing inside: they come before it.
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
        if SEGMENT not in node.meta:
            env[node] = folded.node_copy(node, env.__getitem__)
        elif node in lasts:
            _call_segment(folded, env, segments[lasts[node]], partial(make, lasts[node]))
    return folded


def _call_segment(
    folded: fx.Graph, env: dict[fx.Node, fx.Node], nodes: Sequence[fx.Node], make: Callable[[fx.Graph], Function]
) -> None:
    inside = set(nodes)
    read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
    made = [node for node in nodes if any(user not in inside for user in node.users)]
    part = fx.Graph()
    within = {source: part.placeholder(source.name) for source in read}
    for node in nodes:
        within[node] = part.node_copy(node, within.__getitem__)
    part.output(tuple(within[node] for node in made))
    called = folded.call_function(make(part), tuple(env[source] for source in read))
    for i, node in enumerate(made):
        env[node] = folded.call_function(operator.getitem, (called, i))
