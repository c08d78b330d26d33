"""What conjoin does so far, in a minute and without a GPU: look into a model, capture it, train it on four processes,
and tell the price of a step before it is paid.

Run with `make demo`, or `python examples/demo.py`. The exit code says whether everything trained as it should.
"""

from __future__ import annotations

import copy
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
import zoo
from conjoin.cli import main as command
from conjoin.report import explanation_summary, format_bytes, format_seconds
from conjoin.runtime import launch
from zoo.llama import Llama, LlamaConfig, llama_batch
from zoo.tokens import next_token_loss

STEPS = 6
STRATEGIES = ("data-parallel", "fsdp", "megatron:tp=2")
CALIBRATION_SECONDS = 8
TOLERANCE = 1e-5
"""Of a loss, relative: ranks add up in another order than one device does, in single precision."""

Batch = tuple[Tensor, ...]


def heading(text: str) -> None:
    print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}")


@dataclass(frozen=True)
class Training:
    """Some steps of training: the loss of each, and how long one took."""

    losses: tuple[float, ...]
    milliseconds: float


def train(model: nn.Module, forward: Callable[[], Tensor]) -> Training:
    """The loop that every model here is trained by; the same seed draws the same dropout."""
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
    return Training(tuple(losses), 1e3 * statistics.median(seconds))


def show_capture() -> None:
    heading("1. A 7-billion-parameter model, captured without its memory")
    command(["inspect", "llama-7b", "--batch", "1"])


def show_training() -> bool:
    heading("2. A BERT with dropout, trained as it is and as captured")
    model, batch, loss = zoo.build("bert-large:tiny")
    assert isinstance(batch, tuple) and loss is not None
    plain = copy.deepcopy(model.train())
    graph = conjoin.capture(model, batch, loss)
    step = conjoin.to_module(graph, model)
    ours, theirs = train(step, lambda: step(*batch)), train(plain, lambda: loss(plain(*batch[:-2]), *batch[-2:]))
    same = ours.losses == theirs.losses and all(map(torch.equal, step.parameters(), plain.parameters()))
    print(f"{len(graph.nodes)} operators, fingerprint {conjoin.fingerprint(graph)[:16]}")
    print(f"losses {' '.join(f'{x:.4f}' for x in ours.losses)}")
    print(f"after {STEPS} steps all losses and weights are {'bit-identical' if same else 'NOT identical'}")
    return same


def train_rank(rank: int, plan: conjoin.Plan, model: nn.Module, batch: Batch) -> tuple[Training, int]:
    """What every process does: load its part of the plan and train it. Also the bytes it sent in a step."""
    step = conjoin.load(plan, model)
    local = [x.to(step.store.device) for x in batch]
    before = step.communicator.bytes_sent
    done = train(step, lambda: step(*local))
    return done, (step.communicator.bytes_sent - before) // STEPS


def show_parallel() -> bool:
    heading("3. A small LLaMA on four processes, by three strategies")
    config = LlamaConfig(layers=2, width=128, feed_forward=352, heads=8, kv_heads=8, vocabulary=512, length=32)
    torch.manual_seed(0)
    model, batch = Llama(config).train(), llama_batch(8, config)
    plans = [conjoin.plan(model, batch, "local:4", loss=next_token_loss, strategy=name) for name in STRATEGIES]
    told = [conjoin.explain(plan) for plan in plans]
    print("\n".join(explanation_summary(told[1])))

    ranks = [launch(plan.mesh.size, train_rank, plan, model, batch) for plan in plans]
    alone = train(model, lambda: next_token_loss(model(batch[0]), batch[1]))
    print("\nloss   one device" + "".join(f"{name:>16}" for name in STRATEGIES))
    for i, loss in enumerate(alone.losses):
        print(f"{i:>4} {loss:>12.6f}" + "".join(f"{found[0][0].losses[i]:>16.6f}" for found in ranks))

    print("\nrank 0, each step      ms   bytes sent: predicted    measured   parameters stored")
    for name, explanation, ((done, sent), *_) in zip(STRATEGIES, told, ranks, strict=True):
        stored = format_bytes(explanation.stored_bytes)
        print(f"{name:<16} {done.milliseconds:>8.1f} {explanation.bytes_of(0):>23,} {sent:>11,} {stored:>19}")
    print(f"one device       {alone.milliseconds:>8.1f} {0:>23} {0:>11} {format_bytes(told[0].parameter_bytes):>19}")
    show_prices(plans, [found[0][0].milliseconds for found in ranks])
    return all(map(agrees, told, ranks, [alone] * len(told)))


def show_prices(plans: list[conjoin.Plan], measured: list[float]) -> None:
    """How long a step was predicted to take, from a short calibration of these processes, and how long it took."""
    machine = calibrate(plans[0].mesh.size)
    print(f"\nprices by {CALIBRATION_SECONDS} s of calibration: {machine}")
    print("rank 0, each step    predicted    measured   predicted / measured")
    for name, plan, milliseconds in zip(STRATEGIES, plans, measured, strict=True):
        seconds = conjoin.simulate_plan(plan, machine, optimizer="adamw").seconds
        figures = f"{format_seconds(seconds):>12} {format_seconds(milliseconds / 1e3):>11}"
        print(f"{name:<17} {figures} {1e3 * seconds / milliseconds:>22.2f}")
    print("where processes share cores both figures are what the others leave them")


def calibrate(num_processes: int) -> conjoin.Machine:
    """These processes as a machine with speeds, by a few seconds of `conjoin calibrate`."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        path, word = str(Path(folder) / "here.toml"), f"local:{num_processes}"
        code = command(["calibrate", "--machine", word, "--seconds", str(CALIBRATION_SECONDS), "-o", path])
        assert code == 0, "local processes can be calibrated"
        return conjoin.Machine.load(path)


def show_prediction() -> None:
    heading("4. What a step of the 7-billion-parameter model would take on 16 H100, which need not be here")
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "plan.json")
        machine = ["--machine", "dgx-h100:2"]
        with redirect_stdout(StringIO()):
            command(["plan", "llama-7b", "--batch", "16", *machine, "--strategy", "fsdp", "-o", path])
        command(["simulate", path, *machine, "--optimizer", "adamw"])


def agrees(told: conjoin.Explanation, ranks: list[tuple[Training, int]], alone: Training) -> bool:
    """Whether every rank had the losses of one device, and sent the bytes that were predicted."""
    near = [abs(a - b) <= TOLERANCE * b for done, _ in ranks for a, b in zip(done.losses, alone.losses, strict=True)]
    same = [sent == told.bytes_of(rank) for rank, (_, sent) in enumerate(ranks)]
    print(f"{told.strategy}: losses {_verdict(all(near))} one device's, bytes {_verdict(all(same))} the prediction")
    return all(near) and all(same)


def _verdict(equal: bool) -> str:
    return "equal" if equal else "DIFFER from"


def main() -> int:
    torch.set_num_threads(1)
    show_capture()
    ok = all([show_training(), show_parallel()])
    show_prediction()
    print("\nmatches" if ok else "\nDOES NOT MATCH")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
