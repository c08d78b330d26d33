"""Mixed precision on one GPU: LLaMA-1B and GPT-1.3B by plain torch and by a plan, step by step in turn.

    python -m benchmarks.precision_gpu [--models llama-1b gpt-1.3b] [--kinds bf16 fp8 compiled noise] [--output FILE]

Parameters in float32, AdamW (fused), 4 × 2,048 letters of text that a small grammar writes. Plain torch is the model
under `torch.autocast`; in eight bits with `benchmarks/float8_layers.py` in place of its linear layers. Ours is
`conjoin.load` of the plan `single` in `bf16-mixed` or `fp8-mixed`. Both begin with the same weights and get the same
batches, a step of one after a step of the other, so that losses and milliseconds come from the same run. The noise that
a loss curve is held against is that of further seeds (plain, bf16). Compiled, both go through `torch.compile`, with a
part of the layers, since compiling takes a minute for each; bytes are those that a step allocates beside what is there.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import conjoin
from benchmarks.float8_layers import in_float8
from benchmarks.precision_curves import LETTERS, curve, text
from zoo.gpt import Gpt, GptConfig
from zoo.llama import Llama, LlamaConfig
from zoo.tokens import next_token_loss

LLAMA_1B = LlamaConfig(16, 2048, 8192, 32, 8, 128256, 2048, rope_base=500000.0)
"""The shape of Llama 3.2 1B, with a head of its own."""
GPT_13B = GptConfig(24, 2048, 16, length=2048, dropout=0.0)
TINY: dict[str, LlamaConfig | GptConfig] = {
    "llama-1b": LlamaConfig(2, 32, 64, 2, 1, 64, 32),
    "gpt-1.3b": GptConfig(2, 32, 2, 32, 64, 0.0),
}
KINDS = ("bf16", "fp8", "noise", "compiled", "compiled-bf16", "compiled-fp8")
PARTS, WARMUP = 6, 8
Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and the batches that it learns from."""

    config: LlamaConfig | GptConfig
    batch_size: int
    device: str

    def model(self, seed: int, device: str | None = None) -> nn.Module:
        torch.manual_seed(seed)
        with torch.device(device or self.device):
            made = Llama(self.config) if isinstance(self.config, LlamaConfig) else Gpt(self.config)
        return made.train()

    def batches(self, steps: int, seed: int) -> list[Batch]:
        """Windows of the text, and the same a letter further."""
        length = self.config.length
        letters = torch.tensor([LETTERS.index(letter) for letter in text(10_000, seed=0)])
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(letters) - length - 1, (steps, self.batch_size), generator=generator)
        windows = letters[starts.unsqueeze(-1) + torch.arange(length + 1)].to(self.device)
        return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in windows]

    def plan(self, precision: str) -> Any:
        batch = tuple(torch.empty_like(x, device="meta") for x in self.batches(1, 0)[0])
        machine = "dgx-h200:1x1" if self.device == "cuda" else "local:1"
        model = self.model(0, "meta")
        return conjoin.plan(model, batch, machine, loss=next_token_loss, strategy="single", precision=precision)


