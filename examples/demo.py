"""What conjoin does so far, in a minute and without a GPU: look into a model, find a plan for some processes, train by
it, see whether it is as fast as was said, and tell the price of a step that would be run elsewhere.

Run with `make demo`, or `python examples/demo.py`. The exit code says whether everything trained as it should.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path

import torch
from torch import Tensor, nn

import conjoin
from conjoin.cli import main as command
from conjoin.report import format_bytes, format_seconds
from conjoin.runtime import launch
from zoo.llama import Llama, LlamaConfig, llama_batch
from zoo.tokens import next_token_loss

STEPS = 6
ROUNDS = 9
"""In which the plans take turns, to be timed: what else the host does meanwhile slows all of them."""
NUM_PROCESSES = max(2, min(4, os.cpu_count() or 1))
"""No more than have a core each, where there are two: what processes take from each other no prediction knows."""
CALIBRATION_SECONDS = 8
SEARCH_SECONDS = 15
TOLERANCE = 1e-5
"""Of a loss, relative: ranks add up in another order than one device does, in single precision."""

Batch = tuple[Tensor, ...]


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def small_llama() -> tuple[nn.Module, Batch, Callable[..., Tensor]]:
    """The model that is trained here, its batch and its loss; `conjoin plan examples/demo.py:small_llama` plans it."""
    config = LlamaConfig(layers=2, width=256, feed_forward=704, heads=8, kv_heads=8, vocabulary=8192, length=16)
    torch.manual_seed(0)
    return Llama(config).train(), llama_batch(4, config), next_token_loss


@dataclass(frozen=True)
class Training:
    """Some steps of training: the loss of each, how long steps took, and the bytes that were sent in one."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...] = ()
    sent: int = 0

    @property
    def usual(self) -> float:
        return statistics.median(self.seconds)


class Loop:
    """The loop that one device and many are trained by."""

    def __init__(self, model: nn.Module, forward: Callable[[], Tensor]) -> None:
        self._optimizer, self._forward = torch.optim.AdamW(model.parameters(), lr=1e-3), forward

    def step(self) -> float:
        self._optimizer.zero_grad()
        loss = self._forward()
        loss.backward()
        self._optimizer.step()
        return loss.item()

    def losses(self) -> tuple[float, ...]:
        torch.manual_seed(0)
        return tuple(self.step() for _ in range(STEPS))

    def time(self) -> float:
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start


