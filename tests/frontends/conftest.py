"""What the tests of this room share: one thread, and the comparison of a captured model with the plain one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from conjoin.frontends import capture
from conjoin.ir import Graph
from conjoin.runtime import CapturedModule, to_module


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@dataclass(frozen=True, slots=True)
class Captured:
    """A graph, the module that runs it over the given model, and a copy of the plain model to compare with."""

    graph: Graph
    module: CapturedModule
    plain: nn.Module

    def ops(self) -> list[str]:
        return [node.op for node in self.graph.nodes]


def differences(got: nn.Module, want: nn.Module, tolerance: float = 0.0) -> list[str]:
    """Parameters and buffers that are not bit for bit the same, and gradients that are not within the tolerance."""
    found = []
    for (name, mine), (other, theirs) in zip(got.named_parameters(), want.named_parameters(), strict=True):
        assert name == other
        if not torch.equal(mine, theirs):
            found.append(name)
        if (mine.grad is None) != (theirs.grad is None):
            found.append(f"{name}.grad is None")
        elif mine.grad is not None and theirs.grad is not None and not _near(mine.grad, theirs.grad, tolerance):
            found.append(f"{name}.grad")
    for (name, mine), (other, theirs) in zip(got.named_buffers(), want.named_buffers(), strict=True):
        assert name == other
        if not torch.equal(mine, theirs) or mine.dtype != theirs.dtype or mine.requires_grad != theirs.requires_grad:
            found.append(name)
    return found


def _near(mine: Tensor, theirs: Tensor, tolerance: float) -> bool:
    if tolerance:
        return bool((mine - theirs).norm() <= tolerance * theirs.norm())
    return torch.equal(mine, theirs)


def same_tree(got: Any, want: Any) -> bool:
    """Whether two outputs have the same nesting and bit for bit the same tensors."""
    mine, my_spec = pytree.tree_flatten(got)
    theirs, their_spec = pytree.tree_flatten(want)
    return my_spec == their_spec and all(map(_same_leaf, mine, theirs))


def _same_leaf(got: Any, want: Any) -> bool:
    if not isinstance(want, Tensor):
        return type(got) is type(want) and got == want
    return torch.equal(got, want) and got.dtype == want.dtype and got.requires_grad == want.requires_grad


def backward(output: Any) -> None:
    """Differentiate the sum of everything that has a gradient."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if leaves:
        torch.stack([leaf.double().sum() for leaf in leaves]).sum().backward()


def run_both(captured: Captured, mine: Callable[[], Any], theirs: Callable[[], Any], *, seed: int = 3) -> None:
    """One step of both from the same seed: outputs, gradients, buffers and the random state must be the same."""
    torch.manual_seed(seed)
    got = mine()
    drawn = torch.get_rng_state()
    torch.manual_seed(seed)
    want = theirs()
    assert same_tree(got, want), (got, want)
    assert torch.equal(drawn, torch.get_rng_state()), "another amount of randomness was used"
    backward(got)
    backward(want)
    assert differences(captured.module, captured.plain) == []


@pytest.fixture
def compare() -> Callable[..., Captured]:
    """`compare(model, batch, plain_step, loss=...)`: capture, run both for some steps, demand that they are equal."""

    def run(
        model: nn.Module,
        batch: Any,
        plain: Callable[[nn.Module], Any] | None = None,
        *,
        loss: Callable[..., Any] | None = None,
        steps: int = 1,
    ) -> Captured:
        reference = copy.deepcopy(model)
        graph = capture(model, batch, loss)
        captured = Captured(graph, to_module(graph, model), reference)
        step = plain or (lambda module: module(batch))
        for seed in range(steps):
            run_both(captured, lambda: captured.module(batch), lambda: step(reference), seed=seed)
        return captured

    return run


@pytest.fixture
def unequal() -> Callable[..., list[str]]:
    """`unequal(a, b, tolerance=0.0)`: the parameters, gradients and buffers in which two modules differ."""
    return differences