class Trainer:
    """Steps of one way, with what they took."""

    def __init__(self, step: Step, parameters: Any, device: str) -> None:
        self._step, self._device = step, device
        self._optimizer = torch.optim.AdamW(parameters, lr=3e-4, fused=True)
        self.losses: list[float] = []
        self.ms: list[float] = []
        self.bytes = 0

    def run(self, batch: Batch) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if self._device == "cuda" else 0
        start = time.perf_counter()
        loss = self._step(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._device == "cuda":
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated() - before
        self.ms.append(1e3 * (time.perf_counter() - start))
        self.losses.append(loss.item())


def plain(work: Workload, model: nn.Module, kind: str, compiled: bool) -> Trainer:
    """The model under autocast; `kind` is bf16, or how scales of eight bits are taken."""
    if kind != "bf16":
        model = in_float8(model, by_rows=kind == "fp8 by rows", wide=("head",))

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(work.device, torch.bfloat16):
            return next_token_loss(model(x), y)

    return Trainer(torch.compile(loss_of) if compiled else loss_of, model.parameters(), work.device)


def ours(work: Workload, model: nn.Module, plan: Any, compiled: bool) -> Trainer:
    step = conjoin.load(plan, model, device=work.device)
    return Trainer(torch.compile(step) if compiled else step, step.parameters(), work.device)


def in_turn(trainers: dict[str, Trainer], given: Sequence[Batch]) -> dict[str, Any]:
    """Steps of all ways in turn, the order turned each time; medians, ratios to ours of neighbours, losses."""
    names = list(trainers)
    for i, batch in enumerate(given):
        for k in range(len(names)):
            trainers[names[(i + k) % len(names)]].run(batch)
    own = trainers["ours"].ms[WARMUP:]
    return {
        name: {
            "ms": round(statistics.median(trainer.ms[WARMUP:]), 3),
            "ours_over_it": round(statistics.median(a / b for a, b in zip(own, trainer.ms[WARMUP:], strict=True)), 4),
            "step_gib": round(trainer.bytes / 2**30, 3),
            "first_step_seconds": round(trainer.ms[0] / 1e3, 1),
            "losses": [round(loss, 4) for loss in trainer.losses],
        }
        for name, trainer in trainers.items()
    }


def compared(work: Workload, precision: str, kinds: Sequence[str], steps: int, compiled: bool) -> dict[str, Any]:
    """Plain ways and the plan's, from the same weights."""
    start = time.perf_counter()
    plan, first = work.plan(precision), work.model(0)
    planned = time.perf_counter() - start
    trainers = {kind: plain(work, copy.deepcopy(first), kind, compiled) for kind in kinds}
    trainers["ours"] = ours(work, first, plan, compiled)
    del first
    found = in_turn(trainers, work.batches(steps, 0))
    return {"precision": precision, "compiled": compiled, "planned_seconds": round(planned, 1), "ways": found}


def fresh() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    torch.compiler.reset()


def noise(work: Workload, seeds: Sequence[int], steps: int) -> list[list[float]]:
    """Losses of the plain model from further seeds."""
    found = []
    for seed in seeds:
        trainer = plain(work, work.model(seed), "bf16", compiled=False)
        for batch in work.batches(steps, seed):
            trainer.run(batch)
        found.append([round(loss, 4) for loss in trainer.losses])
        del trainer
        fresh()
    return found


def curves(row: dict[str, Any], seeds: list[list[float]]) -> dict[str, Any]:
    """How far the loss curve of ours is from each plain one's, and seeds of the plain model from one another."""
    parts = {way: curve(found["losses"], PARTS) for way, found in row["ways"].items()}
    spread = [stdev(column) for column in zip(*(curve(losses, PARTS) for losses in seeds), strict=True)]
    told: dict[str, Any] = {"noise of seeds": [round(x, 4) for x in spread]}
    told |= {way: [round(x, 4) for x in found] for way, found in parts.items()}
    for way in parts.keys() - {"ours"}:
        off = [abs(a - b) / s for a, b, s in zip(parts["ours"], parts[way], spread, strict=True)]
        told[f"worst off / noise, against {way}"] = round(max(off[1:]), 3)
        told[f"mean off / noise, against {way}"] = round(fmean(off[1:]), 3)
    return told


def measured(work: Workload, kinds: Sequence[str], options: argparse.Namespace, write: Callable[[Any], None]) -> Any:
    """All that was asked for of one model, written as it comes."""
    told: dict[str, Any] = {"layers": work.config.layers}
    asked = {"bf16": ("bf16-mixed", ("bf16",)), "fp8": ("fp8-mixed", ("fp8", "fp8 by rows"))}
    for kind, (precision, ways) in asked.items():
        if kind in kinds:
            told[f"{kind}, eager"] = compared(work, precision, ways, options.steps, compiled=False)
            write(told)
            fresh()
    if "noise" in kinds:
        seeds = told["losses of further seeds"] = noise(work, range(1, 1 + options.seeds), options.steps)
        for row in (told[name] for name in ("bf16, eager", "fp8, eager") if name in told):
            base = [told["bf16, eager"]["ways"]["bf16"]["losses"]] if "bf16, eager" in told else []
            row["curves"] = curves(row, [*base, *seeds])
        write(told)
    if any(kind.startswith("compiled") for kind in kinds):
        part = replace(work, config=replace(work.config, layers=min(options.compiled_layers, work.config.layers)))
        for kind, (precision, ways) in asked.items():
            if not {"compiled", f"compiled-{kind}"} & set(kinds):
                continue
            made = compared(part, precision, ways[:1], options.compiled_steps, compiled=True)
            told[f"{kind}, compiled"] = {"layers": part.config.layers, **made}
            write(told)
            fresh()
    return told


def lines(told: dict[str, Any]) -> list[str]:
    found = []
    for name, row in told.items():
        for way, one in row["ways"].items() if isinstance(row, dict) else ():
            found.append(
                f"{name:<15} {way:<12} {one['ms']:>9.2f} ms  ours/it {one['ours_over_it']:.3f}  {one['step_gib']:.2f} "
                f"GiB  first {one['first_step_seconds']} s  loss {one['losses'][0]:.3f} -> {one['losses'][-1]:.3f}"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TINY, default=list(TINY))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS[:4])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=2, help="further ones, for the noise")
    parser.add_argument("--compiled-steps", type=int, default=28)
    parser.add_argument("--compiled-layers", type=int, default=4)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, to try it")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/precision_h200.json"))
    options = parser.parse_args()
    about: dict[str, Any] = {
        "command": " ".join(("python -m benchmarks.precision_gpu", *sys.argv[1:])), "date": str(date.today()),
        "machine": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "conjoin": conjoin.__version__},
        "models": {},
    }  # fmt: skip
    configs: dict[str, LlamaConfig | GptConfig] = TINY if options.tiny else {"llama-1b": LLAMA_1B, "gpt-1.3b": GPT_13B}

    def write(name: str, told: Any) -> None:
        about["models"][name] = told
        options.output.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {lines(told)[-1] if lines(told) else ''}", flush=True)

    for name in options.models:
        work = Workload(configs[name], 4, options.device)
        told = measured(work, options.kinds, options, partial(write, name))
        print("\n".join(lines(told)), flush=True)


if __name__ == "__main__":
    main()
