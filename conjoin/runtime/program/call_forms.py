"""How a captured program is called: the inputs as the model takes them, then what the loss takes; or the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import torch
from torch import Tensor

from conjoin.errors import UsageError
from conjoin.ir import LEAF, Graph, Leaf, Region, Structure, Value, flatten_tree, spec_of, unflatten_tree


@dataclass(frozen=True, slots=True)
class InputPart:
    """An input as a call takes it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole."""
    region: Region
    """The part of it that a rank takes."""
    dtype: torch.dtype
    on_host: bool = False
    """Whether it stays there during the step."""


def _takes_tensors(graph: Graph) -> bool:
    """Whether model and loss take nothing but tensors by position."""
    if len(graph.input_structure.children) != 4 or not all(isinstance(value, Value) for value in graph.inputs):
        return False
    taken, named, for_loss, loss_named = graph.input_structure.children
    return not named.keys and not loss_named.keys and _is_flat(taken) and _is_flat(for_loss)


def _is_flat(structure: Structure) -> bool:
    return structure.kind == "tuple" and all(child.kind == "leaf" for child in structure.children)


def _positional_names(graph: Graph) -> list[str]:
    """What stands at each position, the model's first, by the name that forward has for it; empty where none is known.

    The leaves of an input are named by the parameter of forward and the way into it.
    """
    if len(graph.input_structure.children) != 4:
        return []
    taken, named, for_loss, _ = graph.input_structure.children
    names, values = [], iter(graph.inputs)
    for part in (*taken.children, named, *for_loss.children):
        leaves = [value.owner for value in islice(values, part.num_leaves) if isinstance(value, Value)]
        name = leaves[0].name.partition(".")[0] if leaves and isinstance(leaves[0], Leaf) else ""
        names += [name] if part is not named else []
    return names


def _readings(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The ways to read a call: as it is, or as one batch object."""
    found = [(args, kwargs)]
    if len(args) == 1 and not kwargs:
        whole = args[0]
        found += [((), dict(whole))] if isinstance(whole, Mapping) else []
        found += [(tuple(whole), {})] if isinstance(whole, tuple | list) else []
    return found


def _kind(value: Any) -> str:
    """What came as an argument, and what it holds."""
    name = type(value).__name__
    match value:
        case tuple() | list():
            kinds = [type(x).__name__ for x in value]
            told = kinds[:8] if len(set(kinds)) > 1 else [f"{len(kinds)} {kinds[0]}"] if kinds else []
            return f"{name} of {', '.join(told)}" if value else f"empty {name}"
        case Mapping():
            return f"{name} of {', '.join(map(str, list(value)[:8]))}" if value else f"empty {name}"
    return name


class Calling:
    """Brings arguments into the captured order and results into the captured containers."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._input_spec = spec_of(graph.input_structure)
        self._output_spec = spec_of(graph.output_structure)
        self._num_tensors = len(graph.inputs) if _takes_tensors(graph) else -1
        """How many tensors are taken one after the other; -1 where there is more to it."""
        self._names = _positional_names(graph)

    def arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The input tensors in the captured order, from arguments or from one batch object."""
        found = self.match(args, kwargs)
        if found is not None:
            return found
        came = [*map(_kind, args), *(f"{key}={_kind(x)}" for key, x in kwargs.items())]
        raise self.refusal(f"it takes ({', '.join(self._takes())}), as captured, and ({', '.join(came)}) came")

    def match(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor] | None:
        """The same; None where something else came, whatever the shapes."""
        given = args[0] if len(args) == 1 and self._num_tensors > 1 and isinstance(args[0], tuple | list) else args
        if not kwargs and len(given) == self._num_tensors and all(isinstance(x, Tensor) for x in given):
            return list(given)
        for positional, named in _readings(args, kwargs):
            leaves, spec = flatten_tree(self._deal(positional, named))
            if spec == self._input_spec and self._fixed_match(leaves):
                return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return None

    def deal(self, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> list[Any]:
        """A call dealt out to model and loss, as the captured one where it has its structure; else as it reads best.

        What stands at a position may be one of the inputs that the captured call has by name: `names` are those of the
        model's positions.
        """
        readings = _readings(args, kwargs)
        if args and len(args) <= len(names) and not set(names[: len(args)]) & kwargs.keys():
            readings.append(((), {**dict(zip(names, args, strict=False)), **kwargs}))
        dealt = [self._deal(positional, named) for positional, named in readings]
        as_captured = (each for each in dealt if flatten_tree(each)[1] == self._input_spec)
        is_batch = len(args) == 1 and not kwargs and isinstance(args[0], Mapping | tuple | list)
        return next(as_captured, dealt[1] if is_batch else dealt[0])

    def results(self, outputs: list[Any]) -> Any:
        """The outputs in the containers the model returned them in."""
        if self.graph.output_structure == LEAF:
            return outputs[0]
        return unflatten_tree(outputs, self._output_spec)

    def _takes(self) -> list[str]:
        """How it was called when it was captured."""
        _, named, _, loss_named = self.graph.input_structure.children
        keys = [f"{key}=" for part in (named, loss_named) for key in part.keys]
        return [*(name or "a plain value" for name in self._names), *keys]

    def _deal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        taken, named, _, loss_named = self.graph.input_structure.children
        count = len(taken.children)
        given = dict(kwargs)
        by_name = takewhile(given.__contains__, self._names[len(args) :])
        args, kwargs = (*args, *(given.pop(name) for name in by_name)), given
        for_model = {str(key): kwargs[str(key)] for key in named.keys if key in kwargs}
        for_loss = {str(key): kwargs[str(key)] for key in loss_named.keys if key in kwargs}
        unknown = {key: value for key, value in kwargs.items() if key not in for_model and key not in for_loss}
        return [tuple(args[:count]), {**for_model, **unknown}, tuple(args[count:]), for_loss]

    def _fixed_match(self, leaves: list[Any]) -> bool:
        fixed = zip(leaves, self.graph.inputs, strict=True)
        return all(
            isinstance(leaf, Tensor) if isinstance(want, Value) else type(leaf) is type(want) and leaf == want
            for leaf, want in fixed
        )

    def refusal(self, why: str) -> UsageError:
        """The error for inputs that are not those captured."""
        return UsageError(
            f"The captured {self.graph.name} was called with other inputs: {why}. A graph holds the shapes and plain "
            f"values it was captured with. Call it like that, or capture the model again with this batch."
        )
