"""A drawn model trained plainly and by plans for 1, 2 and 4 devices: loss, gradients, weights and buffers.

How far apart two right runs may be is measured, not guessed: the plain model is run again with every result of
arithmetic moved by at most one unit in its last place (`conjoin.runtime.verification.precision`), forward and
backward. What a plan differs by may be `FACTOR` times what these runs differ by, and `FLOOR` units in the last place
of the coarsest dtype of the model, relative to the tensor's largest element; a gradient that cancels to nothing is
compared with a thousandth of the largest gradient and of the loss.

More runs never allow less, so they are made only for a plan that is further off than those units. Where one is further
off than three runs allow, the answer may hang on a rounding: the sign of a sum that is zero but for roundings, say.
Then many more are made, half of them with inputs and what is only moved a rounding away too, and batch norm as its
parts round (`Inside`), and one in double precision: a plan is also right where it is not much further from that than
the plain model is itself.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from conjoin.cost import ATTENTION, CostModel
from conjoin.errors import CaptureError, StrategyError
from conjoin.frontends import capture
from conjoin.ir import Graph, Plan
from conjoin.machine import DeviceType, Link, Machine, Mesh, NodeKind
from conjoin.runtime.parallel import ParallelModule
from conjoin.runtime.ranks.threads import run_ranks
from conjoin.runtime.state.storage import Store
from conjoin.runtime.verification.precision import Doubled, Rounded
from conjoin.search import Wish, baseline_names, find_plan, make_plan
from conjoin.sim import Simulation
from tests.fuzz.programs import Program
from tests.fuzz.random_models import draw

DEVICES = (1, 2, 4)
NUM_STEPS, NUM_IN_DOUBT = 2, 64
NUM_ROUNDINGS = (0, 3, NUM_IN_DOUBT)
"""How many runs decide, the next number where a plan is further off than those before it allow."""
AS_GOOD = 4.0
_VARIANCE = "running_var"
FACTOR, FLOOR = 128.0, 32.0
LEARNING_RATE = 0.05
SEED = 17
Batches = list[tuple[Tensor, ...]]
Trained = list[dict[str, Any]]
"""What every rank has, with what cuts it out of the whole."""
STEPS = 16
"""Of a search."""
SEQUENCES = ("context", "context:ring")
"""Strategies that split the sequences of attention: one of them, drawn by the seed, beside what is asked for."""


class Inside(Rounded):
    """Moves what a model makes, and what is only moved, and rounds inside of batch norm, which the plain kernel hides.

    Statistics over parts of a batch are averages of x and of its square in float64, so a variance is rounded in units
    of the mean square; a mean, in units of the root of how many numbers it adds up; and a gradient that is the same for
    all rows need not be so to the last place.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, moved=True)
        self._inside = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default:
            args = (self._moved(args[0]), *args[1:])
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.native_batch_norm.default and args[5]:
            out, mean, inverse = made
            lost = torch.finfo(torch.float64).eps * (1 + (mean.double() * inverse.double()).square())
            by = 1 + lost * (torch.rand(mean.shape, generator=self._inside, dtype=torch.float64) * 2 - 1)
            bias = torch.zeros_like(by) if args[2] is None else args[2].double()
            by, bias = (x.view(-1, *[1] * (out.dim() - 2)) for x in (by, bias))
            out.copy_((out.double() - bias) * by + bias)
            inverse.copy_(inverse.double() * by.flatten())
            if args[3] is not None:
                added = args[6] * (args[0].numel() / mean.numel()) ** 0.5 * torch.finfo(torch.float64).eps
                args[3].add_(added * mean * (torch.rand(mean.shape, generator=self._inside) * 2 - 1))
        return made

    def _moved(self, x: Tensor) -> Tensor:
        apart = torch.rand(x.shape, generator=self._inside, dtype=torch.float64) * 2 - 1
        return (x.double() * (1 + apart * torch.finfo(x.dtype).eps)).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Finding:
    """What a seed came to: how far a plan was from the plain model in units of what it may be, or what went wrong."""

    seed: int
    refused: str = ""
    """Why capture does not take it."""
    fault: str = ""
    worst: float = 0.0
    """Of what is allowed."""
    splits: int = 0
    """Plans in which something is split."""
    rewrites: int = 0
    """Plans with a substitution."""
    rules: dict[str, int] = field(default_factory=dict)


def machine_of(num_devices: int) -> Machine:
    """Slow devices with quick links and calls: small models are worth splitting and rewriting."""
    device = DeviceType("slow", "cpu", 2**30, 2e6, (("float32", 2e6),), overhead_seconds=1e-9)
    links = [Link((str(i), "hub"), 1e12, 1e-9) for i in range(num_devices)] if num_devices > 1 else []
    node = NodeKind("slow", 1, (device,) * num_devices, tuple(links), ("hub",) if links else ())
    return Machine(f"slow-{num_devices}", 1, num_devices, "cpu", nodes=(node,))


