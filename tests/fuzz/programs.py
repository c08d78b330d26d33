"""Random small models as Python text: lines are drawn one after the other, and those that torch runs are kept.

A program is a class in plain torch and the text that makes its batch, so that one that fails can be read, copied and
run. Every line is run when it is drawn: its tensors' shapes and dtypes say what may come next, and a line that torch
refuses is dropped.
"""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

MAX_ELEMENTS = 2_048
"""Of a tensor: models are many, not large."""
SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16)


@dataclass(frozen=True, slots=True)
class Program:
    """A drawn model: its text, and what it was drawn from."""

    seed: int
    text: str

    def build(self) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The model and the batch to capture it with."""
        space = self._run()
        torch.manual_seed(self.seed)
        return space["Model"](), space["batch"]()

    def batch(self) -> tuple[Tensor, ...]:
        """A batch of random values."""
        found: tuple[Tensor, ...] = self._run()["batch"]()
        return found

    def _run(self) -> dict[str, Any]:
        name = f"<program {self.seed}>"
        linecache.cache[name] = (len(self.text), None, self.text.splitlines(keepends=True), name)
        space: dict[str, Any] = {}
        exec(compile(self.text, name, "exec"), space)
        return space


@dataclass(slots=True)
class Drawing:
    """A program as far as it is drawn."""

    rng: Random
    dtype: torch.dtype
    model: nn.Module = field(default_factory=nn.Module)
    inits: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    inputs: list[tuple[str, str]] = field(default_factory=list)
    """Names of what forward takes, and the text that makes each."""
    space: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    """Tensors that lines may read, the newest last."""
    _count: int = 0
    _indent: str = ""

    def __post_init__(self) -> None:
        self.space |= {"torch": torch, "nn": nn, "F": nn.functional, "self": self.model}

    # What is there.

    def __getitem__(self, name: str) -> Tensor:
        found: Tensor = eval(name, self.space)
        return found

    def pick(self, *kinds: str, least: int = 0, most: int = 9) -> str | None:
        """A tensor of one of these kinds and of so many dims; rather a new one than an old one."""
        wanted = kinds or ("float",)
        fit = [n for n in self.names if kind_of(self[n]) in wanted and least <= self[n].dim() <= most]
        return fit[min(len(fit) - 1, int(len(fit) * self.rng.random() ** 0.6))] if fit else None

    def alike(self, name: str) -> str | None:
        """Another tensor of the same dtype that broadcasts with one."""
        one = self[name]
        fit = [n for n in self.names if self[n].dtype == one.dtype and n != name and _broadcast(self[n], one)]
        return self.rng.choice(fit) if fit else None

    def dim(self, name: str) -> int:
        """A dim of a tensor, counted from either end."""
        rank = self[name].dim()
        return self.rng.randrange(rank) - (rank if self.rng.random() < 0.5 else 0)

    # What is added.

    def fresh(self, stem: str = "h") -> str:
        self._count += 1
        return f"{stem}{self._count}"

    def init(self, stem: str, text: str) -> str:
        """A new attribute of the model."""
        name = self.fresh(stem)
        line = text.replace("{}", name) if "{}" in text else f"self.{name} = {text}"
        exec(line, self.space)
        self.inits.append(line)
        return f"self.{name}"

    def do_init(self, line: str) -> None:
        """A statement about attributes of the model."""
        exec(line, self.space)
        self.inits.append(line)

    def take(self, text: str) -> str:
        """A new input of forward, made by this text."""
        name = self.fresh("x")
        self.space[name] = eval(text, self.space)
        self.inputs.append((name, text))
        self.names.append(name)
        return name

    def let(self, text: str) -> str | None:
        """A new tensor by this expression; None where torch refuses it or it is of no use."""
        name = self.fresh()
        try:
            made = eval(text, self.space)
        except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
            return None
        if not isinstance(made, Tensor) or not 0 < made.numel() <= MAX_ELEMENTS or made.dim() > 5:
            return None
        if made.is_floating_point() and not _is_tame(made):
            return None
        self.space[name] = made
        self.lines.append(f"{self._indent}{name} = {text}")
        self.names.append(name)
        return name

    def do(self, text: str) -> bool:
        """A statement that changes a tensor in place; whether torch takes it."""
        try:
            exec(text, self.space)
        except (RuntimeError, IndexError, TypeError, ValueError):
            return False
        self.lines.append(f"{self._indent}{text}")
        return True

    @contextmanager
    def within(self, context: str) -> Iterator[None]:
        """Lines inside a `with`."""
        before = len(self.lines)
        self.lines.append(f"with {context}:")
        self._indent = "    "
        try:
            with eval(context, self.space):
                yield
        finally:
            self._indent = ""
            if len(self.lines) == before + 1:
                self.lines.pop()

    def finish(self, seed: int, result: str) -> Program:
        """The whole text."""
        names = ", ".join(name for name, _ in self.inputs)
        body = [*self.lines, f"return {result}"]
        made = ", ".join(text for _, text in self.inputs)
        text = "\n".join([
            "import torch", "from torch import nn", "from torch.nn import functional as F", "", "",
            "class Model(nn.Module):", "    def __init__(self):", "        super().__init__()",
            *(f"        {line}" for line in self.inits), "",
            f"    def forward(self, {names}):", *(f"        {line}" for line in body), "", "",
            "def batch():", f"    return ({made},)", "",
        ])  # fmt: skip
        return Program(seed, text)


def kind_of(tensor: Tensor) -> str:
    """Which operators take a tensor."""
    if tensor.dtype == torch.bool:
        return "bool"
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return "half"
    return "float" if tensor.is_floating_point() else "int"


def _broadcast(one: Tensor, other: Tensor) -> bool:
    pairs = zip(reversed(one.shape), reversed(other.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


def _is_tame(tensor: Tensor) -> bool:
    """Neither huge nor no number: what is compared must not be lost in overflow."""
    found = tensor.detach().double().abs()
    return bool(found.isfinite().all()) and found.max().item() < 1e3


def shape_text(shape: Iterable[int]) -> str:
    return ", ".join(map(str, shape))
