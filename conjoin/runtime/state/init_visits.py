"""What initialises a model without `init=`: its own `_init_weights`, as in transformers, and `reset_parameters`.

A model's `_init_weights` is tried on tensors without values first. So it is known before anything is made which module
nobody would initialise, and which ones write to tensors of others, as blocks do that scale their last layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conjoin.errors import UsageError
from conjoin.runtime.state.pieces import count, listed
from conjoin.runtime.torch_private import MetaWatch, memory_of

Initialise = Callable[[nn.Module], object]
Slot = tuple[dict[str, Tensor | None], str, Tensor]
"""Where a module holds a tensor: its dictionary, the name there, and the tensor."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A module's turn to be initialised."""

    module: nn.Module
    init: Initialise | None
    """What is asked first, before the module's own `reset_parameters`."""
    slots: list[Slot]
    """Where the tensors stand that may be used: the module's own, and those of others that `init` writes to."""


def own_slots(module: nn.Module) -> list[Slot]:
    """A module's own parameters and buffers."""
    held: list[dict[str, Tensor | None]] = [module._parameters, module._buffers]  # type: ignore[list-item]
    return [(tensors, name, tensor) for tensors in held for name, tensor in tensors.items() if tensor is not None]


def own_reset(module: nn.Module) -> Initialise | None:
    """The `reset_parameters` of a module, if it has one."""
    reset = getattr(type(module), "reset_parameters", None)
    return reset if callable(reset) else None


def _with_own_init(module: nn.Module, outer: Initialise | None = None) -> Iterator[tuple[nn.Module, Initialise | None]]:
    """Modules in the order of `nn.Module.apply`: children first, one that stands in two places twice.

    With each the `_init_weights` of the innermost module around it that has one for its modules, after what torch does
    when it makes the module, where that is a method of its own.
    """
    found = getattr(module, "_init_weights", None)
    mine = found if callable(found) and _takes_one(found) else outer
    for child in module.children():
        yield from _with_own_init(child, mine)
    yield module, _after_making(module, mine)


def _after_making(module: nn.Module, init: Initialise | None) -> Initialise | None:
    """What initialises a module after its `_reset_parameters`, as torch calls it in attention, which also writes to
    tensors of others."""
    made = getattr(type(module), "_reset_parameters", None)
    if own_reset(module) is not None or not callable(made) or not _takes_one(made):
        return init

    def both(module: nn.Module) -> None:
        made(module)
        if init is not None:
            init(module)

    return both


def _takes_one(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True


def find_visits(model: nn.Module, init: Initialise | None, left: frozenset[int]) -> list[Visit]:
    """Who is to be initialised by what, so that all tensors on the meta device get values but those `left`, by id."""
    order = list(_with_own_init(model))
    if init is not None:
        return [Visit(module, init, own_slots(module)) for module, _ in order if _needs(own_slots(module), left)]
    wanted = {id(tensor) for tensor in _tensors(model) if tensor.is_meta} - left
    order = [(module, own) for module, own in order if any(id(tensor) in wanted for tensor in _tensors(module))]
    rehearsed = _rehearse(model, order)
    visits = []
    written: set[int] = set()
    for (module, own), reached in zip(order, rehearsed, strict=True):
        slots = own_slots(module) + reached.others
        if _needs(slots, left):
            visits.append(Visit(module, own, slots))
            written |= reached.written
    faults = [
        describe(model, visit.module, lost)
        for visit in visits
        if own_reset(visit.module) is None and (lost := _lost(visit, left | written))
    ]
    refuse(faults, "nobody does it: neither an _init_weights of the model nor a reset_parameters gives them values")
    return visits


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _needs(slots: Iterable[Slot], left: frozenset[int]) -> bool:
    return any(tensor.is_meta and id(tensor) not in left for _, _, tensor in slots)


def _lost(visit: Visit, given: frozenset[int]) -> list[str]:
    own = own_slots(visit.module)
    return [name for _, name, tensor in own if tensor.is_meta and id(tensor) not in given]


@dataclass(frozen=True, slots=True)
class _Reached:
    """What a call of `_init_weights` wrote to."""

    written: frozenset[int]
    """The tensors, by id."""
    others: list[Slot]
    """Where those of them stand that are not the module's own."""


def _rehearse(model: nn.Module, order: list[tuple[nn.Module, Initialise | None]]) -> list[_Reached]:
    """Call every `_init_weights` with tensors that have no values in the place of all."""
    slots = [slot for module in model.modules() for slot in own_slots(module)]
    stands_for: dict[int, list[Slot]] = {}
    made: dict[int, Tensor] = {}
    try:
        for held, name, tensor in slots:
            if id(tensor) not in made:
                made[id(tensor)] = _without_values(tensor)
            held[name] = made[id(tensor)]
            stands_for.setdefault(memory_of(made[id(tensor)]), []).append((held, name, tensor))
        return [_try(module, init, stands_for) for module, init in order]
    finally:
        for held, name, tensor in slots:
            held[name] = tensor


def _without_values(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _try(module: nn.Module, init: Initialise | None, stands_for: dict[int, list[Slot]]) -> _Reached:
    if init is None:
        return _Reached(frozenset(), [])
    before = own_slots(module)
    with MetaWatch() as watch, torch.no_grad():
        try:
            init(module)
        except Exception:  # it may need values: when its turn comes it has them, and fails with its own error if at all
            watch.written |= {memory_of(tensor) for _, _, tensor in before}
    replaced = {memory_of(tensor) for held, name, tensor in before if held[name] is not tensor}
    for held, name, tensor in before:
        held[name] = tensor
    found = [slot for memory in watch.written | replaced for slot in stands_for.get(memory, ())]
    own = {(id(held), name) for held, name, _ in before}
    others = [slot for slot in found if (id(slot[0]), slot[1]) not in own and slot[2].is_meta]
    return _Reached(frozenset(id(tensor) for _, _, tensor in found), others)


def describe(model: nn.Module, module: nn.Module, names: Iterable[str]) -> str:
    """A module in words, with some of its tensors."""
    path = next(path for path, found in model.named_modules() if found is module)
    return f"{path or 'the model itself'} ({type(module).__name__}) with {', '.join(names)}"


def refuse(faults: Iterable[str], what: str) -> None:
    """Say for which modules initialising fails, if for any."""
    found = list(dict.fromkeys(faults))
    if found:
        raise UsageError(
            f"A model on the meta device was to be initialised module by module, and for {count(len(found), 'module')} "
            f"{what}. When the turn comes to a module only its own parameters and buffers are there, without values. "
            f"Pass init=, a function that gives the own tensors of a module their values, or weights=, files that have "
            f"them:\n{listed(found)}"
        )
