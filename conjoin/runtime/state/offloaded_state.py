"""What an optimizer remembers of parameters, on the host between steps.

Around `optimizer.step()` of any optimizer of torch stand two hooks. Those whose update of a parameter needs nothing of
the others update some at a time, unless the user has hooks there too: while some are updated, what is remembered of the
next is brought, and that of those before goes back. Others, and a step with a closure, have all of it brought first.
Between steps `optimizer.state` holds tensors in pinned host memory, which checkpoints read as they are. What was put on
the device since, as by `load_state_dict`, goes to the host with the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from conjoin.comm import updated_together
from conjoin.runtime.movement.host_copies import Engines
from conjoin.runtime.torch_private import has_step_hooks

_watched: dict[int, weakref.ref[nn.Parameter]] = {}
"""Parameters whose state lies on the host, by their identity."""
_homes: weakref.WeakKeyDictionary[Optimizer, _Home] = weakref.WeakKeyDictionary()

Leaving = tuple[list[Tensor], torch.cuda.Event | None]
"""What is held until it was copied, and when it is."""


def offload_states(parameters: Iterable[nn.Parameter]) -> None:
    """From the next step of any optimizer on, have what it remembers of these parameters on the host."""
    for parameter in parameters:
        key = id(parameter)
        _watched[key] = weakref.ref(parameter, lambda _, key=key: _watched.pop(key, None))  # type: ignore[misc]
    if _watched:
        _register()


@cache
def _register() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    home = _homes.get(optimizer)
    if home is not None:
        home.restore()  # of a step that failed
    groups = optimizer.param_groups
    mine = [p for group in groups for p in group["params"] if p.grad is not None and _is_watched(p)]
    if not mine:
        return
    home = home or _homes.setdefault(optimizer, _Home(optimizer, mine[0].device))
    closure = kwargs.get("closure") is not None or any(arg is not None for arg in args[1:])
    update = None if closure else _update_of(optimizer)
    if update is None:
        home.bring(mine)
        home.engines_wait()
    else:
        home.update(mine, update)


def _after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    home = _homes.get(optimizer)
    if home is not None:
        home.finish()


def _is_watched(parameter: Any) -> bool:
    found = _watched.get(id(parameter))
    return found is not None and found() is parameter


def _update_of(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """The step without its hooks; None where parameters may not be updated some at a time."""
    kind = type(optimizer)
    by_parameter = kind.__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.LBFGS)
    if not by_parameter or has_step_hooks(optimizer):
        return None
    found: Callable[[Optimizer], Any] | None = getattr(kind.step, "__wrapped__", None)
    return found


class _Home:
    """Where one optimizer's state lies."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self._optimizer, self._engines = weakref.ref(optimizer), Engines(device)
        self._hosts: dict[tuple[int, str], Tensor] = {}
        """By parameter and name, memory of the host for what is remembered."""
        self._arrived: torch.cuda.Event | None = None
        self._here: list[nn.Parameter] = []
        """Parameters whose state is on the device in this step."""
        self._lists: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
        """Groups of which some are updated, with all of their parameters."""

    def update(self, parameters: Sequence[nn.Parameter], step: Callable[[Optimizer], Any]) -> None:
        """Update parameters some at a time, the last of them with all others; to the step itself nothing is left, so
        that it cannot fail while groups have only some of their parameters."""
        optimizer = self._of()
        parts = [[parameters[i] for i in part] for part in updated_together([self._size(p) for p in parameters])]
        others = [p for group in optimizer.param_groups for p in group["params"] if not _is_watched(p)]
        self._lists = [(group, group["params"]) for group in optimizer.param_groups]
        leaving: Leaving = ([], None)
        try:
            self.bring(parts[0])
            for part, following in pairwise(parts):
                self.engines_wait()
                self.bring(following)
                self._restrict(part)
                step(optimizer)
                self._engines.wait(leaving[1])
                leaving = self._send(part)
            self.engines_wait()
            self._engines.wait(leaving[1])
            self._restrict([*others, *parts[-1]])
            step(optimizer)
            self._restrict(())
        except BaseException:
            self.restore()
            raise

    def bring(self, parameters: Sequence[nn.Parameter]) -> None:
        """Start to bring what is remembered of parameters."""
        self._here = list(parameters)
        pairs = []
        for parameter, key, kept in self._tensors(parameters):
            if kept is self._hosts.get((id(parameter), key)):
                pairs.append((torch.empty_like(kept, device=parameter.device, pin_memory=False), kept))
                self._of().state[parameter][key] = pairs[-1][0]
        self._arrived = self._engines.bring(pairs)

    def engines_wait(self) -> None:
        """Update nothing before what was started has come."""
        self._engines.wait(self._arrived)

    def finish(self) -> None:
        """After the step: all of it goes to the host, which waits for it, as whoever reads it there does not."""
        self.restore()
        here, self._here = self._here, []
        leaving = self._send(here)
        self._engines.wait(leaving[1])
        self._engines.settle()

    def restore(self) -> None:
        """Give the groups all of their parameters again."""
        for group, parameters in self._lists:
            group["params"] = parameters
        self._lists = []

    def _send(self, parameters: Sequence[nn.Parameter]) -> Leaving:
        """Start to copy to the host; what is on the device is held until it was copied."""
        pairs = []
        for parameter, key, kept in self._tensors(parameters):
            name = id(parameter), key
            host = self._hosts.get(name)
            if host is None or (host.shape, host.dtype) != (kept.shape, kept.dtype):
                host = torch.empty_like(kept, device="cpu", pin_memory=parameter.device.type == "cuda")
            pairs.append((host, kept))
            self._hosts[name] = self._of().state[parameter][key] = host
        return [kept for _, kept in pairs], self._engines.send(pairs)

    def _restrict(self, parameters: Sequence[nn.Parameter]) -> None:
        chosen = {id(p) for p in parameters}
        for group, all_of_them in self._lists:
            group["params"] = [p for p in all_of_them if id(p) in chosen]

    def _tensors(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """What is remembered of parameters on the device, or lies on the host for it; numbers stay where they are."""
        state = self._of().state
        for parameter in parameters:
            for key, kept in list(state[parameter].items()) if parameter in state else ():
                mine = isinstance(kept, Tensor) and kept.dim() > 0
                if mine and (kept.device == parameter.device or kept is self._hosts.get((id(parameter), key))):
                    yield parameter, key, kept

    def _size(self, parameter: nn.Parameter) -> int:
        """Bytes of what is remembered of a parameter; before the first step as many as Adam would."""
        found = sum(kept.numel() * kept.element_size() for _, _, kept in self._tensors([parameter]))
        return found or 2 * parameter.numel() * parameter.element_size()

    def _of(self) -> Optimizer:
        found = self._optimizer()
        assert found is not None
        return found
