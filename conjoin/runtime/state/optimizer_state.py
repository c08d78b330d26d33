"""An optimizer's state under the user's parameter names, in the form of `torch.distributed.checkpoint.state_dict`.

What an optimizer keeps element by element (momenta, squares) is split as its parameter is; the rest is plain. So the
state of any elementwise optimizer moves between plans, numbers of ranks, and plain torch.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from conjoin.errors import CheckpointError, UsageError
from conjoin.runtime.state.pieces import Piece, as_piece, check_loaded, count, listed, local_part
from conjoin.runtime.state.storage import Store

STATE, GROUPS, PARAMS = "state", "param_groups", "params"
"""The keys of torch's own form."""
_PARAM_NAMES = "param_names"
"""Torch keeps names here when an optimizer was made of named parameters; loading leaves the optimizer's own."""


class Stored(Protocol):
    """A module that keeps its parameters in a store."""

    store: Store


def optimizer_state_dict(step: Stored, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state by parameter names, split tensors as pieces: what torch's `get_optimizer_state_dict` gives.

    Before the first optimizer step there is no state yet, but torch's checkpoints read into tensors that are there.
    Then these are new tensors as they are after a step with gradients of zero; optimizer and parameters stay as they
    are until `load_optimizer_state_dict`.
    """
    _check(step, optimizer)
    return state_by_name(step.store, optimizer, fresh=not optimizer.state)


def _check(step: Any, optimizer: Any) -> None:
    check_loaded(step)
    if not isinstance(optimizer, Optimizer):
        raise UsageError(
            f"A {type(optimizer).__name__} was given instead of an optimizer. Its state belongs to the parameters of "
            f"the module that conjoin.load gave. Pass the module, then the torch.optim.Optimizer of its parameters."
        )


def state_by_name(store: Store, optimizer: Optimizer, fresh: bool = False) -> dict[str, Any]:
    """The state that is there, or what a fresh optimizer would begin with."""
    names = parameter_names(store, optimizer)
    state: dict[str, dict[str, Any]] = {}
    for group, parameter in _grouped(optimizer):
        held = optimizer.state.get(parameter, {})
        if fresh and parameter.requires_grad:
            held = _first_state(optimizer, group, parameter)
        if held:
            name = names[parameter]
            state[name] = {key: _as_saved(store, name, parameter, (key, value)) for key, value in held.items()}
    groups = [{**group, PARAMS: [names[parameter] for parameter in group[PARAMS]]} for group in optimizer.param_groups]
    return {STATE: state, GROUPS: groups}


def _grouped(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
    return ((group, parameter) for group in optimizer.param_groups for parameter in group[PARAMS])


def parameter_names(store: Store, optimizer: Optimizer) -> dict[nn.Parameter, str]:
    """The name of every parameter of an optimizer; a tied one has its first."""
    names = {parameter: name for name, parameter in store.root.named_parameters()}
    strangers = [tuple(parameter.shape) for _, parameter in _grouped(optimizer) if parameter not in names]
    if strangers:
        raise CheckpointError(
            f"The optimizer holds {count(len(strangers), 'parameter')} that the module does not have, the first of "
            f"shape {strangers[0]}. Their names are not known, so their state cannot be saved or loaded. Make the "
            f"optimizer of the parallel module's parameters()."
        )
    return names


def _first_state(optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """What an optimizer keeps of a parameter after its first step: found with a stand-in, one parameter at a time."""
    stand_in = nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    stepped = copy.copy(optimizer)
    stepped.state = defaultdict(dict)
    stepped.param_groups = [{**group, PARAMS: [stand_in]}]
    stepped.step()
    return dict(stepped.state[stand_in])


def _as_saved(store: Store, name: str, parameter: nn.Parameter, entry: tuple[str, Any]) -> Any:
    key, value = entry
    if not isinstance(value, Tensor):
        return value
    if value.shape == parameter.shape:
        return as_piece(store, name, value.detach())
    if value.numel() == 1 or store.shape(name, parameter) == tuple(parameter.shape):
        return value.detach()
    raise CheckpointError(
        f"The state {key} of {name} was to be saved, and it has shape {tuple(value.shape)} where this rank holds "
        f"{tuple(parameter.shape)} of {store.shape(name, parameter)}. Only what an optimizer keeps element by element "
        f"can be split as the parameter is. Use an elementwise optimizer, or a plan that keeps {name} whole."
    )


def load_optimizer_state_dict(step: Stored, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer a state by parameter names: whole tensors are cut, pieces must be those of this rank.

    All or nothing. As with `Optimizer.load_state_dict`, pieces are taken over, not copied.
    """
    _check(step, optimizer)
    names = parameter_names(step.store, optimizer)
    faults = group_faults(names, optimizer, state)
    taken: dict[int, dict[str, Any]] = {}
    for place, (_, parameter) in enumerate(_grouped(optimizer)):
        entries = state.get(STATE, {}).get(names[parameter])
        if entries is not None:
            taken[place] = _take(step.store, names[parameter], parameter, entries, faults)
    if faults:
        raise CheckpointError(
            f"An optimizer state was given that does not fit the optimizer in {count(len(faults), 'place')}. It is of "
            f"another model or another optimizer, or its pieces are of another plan. Give the state of the same "
            f"optimizer over the same parameters:\n{listed(faults)}"
        )
    places = iter(range(len(names)))
    groups = []
    for own, saved in zip(optimizer.param_groups, state[GROUPS], strict=True):
        kept = {key: value for key, value in saved.items() if key not in (PARAMS, _PARAM_NAMES)}
        groups.append({**kept, PARAMS: [next(places) for _ in own[PARAMS]]})
    optimizer.load_state_dict({STATE: taken, GROUPS: groups})


def group_faults(names: Mapping[nn.Parameter, str], optimizer: Optimizer, state: Mapping[str, Any]) -> list[str]:
    """In which groups a saved state has other parameters than the optimizer, and state of parameters it has not."""
    saved = state.get(GROUPS)
    if not isinstance(saved, list) or not isinstance(state.get(STATE), Mapping):
        return [f"it does not have {STATE!r} and {GROUPS!r}"]
    own = [[names[parameter] for parameter in group[PARAMS]] for group in optimizer.param_groups]
    faults = []
    if len(own) != len(saved):
        faults.append(f"it has {count(len(saved), 'parameter group')}, the optimizer {len(own)}")
    for i, (mine, group) in enumerate(zip(own, saved, strict=False)):
        theirs = group.get(PARAMS, ())
        faults += [f"group {i} does not have {name}" for name in mine if name not in set(theirs)]
        faults += [f"group {i} has {name}, which the optimizer's does not" for name in theirs if name not in set(mine)]
    known = {name for group in own for name in group}
    strangers = [name for name in state[STATE] if name not in known]
    return faults + [f"there is state of {name}, which the optimizer does not have" for name in strangers]


def _take(
    store: Store, name: str, parameter: nn.Parameter, entries: Mapping[str, Any], faults: list[str]
) -> dict[str, Any]:
    """What a parameter's saved state has for this rank; what does not fit is added to the faults."""
    taken: dict[str, Any] = {}
    for key, value in entries.items():
        part = value
        if isinstance(value, Tensor) and is_split_state(store, name, parameter, value.shape):
            part = local_part(store, name, parameter, value)
            if isinstance(part, str):
                faults.append(f"{key} of {name} {part}")
            elif not isinstance(value, Piece):
                part = part.clone()  # the whole is not kept
        taken[key] = part
    return taken


def is_split_state(store: Store, name: str, parameter: Tensor, kept: tuple[int, ...]) -> bool:
    """Whether what an optimizer keeps of a parameter is split as that is, by its whole shape; step counts are not."""
    shape = store.shape(name, parameter)
    return not store.is_whole(name, shape) and (tuple(kept) == shape or prod(kept) != 1)