@contextmanager
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def _steps(module: nn.Module, batches: Batches) -> dict[str, Tensor | None]:
    """Train on these batches."""
    found: dict[str, Tensor | None] = {}
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LEARNING_RATE, momentum=0.9)
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = module(*(x.clone() for x in batch))
        loss.backward()
        found[f"loss of step {step}"] = loss.detach()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            found[f"gradient of {name} in step {step}"] = (
                None if parameter.grad is None else parameter.grad.as_subclass(Tensor).clone()
            )
        optimizer.step()
    found |= {name: p.detach() for name, p in module.named_parameters(remove_duplicate=False)}
    return found | {name: b.detach() for name, b in module.named_buffers(remove_duplicate=False)}


def _plainly(model: nn.Module, batches: Batches, rounding: int | None = None) -> dict[str, Tensor | None]:
    with _seeded():
        if rounding is None:
            return _steps(copy.deepcopy(model), batches)
        own, moved = copy.deepcopy(model), rounding >= NUM_IN_DOUBT // 2
        with Inside(rounding) if moved else Rounded(rounding):
            return _steps(own, [tuple(x.clone() for x in batch) for batch in batches] if moved else batches)


def _by_plan(plan: Plan, model: nn.Module, batches: Batches) -> Trained:
    def train(ranks: Any) -> dict[str, Any]:
        store = Store(plan, ranks.rank, ranks.device)
        store.fill(model)
        module = ParallelModule(plan, store, ranks, exact_seed=SEED)
        found: dict[str, Any] = {}
        for name, tensor in _steps(module, batches).items():
            own = name.removeprefix("gradient of ").partition(" in step ")[0]
            found[name] = tensor, (lambda whole, own=own: store.cut(own, whole))
        return found

    with torch.random.fork_rng(devices=[]):
        return run_ranks(plan.mesh, train)


def _apart(mine: Tensor | None, theirs: Tensor | None) -> float:
    """The largest difference; infinite where one is missing or no number and the other is not."""
    if mine is None or theirs is None:
        return 0.0 if mine is theirs else torch.inf
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return torch.inf
    a, b = mine.double(), theirs.double()
    off = (a - b)[~((a == b) | (a.isnan() & b.isnan()))].abs()
    if not off.numel():
        return 0.0
    return off.max().item() if off.isfinite().all() else torch.inf


def _largest(tensor: Tensor | None) -> float:
    return tensor.double().abs().max().item() if tensor is not None and tensor.numel() else 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """The plain runs of a model, and what plans may differ from them by."""

    plain: dict[str, Tensor | None]
    allowed: dict[str, float]
    double: dict[str, Tensor | None] = field(default_factory=dict)
    """A run in double precision, where there was doubt."""

    @staticmethod
    def of(model: nn.Module, batches: Batches, coarsest: float, num_runs: int) -> Comparison:
        plain = _plainly(model, batches)
        apart = [_plainly(model, batches, rounding) for rounding in range(num_runs)]
        gradients = max((_largest(x) for name, x in plain.items() if name.startswith("gradient")), default=0.0)
        small, allowed = 1e-3 * max(gradients, _largest(plain["loss of step 0"])), {}
        for name, tensor in plain.items():
            noise = max((_apart(run[name], tensor) for run in apart), default=0.0)
            scale = max(_largest(tensor), small if name.startswith("gradient") else 1e-3)
            if name.endswith(_VARIANCE):  # the mean of squares less the square of the mean
                scale = max(scale, _largest(plain.get(name.removesuffix(_VARIANCE) + "running_mean")) ** 2)
            allowed[name] = FACTOR * noise + FLOOR * coarsest * scale
        return Comparison(plain, allowed, _in_double(model, batches) if num_runs == NUM_IN_DOUBT else {})

    def worst(self, trained: Trained) -> tuple[float, str]:
        """The largest difference of a plan in units of what is allowed, and where it is."""
        worst, where = 0.0, ""
        for rank, found in enumerate(trained):
            for name, (tensor, cut) in found.items():

                def part(whole: Tensor | None, cut: Any = cut, name: str = name) -> Tensor | None:
                    if whole is None or name.startswith("loss"):
                        return whole
                    return cut(whole)

                theirs, double = part(self.plain.get(name)), part(self.double.get(name))
                off = _apart(tensor, theirs) / max(self.allowed.get(name, 0.0), 1e-300)
                if off > 1 and double is not None:
                    enough = AS_GOOD * _apart_in_double(theirs, double)
                    off = min(off, _apart_in_double(tensor, double) / max(enough, 1e-300))
                if off > worst:
                    worst, where = off, f"{name} on rank {rank} of {len(trained)}"
        return worst, where