def train_rank(rank: int, plans: list[conjoin.Plan], model: nn.Module, batch: Batch) -> list[Training]:
    """What every process does: load its part of each plan, train it, and time the steps of all in turn."""
    loops, trained = [], []
    for plan in plans:
        module = conjoin.load(plan, model)
        local = [x.to(module.store.device) for x in batch]
        loops.append(Loop(module, lambda module=module, local=local: module(*local)))
        before = module.communicator.bytes_sent
        losses = loops[-1].losses()
        trained.append(Training(losses, (), (module.communicator.bytes_sent - before) // STEPS))
    times = [[loop.time() for loop in loops] for _ in range(ROUNDS)]
    return [replace(each, seconds=tuple(t)) for each, t in zip(trained, zip(*times, strict=True), strict=True)]


@dataclass(frozen=True)
class Contestant:
    """A plan that was made, and what its ranks did."""

    name: str
    plan: conjoin.Plan
    ranks: list[Training]


def show_capture() -> None:
    heading("1. A 7-billion-parameter model, captured without its memory")
    command(["inspect", "llama-7b", "--batch", "1"])


def show_search(folder: Path) -> bool:
    heading(f"2. A small LLaMA for {NUM_PROCESSES} processes: calibrate them, search for a plan, train by it")
    machine = calibrate(folder / "here.toml")
    print(f"{machine}, by {CALIBRATION_SECONDS} s of calibration\n", flush=True)
    searched = search(folder / "here.toml", folder / "plan.json")
    model, batch, loss = small_llama()
    named = conjoin.plan(model, batch, machine, loss=loss, strategy="data-parallel")
    plans = {"the search": searched, "data-parallel": named}
    ranks = launch(NUM_PROCESSES, train_rank, list(plans.values()), model, batch)
    contestants = [Contestant(*each, list(did)) for each, *did in zip(plans.items(), *ranks, strict=True)]
    alone = Training(Loop(model, lambda: loss(model(batch[0]), batch[1])).losses())
    show_losses(contestants, alone)
    show_figures(contestants, machine)
    show_claim(*contestants, machine)
    return all([agrees(contestant, alone) for contestant in contestants])


def calibrate(path: Path) -> conjoin.Machine:
    """These processes as a machine with speeds, by a few seconds of `conjoin calibrate`."""
    with redirect_stdout(StringIO()):
        word, seconds = f"local:{NUM_PROCESSES}", str(CALIBRATION_SECONDS)
        code = command(["calibrate", "--machine", word, "--seconds", seconds, "-o", str(path)])
    assert code == 0, "local processes can be calibrated"
    return conjoin.Machine.load(path)


def search(machine: Path, output: Path) -> conjoin.Plan:
    """The plan that `conjoin plan` finds."""
    wish = ["--optimizer", "adamw", "--budget", f"{SEARCH_SECONDS}s", "--fresh"]
    code = command(["plan", f"{__file__}:small_llama", "--machine", str(machine), *wish, "-o", str(output)])
    assert code == 0, "every model has a plan where memory is plenty"
    return conjoin.load_plan(output)


def show_losses(contestants: list[Contestant], alone: Training) -> None:
    """Every step's loss, of one device and of rank 0 by each plan."""
    print("\nloss   one device" + "".join(f"{each.name:>16}" for each in contestants))
    for i, loss in enumerate(alone.losses):
        print(f"{i:>4} {loss:>12.6f}" + "".join(f"{each.ranks[0].losses[i]:>16.6f}" for each in contestants))


def show_figures(contestants: list[Contestant], machine: conjoin.Machine) -> None:
    """What a step was predicted to take and send, and what it took and sent."""
    print("\nrank 0, each step   predicted    measured   ratio   bytes: predicted    measured   parameters stored")
    for each in contestants:
        done, told = each.ranks[0], conjoin.explain(each.plan)
        seconds = predicted(each.plan, machine)
        times = f"{format_seconds(seconds):>12} {format_seconds(done.usual):>11} {seconds / done.usual:>7.2f}"
        print(f"{each.name:<16} {times} {told.bytes_of(0):>18,} {done.sent:>11,} {format_bytes(told.stored_bytes):>19}")


def predicted(plan: conjoin.Plan, machine: conjoin.Machine) -> float:
    return conjoin.simulate_plan(plan, machine, optimizer="adamw").seconds


def show_claim(searched: Contestant, named: Contestant, machine: conjoin.Machine) -> None:
    """How much faster the searched plan was said to be, and was, round by round."""
    said = predicted(named.plan, machine) / predicted(searched.plan, machine)
    seen = sorted(b / a for a, b in zip(searched.ranks[0].seconds, named.ranks[0].seconds, strict=True))
    middle, (low, high) = statistics.median(seen), (seen[1], seen[-2])
    print(f"\nThe searched plan was said to be {said:.2f} times as fast as {named.name}. In {len(seen)} rounds it")
    print(f"was {middle:.2f} times ({low:.2f} to {high:.2f} but for one each): {_judged(said, low, high)}.")


def _judged(said: float, low: float, high: float) -> str:
    """Whether times that vary so say the same of which plan is faster."""
    if (said > 1) == (low > 1) and (said > 1) == (high > 1):
        return "it is the faster one, as was said" if said > 1 else "it is the slower one, as was said"
    if low <= 1 <= high:
        return "on this host the two cannot be told apart"
    return "the prediction was WRONG about which is faster here"


def agrees(contestant: Contestant, alone: Training) -> bool:
    """Whether every rank had the losses of one device, and sent the bytes that were predicted."""
    told, ranks = conjoin.explain(contestant.plan), contestant.ranks
    near = [abs(a - b) <= TOLERANCE * b for done in ranks for a, b in zip(done.losses, alone.losses, strict=True)]
    same = [done.sent == told.bytes_of(rank) for rank, done in enumerate(ranks)]
    print(f"{told.strategy}: losses {_verdict(all(near))} one device's, bytes {_verdict(all(same))} the prediction")
    return all(near) and all(same)


def _verdict(equal: bool) -> str:
    return "equal" if equal else "DIFFER from"


def show_prediction(folder: Path) -> None:
    heading("3. What a step of the 7-billion-parameter model would take on 16 H100, which need not be here")
    path, machine = str(folder / "elsewhere.json"), ["--machine", "dgx-h100:2"]
    with redirect_stdout(StringIO()):
        command(["plan", "llama-7b", "--batch", "16", *machine, "--strategy", "fsdp", "-o", path])
    command(["simulate", path, *machine, "--optimizer", "adamw"])


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show_capture()
        ok = show_search(folder)
        show_prediction(folder)
    print("\nmatches" if ok else "\nDOES NOT MATCH")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
