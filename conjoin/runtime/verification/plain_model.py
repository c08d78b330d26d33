"""The user's own model and loss, run as the user would: no graph, no plan."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.ir import Graph, changed_names, copied_model, python_state
from conjoin.runtime.verification.fresh_batches import Freshness, fresh_batches
from conjoin.runtime.verification.steps import Reference, train

Run = Callable[[nn.Module, Any, Any], Any]
"""Calls a model with what it takes of a batch, and the loss with the rest: `run(model, batch, loss)`."""


@dataclass(frozen=True, slots=True)
class PlainRun:
    """What the model itself came to."""

    reference: Reference
    freshness: Freshness
    changed: tuple[str, ...]
    """What the model keeps beside its tensors and forward changes."""


@dataclass(frozen=True, slots=True)
class PlainModel:
    """A model, its loss, and how a batch is dealt out to the two."""

    model: nn.Module
    loss: Any
    run: Run

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return next((x.device for x in (*self.model.parameters(), *self.model.buffers())), torch.device("cpu"))

    def changed(self, change: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> PlainModel:
        """A copy with every parameter and buffer changed; the loss reads the copy, where it reads the model."""
        memo: dict[int, Any] = {}
        model = changed_copy(self.model, change, memo)
        is_function = isinstance(self.loss, FunctionType)
        loss = _copied_function(self.loss, memo) if is_function else copy.deepcopy(self.loss, memo)
        if isinstance(loss, nn.Module):
            _change(loss, change)
        return PlainModel(model, loss, self.run)

    def train(
        self, batch: Any, num_steps: int, graph: Graph, mode: AbstractContextManager[Any] | None = None
    ) -> PlainRun:
        """Train on the freshest batches that the model takes; the error of the batch itself where it takes none."""
        for freshness in Freshness:
            batches, own = fresh_batches(batch, num_steps, freshness), self.changed()
            before = python_state(own.model)
            try:
                with _sparse_checked(freshness is not Freshness.GIVEN):
                    reference = own.train_on(batches, graph, mode)
            except Exception:  # a user's model may raise anything on a batch it was not made for
                if freshness is Freshness.GIVEN:
                    raise
                continue
            return PlainRun(reference, freshness, changed_names(before, python_state(own.model)))
        raise AssertionError("the last batch is returned or raises")

    def train_on(
        self, batches: Sequence[Any], graph: Graph, mode: AbstractContextManager[Any] | None = None
    ) -> Reference:
        """Train the model itself, which is changed by that."""

        def call(model: nn.Module, batch: Any) -> Any:
            return self.run(model, batch, self.loss)

        with _outside_kept(), mode or nullcontext():
            return train(self.model, batches, graph, self.device, call)


@contextmanager
def _sparse_checked(is_drawn: bool) -> Iterator[None]:
    """Where a batch was drawn, let torch refuse sparse matrices that are none: by itself it reads where nothing is."""
    if not is_drawn:
        yield
        return
    with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
        yield


def changed_copy(model: nn.Module, change: Callable[[Tensor], Tensor], memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy with every parameter and buffer changed; unlike `model.to()` it keeps buffers tied."""
    copied = copied_model(model, memo)
    _change(copied, change)
    return copied


def _change(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    buffers: dict[int, tuple[Tensor, Tensor]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad, parameter.data = None, change(parameter.data)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffers.setdefault(id(buffer), (buffer, change(buffer)))[1]


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> Any:
    """A function that reads the copy of the model where it reads the model, from around it or from its module."""

    def copied(value: Any) -> Any:
        return copy.deepcopy(value, memo) if isinstance(value, nn.Module | Tensor) else value

    cells = tuple(CellType(copied(cell.cell_contents)) for cell in function.__closure__ or ())
    names = set(function.__code__.co_names) & set(function.__globals__)
    space = {**function.__globals__, **{name: copied(function.__globals__[name]) for name in names}}
    made = FunctionType(function.__code__, space, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@contextmanager
def _outside_kept() -> Iterator[None]:
    """What forward draws from Python's and numpy's generators is drawn again by the caller."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.random.set_state(states[1])
