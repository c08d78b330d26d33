"""A graph's generated code, compiled: what is the same in every step is made once, autocast looked at once a call."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from conjoin.ops import under_autocast
from conjoin.runtime.program.failed_calls import CALLS, calls_by_line
from conjoin.runtime.program.functions import without_autocast
from conjoin.runtime.program.written_over import write_over
from conjoin.runtime.torch_private import has_no_values

Compiled = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Emitted:
    """A graph as FX."""

    program: fx.Graph
    """`forward(self, state, device, *inputs)` gives the outputs, then the new values of buffers; its state is that of
    the leaves and then what is fixed."""
    fixed: fx.Graph | None
    """`forward(self, state, device)` gives what is the same in every step."""
    once: fx.Graph | None = None
    """`forward(self, state, device)` gives what is the same for all runs of a step, and then what some of it is cast
    from; it stands after the leaves in the state of the program, before what is fixed."""
    casts: tuple[int, ...] = ()
    """By place, which of it are casts."""


def compile_text(program: fx.Graph, name: str) -> tuple[Compiled, str]:
    """Turn FX into a Python function and its text, which can be seen in tracebacks and debuggers."""
    code = program.python_code("self")
    filename = f"<conjoin {name}>"
    linecache.cache[filename] = (len(code.src), None, code.src.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = dict(code.globals) | {CALLS: calls_by_line(program, code.src)}
    exec(compile(code.src, filename, "exec"), namespace)  # text made by torch.fx from operators looked up by name
    return namespace["forward"], code.src


class Program:
    """What runs a step: `program(module, state, device, *inputs)`, under any autocast."""

    code: str
    """The text of what runs where there is no autocast."""

    def __init__(
        self, emitted: Emitted, name: str, compile: Callable[[fx.Graph, str], tuple[Compiled, str]] = compile_text
    ) -> None:
        self._emitted, self._name, self._compile = emitted, name, compile
        plain = without_autocast(emitted.program)
        write_over(plain)
        self._plainly, self.code = compile(plain, name)
        self._casting: Compiled | None = None
        self._fixing = None if emitted.fixed is None else compile_text(emitted.fixed, f"{name} once")[0]
        self._made: dict[tuple[torch.device, torch.dtype | None], tuple[Tensor, ...]] = {}

    def __call__(
        self, module: Any, state: Sequence[Tensor | None], device: torch.device, *inputs: Any
    ) -> tuple[Any, ...]:
        casts = under_autocast(device.type)
        run = self._under_autocast() if casts else self._plainly
        fixed = () if self._fixing is None else self._fixed(self._fixing, state, device, casts)
        return run(module, [*state, *fixed], device, *inputs)

    def _under_autocast(self) -> Compiled:
        if self._casting is None:
            self._casting = self._compile(self._emitted.program, f"{self._name} under autocast")[0]
        return self._casting

    def _fixed(
        self, make: Compiled, state: Sequence[Tensor | None], device: torch.device, casts: bool
    ) -> tuple[Tensor, ...]:
        """What is the same in every step, made when it is first asked for on a device and under an autocast."""
        if torch.compiler.is_compiling():
            return make(None, state, device)
        key = device, torch.get_autocast_dtype(device.type) if casts else None
        if key not in self._made:
            with torch.inference_mode(False), torch.no_grad():
                made = make(None, state, device)
            if any(map(has_no_values, made)):  # a pass that only asks for shapes
                return made
            self._made[key] = made
        return self._made[key]
