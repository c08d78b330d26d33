"""What conjoin does so far, in a minute and without a GPU: look into a model, find a plan for four processes, train by
it, and tell the price of a step that would be run elsewhere.

Run with `make demo`, or `python examples/demo.py`. The exit code says whether everything trained as it should.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
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
NUM_PROCESSES = 4
CALIBRATION_SECONDS = 8
SEARCH_SECONDS = 15
TOLERANCE = 1e-5
"""Of a loss, relative: ranks add up in another order than one device does, in single precision."""

Batch = tuple[Tensor, ...]


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)


def small_llama() -> tuple[nn.Module, Batch, Callable[..., Tensor]]:
    """The model that is trained here, its batch and its loss; `conjoin plan examples/demo.py:small_llama` plans it."""
    config = LlamaConfig(layers=2, width=128, feed_forward=352, heads=8, kv_heads=8, vocabulary=512, length=32)
    torch.manual_seed(0)
    return Llama(config).train(), llama_batch(8, config), next_token_loss


@dataclass(frozen=True)
class Training:
    """Some steps of training: the loss of each, and how long one took."""

    losses: tuple[float, ...]
    seconds: float


def train(model: nn.Module, forward: Callable[[], Tensor]) -> Training:
    """The loop that one device and many are trained by."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return Training(tuple(losses), statistics.median(seconds))


def train_rank(rank: int, plan: conjoin.Plan, model: nn.Module, batch: Batch) -> tuple[Training, int]:
    """What every process does: load its part of the plan and train it. Also the bytes it sent in a step."""
    step = conjoin.load(plan, model)
    local = [x.to(step.store.device) for x in batch]
    before = step.communicator.bytes_sent
    done = train(step, lambda: step(*local))
    return done, (step.communicator.bytes_sent - before) // STEPS


@dataclass(frozen=True)
class Contestant:
    """A plan that was made, and what its ranks did and sent."""

    name: str
    plan: conjoin.Plan
    ranks: list[tuple[Training, int]]


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
    contestants = [
        Contestant(name, plan, launch(NUM_PROCESSES, train_rank, plan, model, batch))
        for name, plan in (("the search", searched), ("data-parallel", named))
    ]
    alone = train(model, lambda: loss(model(batch[0]), batch[1]))
    show_losses(contestants, alone)
    show_figures(contestants, machine)
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
        print(f"{i:>4} {loss:>12.6f}" + "".join(f"{each.ranks[0][0].losses[i]:>16.6f}" for each in contestants))


def show_figures(contestants: list[Contestant], machine: conjoin.Machine) -> None:
    """What a step was predicted to take and send, and what it took and sent."""
    print("\nrank 0, each step   predicted    measured   ratio   bytes: predicted    measured   parameters stored")
    for each in contestants:
        done, sent = each.ranks[0]
        told = conjoin.explain(each.plan)
        seconds = conjoin.simulate_plan(each.plan, machine, optimizer="adamw").seconds
        times = f"{format_seconds(seconds):>12} {format_seconds(done.seconds):>11} {seconds / done.seconds:>7.2f}"
        print(f"{each.name:<16} {times} {told.bytes_of(0):>18,} {sent:>11,} {format_bytes(told.stored_bytes):>19}")
    print("where processes share cores both times are what the others leave them")


def agrees(contestant: Contestant, alone: Training) -> bool:
    """Whether every rank had the losses of one device, and sent the bytes that were predicted."""
    told, ranks = conjoin.explain(contestant.plan), contestant.ranks
    near = [abs(a - b) <= TOLERANCE * b for done, _ in ranks for a, b in zip(done.losses, alone.losses, strict=True)]
    same = [sent == told.bytes_of(rank) for rank, (_, sent) in enumerate(ranks)]
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
