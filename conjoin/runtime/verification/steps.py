"""Some steps of training of one module, written down: what others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import torch
from torch import Tensor, nn

from conjoin.errors import UsageError
from conjoin.ir import Graph, flatten_tree, unflatten_tree

SEED = 20_240_601
"""Of what random operators draw, on one device and on many."""


@dataclass(frozen=True, slots=True)
class Reference:
    """What one device computed: the loss and all gradients of every step, and the state after the last."""

    batches: Sequence[Any]
    """One for each step."""
    losses: tuple[float, ...]
    gradients: tuple[Mapping[str, Tensor], ...]
    state: Mapping[str, Tensor]
    drawn: Tensor
    """The state of the generator after the last step."""


Call = Callable[[nn.Module, Any], Any]
"""How a module is called with a batch."""


def spread(module: nn.Module, batch: Any) -> Any:
    """The tensors of a batch one after the other."""
    return module(*batch) if isinstance(batch, tuple | list) else module(batch)


def train(
    module: nn.Module, batches: Sequence[Any], graph: Graph, device: torch.device, call: Call = spread
) -> Reference:
    """Train a module, batch by batch; the caller's generators are not touched."""
    losses, gradients = [], []
    optimizer = make_optimizer(module.parameters())
    with seeded(device) as generator:
        for batch in batches:
            losses.append(step(lambda given: call(module, given), optimizer, moved(batch, device), graph.loss))
            if not isfinite(losses[-1]):
                raise NoNumber(
                    f"{graph.name} was to be compared with one device, and its loss there is {losses[-1]} in step "
                    f"{len(losses)}. What is not a number cannot be compared. Give it a batch and values with a finite "
                    f"loss, or compare fewer steps."
                )
            gradients.append(_clones((n, p.grad) for n, p in module.named_parameters(remove_duplicate=False)))
            update(optimizer)
        drawn = generator.get_state()
    return Reference(batches, tuple(losses), tuple(gradients), _clones(state_of(module).items()), drawn)


class NoNumber(UsageError):
    """A loss that is infinite or not a number."""


@contextmanager
def seeded(device: torch.device) -> Iterator[torch.Generator]:
    """The device's own generator started anew, and put back after."""
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        generator = torch.cuda.default_generators[device.index] if on_cuda else torch.default_generator
        generator.manual_seed(SEED)
        yield generator


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device, in tensors of its own: a model may write to what it is given."""
    leaves, spec = flatten_tree(batch)
    return unflatten_tree([_copied(x, device) if isinstance(x, Tensor) else x for x in leaves], spec)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under all their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer | None:
    """Linear in the gradients: Adam would make a step of a parameter whose gradient is nothing but rounding."""
    trained = [p for p in parameters if p.requires_grad]
    return torch.optim.SGD(trained, lr=1e-2, momentum=0.9) if trained else None


def update(optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is not None:
        optimizer.step()


def step(
    run: Callable[[Any], Any], optimizer: torch.optim.Optimizer | None, batch: Any, loss_index: int | None
) -> float:
    """One forward and backward pass; where no output is the loss, everything that comes out is summed up."""
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    outputs = run(batch)
    if loss_index is not None:
        loss: Tensor = flatten_tree(outputs)[0][loss_index]
    else:
        tensors = [x for x in flatten_tree(outputs)[0] if isinstance(x, Tensor) and x.numel()]
        squares = [_finite(x).square().mean() for x in tensors]
        loss = torch.stack(squares).sum() if squares else torch.zeros(())
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    return float(loss.detach())


def _finite(tensor: Tensor) -> Tensor:
    """In double precision; infinities, as of masked scores, count as nothing."""
    real = tensor.abs() if tensor.is_complex() else tensor
    return real.double().nan_to_num(nan=nan, posinf=0.0, neginf=0.0)


def _clones(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named if tensor is not None}
