"""Where a captured graph begins to differ from its model: the first result of the user's that it does not have."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from conjoin.ir import Graph, describe_tree
from conjoin.runtime.program.captured import to_module
from conjoin.runtime.verification.differences import largest_of, relative
from conjoin.runtime.verification.fresh_batches import Freshness, fresh_batches
from conjoin.runtime.verification.plain_model import PlainModel
from conjoin.runtime.verification.steps import moved, seeded, spread

_FAR = 1e-2
"""Values of one line that differ by more than this part of their largest element are different ones."""
_NUM_RUNS = 4
"""A number that a model draws outside of torch may once be close to the one that was captured."""
Line = tuple[str, int]


class _Followed(TorchFunctionMode):
    """Notes the result of every call of torch with the user's line, as it is then: it may be written to later."""

    def __init__(self, files: frozenset[str]) -> None:
        super().__init__()
        self._files = files
        self.made: list[tuple[Line, str, Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        line = self._line(sys._getframe(1))
        if line is not None:
            name = getattr(func, "__name__", "call")
            self.made += [(line, name, x.detach().clone()) for x in tree_leaves(result) if isinstance(x, Tensor)]
        return result

    def _line(self, frame: FrameType | None) -> Line | None:
        while frame is not None and frame.f_code.co_filename not in self._files:
            frame = frame.f_back
        return (frame.f_code.co_filename, frame.f_lineno) if frame else None


def find_first_difference(graph: Graph, plain: PlainModel, batch: Any, freshness: Freshness) -> str:
    """The first result that differs, in a sentence."""
    given = fresh_batches(batch, 1, freshness)[0]
    values = _values_by_line(graph, plain.changed(), given)
    for _ in range(_NUM_RUNS):
        for line, name, tensor in _made_by_model(plain.changed(), given, frozenset(file for file, _ in values)):
            known = [value for value in values.get(line, ()) if value.shape == tensor.shape]
            if known and all(relative(tensor, value, largest_of(tensor)) > _FAR for value in known):
                return f"The first value that differs is made by {name} at {line[0]}:{line[1]}."
    return "No single value of its forward pass shows where that begins."


def _made_by_model(own: PlainModel, batch: Any, files: frozenset[str]) -> list[tuple[Line, str, Tensor]]:
    """What a run of the model makes in these files, in its order."""
    followed = _Followed(files)
    with torch.no_grad(), seeded(own.device), followed:
        own.run(own.model, moved(batch, own.device), own.loss)
    return followed.made


def _values_by_line(graph: Graph, own: PlainModel, batch: Any) -> Mapping[Line, list[Tensor]]:
    """All values that a graph makes, by the user's lines they come from."""
    made = [value for node in graph.nodes for value in node.outputs()]
    structure = describe_tree([None] * len(made))[1]
    everything = replace(graph, outputs=tuple(made), output_structure=structure, loss=None)
    with torch.no_grad(), seeded(own.device):
        results = spread(to_module(everything, own.model), moved(batch, own.device))
    found: dict[Line, list[Tensor]] = {}
    for value, result in zip(made, results, strict=True):
        source = graph.source_of(value.owner)  # type: ignore[arg-type]
        if source is not None and isinstance(result, Tensor):
            found.setdefault((source.file, source.line), []).append(result)
    return found
