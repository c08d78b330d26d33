"""`to_module`: a graph as an `nn.Module` again, by generated code, over the model's own parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import GraphError, UsageError
from conjoin.ir import Graph, LeafKind, fingerprint, parse_graph, plain_model, verify
from conjoin.runtime.program.call_forms import Calling
from conjoin.runtime.program.emission import emit_program
from conjoin.runtime.program.programs import Program
from conjoin.runtime.state.blocks import Sections
from conjoin.runtime.state.slots import Slot, find_constant, find_slots, read_slot

_GRAPH_TEXT = "conjoin graph"
"""Under this the graph of a saved module is found."""


class CapturedModule(nn.Module):
    """A graph that runs on one device: the model's own submodules, parameters and buffers under a generated forward."""

    graph: Graph
    code: str
    """The generated forward as Python text."""
    _program: Program
    _sources: tuple[Slot | str, ...]
    """Where the value of each leaf is found: in a module, or among the constants."""
    _sections: Sections
    _targets: tuple[tuple[Slot, ...], ...]
    """Where the new value of each buffer goes."""
    _constants: dict[str, Tensor]
    _calling: Calling

    def __init__(self, graph: Graph, model: nn.Module) -> None:
        super().__init__()
        # The shell shares the model's dictionaries: names and state_dict are the model's own.
        for store in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[store] = model.__dict__[store]
        self.training = graph.training
        constants = graph.leaves_of(LeafKind.CONSTANT)
        self.__dict__["_constants"] = {leaf.name: find_constant(model, leaf) for leaf in constants}
        self._prepare(graph)

    def _prepare(self, graph: Graph) -> None:
        """Make all that follows from the graph; past `__setattr__`, as a submodule may have any of these names."""
        kept = tuple(leaf for leaf in graph.leaves if leaf.kind is not LeafKind.INPUT)
        slots = {leaf: find_slots(self, leaf) for leaf in kept if leaf.kind is not LeafKind.CONSTANT}
        places = {leaf.name: slots[leaf] for leaf in slots if leaf.kind is LeafKind.BUFFER}
        program = Program(emit_program(graph, kept), f"{graph.name} {fingerprint(graph)[:12]}")
        self.__dict__.update(
            graph=graph,
            code=program.code,
            _program=program,
            _sources=tuple(slots[leaf][0] if leaf in slots else leaf.name for leaf in kept),
            _sections=Sections(kept, [leaf.type.shape for leaf in kept]),
            _targets=tuple(places[name] for name, _ in graph.updates),
            _calling=Calling(graph),
        )

    def __getstate__(self) -> dict[str, Any]:
        """The module's own state and the graph as text; the rest is made anew."""
        made = ("graph", "code", "_program", "_sources", "_sections", "_targets", "_calling")
        kept = {key: value for key, value in self.__dict__.items() if key not in made}
        return {**kept, _GRAPH_TEXT: str(self.graph)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        text = state.pop(_GRAPH_TEXT)
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare(parse_graph(text))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CapturedModule:
        state = (LeafKind.PARAMETER, LeafKind.BUFFER)
        for dtype in {leaf.type.dtype for leaf in self.graph.leaves if leaf.kind in state}:
            wanted = fn(torch.empty(0, dtype=dtype)).dtype
            if wanted != dtype:
                raise UsageError(
                    f"The captured {self.graph.name} was asked to change from {dtype} to {wanted}. A graph holds the "
                    f"dtypes it was captured with. Change the original model and capture it again."
                )
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def train(self, mode: bool = True) -> CapturedModule:
        """Only the captured mode: dropout and batch norm were fixed when the graph was made."""
        if mode != self.graph.training:
            wanted, have = ("training", "eval") if mode else ("eval", "training")
            raise UsageError(
                f"A graph captured in {have} mode was asked to switch to {wanted} mode. Dropout and batch norm are "
                f"part of the graph. Call model.{'train' if mode else 'eval'}() on the original model and capture "
                f"it again."
            )
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph: the inputs as the model takes them, then what the loss takes; or the batch as captured."""
        return self._calling.results(self.run_flat(self._calling.arrange(args, kwargs)))

    def run_flat(self, inputs: list[Tensor]) -> list[Any]:
        """The outputs one after the other, from the inputs in the captured order."""
        for tensor, leaf in zip(inputs, self.graph.leaves_of(LeafKind.INPUT), strict=True):
            kind = leaf.type
            if tuple(tensor.shape) != kind.shape or tensor.dtype != kind.dtype:
                raise self._calling.refusal(
                    f"it was captured for {kind} where {tensor.dtype} of shape {tuple(tensor.shape)} came"
                )
        device = inputs[0].device if inputs else next((p.device for p in self.parameters()), torch.device("cpu"))
        results = self._program(self, self._state(device), device, *inputs)
        self._write_back(results[len(self.graph.outputs) :])
        return list(results[: len(self.graph.outputs)])

    def _state(self, device: torch.device) -> list[Tensor | None]:
        state: list[Tensor | None] = []
        for source in self._sources:
            if isinstance(source, str):
                if self._constants[source].device != device:
                    self._constants[source] = self._constants[source].to(device)
                state.append(self._constants[source])
            else:
                state.append(read_slot(source))
        return self._sections.cut(state)

    def _write_back(self, values: tuple[Tensor, ...]) -> None:
        """Give buffers their new values, unless written over: as new tensors, as gradients may need the old ones."""
        for slots, value in zip(self._targets, values, strict=True):
            if value is read_slot(slots[0]):
                continue
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                first, name = slots[0]
                first._buffers[name].copy_(value)  # type: ignore[union-attr] # one made in this mode is never trained
                continue
            made = value.detach().contiguous() if 0 in value.stride() else value.detach()
            for module, name in slots:
                module._buffers[name] = made


def to_module(graph: Graph, model: nn.Module) -> CapturedModule:
    """The graph as a module over `model`'s own parameters and buffers: same names, same outputs, same gradients.

    >>> from conjoin.frontends import capture
    >>> model = nn.Linear(4, 2)
    >>> x = torch.ones(3, 4)
    >>> torch.equal(to_module(capture(model, x), model)(x), model(x))
    True
    """
    try:
        return CapturedModule(verify(graph), plain_model(model))
    except LookupError as error:
        raise GraphError(
            f"The graph {graph.name!r} cannot run here: it needs {error}. An operator or an output class is not known "
            f"to this process. Import the library that defines it first."
        ) from None