def _in_double(model: nn.Module, batches: Batches) -> dict[str, Tensor | None]:
    wide = copy.deepcopy(model).double()
    given = [tuple(x.double() if x.is_floating_point() else x for x in batch) for batch in batches]
    with _seeded(), Doubled():
        return _steps(wide, given)


def _apart_in_double(mine: Tensor | None, theirs: Tensor | None) -> float:
    return _apart(mine if mine is None else mine.double(), theirs if theirs is None else theirs.double())


def _coarsest(graph: Graph) -> float:
    """The unit in the last place of the coarsest dtype that anything is computed in."""
    types = [t for node in graph.nodes for t in node.types] + [leaf.type for leaf in graph.leaves]
    return max(torch.finfo(t.dtype).eps for t in types if t.dtype.is_floating_point)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of the package: other tests look at its log."""
    logger = logging.getLogger("conjoin")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _splits(plan: Plan) -> bool:
    return any(t.layout for node in plan.graph.nodes for t in node.types)


def examine(
    seed: int, steps: int = STEPS, devices: Sequence[int] = DEVICES, strategies: Sequence[str] = ()
) -> Finding:
    """Draw the model of a seed, plan it for so many devices and compare the plans with the plain model.

    Plans are those of a search, or of the strategies named that fit the model.
    """
    return examine_program(draw(seed), steps, devices, strategies)


@contextmanager
def _few_steps(seed: int) -> Iterator[None]:
    """A search whose steps go to what it finds itself: of the named strategies it judges one, drawn by the seed.

    All of them would take four steps of four, so that nothing that was searched is compared. Nor does it work out
    what is not compared: a bound for what it found, and peaks of memory, of which there is enough.
    """

    def one_of(mesh: Mesh) -> tuple[str, ...]:
        return (Random(f"{seed} {mesh.size}").choice(baseline_names(mesh)),)

    named, searches = sys.modules["conjoin.search.baselines"], sys.modules["conjoin.search.searches"]
    with (
        patch.object(named, "baseline_names", one_of),
        patch.object(searches, "certify", lambda *_: None),
        patch.object(Simulation, "peak_bytes", lambda *_: 1),
    ):
        yield


def _plans(graph: Graph, num_devices: int, wish: Wish, strategies: Sequence[str]) -> Iterator[Plan]:
    if not strategies:
        with _few_steps(wish.seed):
            yield find_plan(graph, machine_of(num_devices), CostModel([]), wish).plan
    if num_devices > 1 and any(node.op == ATTENTION for node in graph.nodes):  # no search splits sequences so
        strategies = (*strategies, Random(f"{wish.seed} {num_devices}").choice(SEQUENCES))
    for strategy in strategies:
        with suppress(StrategyError):
            yield make_plan(graph, machine_of(num_devices), strategy)


@_quiet()
def examine_program(
    program: Program, steps: int = STEPS, devices: Sequence[int] = DEVICES, strategies: Sequence[str] = ()
) -> Finding:
    seed = program.seed
    model, batch = program.build()
    batches = [_redrawn(program, i) for i in range(NUM_STEPS)]
    try:
        graph = capture(copy.deepcopy(model), batch)
    except CaptureError as error:
        return Finding(seed, refused=str(error))
    compare = cache(partial(Comparison.of, model, batches, _coarsest(graph)))
    worst, splits, rewrites, rules = 0.0, 0, 0, Counter[str]()
    wish = Wish(budget=60.0, steps=steps, seed=seed, optimizer="sgd")
    for plan in chain.from_iterable(_plans(graph, num_devices, wish, strategies) for num_devices in devices):
        splits, rewrites = splits + _splits(plan), rewrites + bool(plan.substitutions)
        rules.update(substitution.name for substitution in plan.substitutions)
        trained = _by_plan(plan, model, batches)
        for num_runs in NUM_ROUNDINGS:
            off, where = compare(num_runs).worst(trained)
            if off <= 1:
                break
        worst = max(worst, off)
        if off > 1:
            used = ", ".join(dict.fromkeys(s.name for s in plan.substitutions))
            how = f"{plan.strategy} on {plan.mesh.size}, substitutions: {used or 'none'}"
            fault = f"{where}: {off:.3g} times what is allowed; {how}"
            return Finding(seed, "", fault, worst, splits, rewrites, dict(rules))
    return Finding(seed, "", "", worst, splits, rewrites, dict(rules))


def _redrawn(program: Program, step: int) -> tuple[Tensor, ...]:
    """A batch of the same kind with other values."""
    torch.manual_seed(1_000 + step)
    return program.batch()
