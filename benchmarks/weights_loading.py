"""Loading pretrained weights of 1.3 billion parameters on four ranks: no rank holds more than its pieces and 1 GiB
besides, and it takes no more than 1.5 times as long as reading the files does; saving them again, and reading that.

    python -m benchmarks.weights_loading FOLDER       # needs 6 GB there; prints the table and writes
                                                      # benchmarks/results/weights_loading.json

Files are read from the disk: what the system keeps of them in memory is dropped before each run. One process that reads
all files into memory, one after the other, is what it is compared with, in turns; medians are told.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import conjoin
from benchmarks.circumstances import circumstances
from conjoin.runtime import launch

RESULTS = Path(__file__).parent / "results" / "weights_loading.json"
CONFIG = LlamaConfig(
    hidden_size=2048, intermediate_size=5504, num_hidden_layers=24, num_attention_heads=16, vocab_size=32000,
    max_position_embeddings=256, use_cache=False,
)  # fmt: skip
RANKS, ROUNDS = 4, 5
WHERE = f"{os.cpu_count()} cores, {RANKS} ranks of one thread"
SHARD_BYTES = 500_000_000
SPARE_BYTES = 2**30
TIMES_READING = 1.5
STRATEGIES = ("fsdp", "megatron")


@dataclass(frozen=True, slots=True)
class Row:
    """One strategy: the slowest rank, and the one with the most memory."""

    strategy: str
    read_files_seconds: float
    """One process that reads all files."""
    read_pieces_seconds: float
    """Every rank reads its pieces, all at once."""
    over_reading: float
    load_seconds: float
    """All of `conjoin.load`: the plan checked, ranks joined, weights read, the program made."""
    piece_bytes: int
    """Of the rank that has the most."""
    peak_bytes: int
    """Resident, from before the load to its end, less what was resident before: the interpreter and torch."""
    save_seconds: float
    save_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank saw."""

    read_seconds: float
    load_seconds: float
    piece_bytes: int
    peak_bytes: int
    save_seconds: float
    save_peak_bytes: int


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(CONFIG).to(torch.bfloat16).train()


def make_plan(strategy: str) -> conjoin.Plan:
    tokens = torch.zeros(4, 256, dtype=torch.int64)
    return conjoin.plan(on_meta(), {"input_ids": tokens, "labels": tokens}, f"local:{RANKS}", strategy=strategy)


def write_files(folder: Path) -> None:
    """Random weights in shards, by the library of the format."""
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in on_meta().state_dict().items():
        if sum(x.nbytes for x in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file({name: torch.randn(x.shape, dtype=x.dtype) for name, x in shard.items()}, folder / file)
    shards_of = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    index = json.dumps({"metadata": {}, "weight_map": shards_of})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def forget(folder: Path) -> None:
    """Have the system drop what it keeps of files in memory."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(folder: Path) -> float:
    """Seconds to read all files into memory, one after the other."""
    start = time.perf_counter()
    held = [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]
    seconds = time.perf_counter() - start
    assert all(held)
    return seconds


def resident(kind: str) -> int:
    """Bytes of this process in memory: now (VmRSS), or the most since `from_here` (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def from_here() -> int:
    """Begin to watch the peak; what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return resident("VmRSS")


class Told(logging.Handler):
    """Takes the seconds of reading out of what is logged."""

    seconds = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        found = re.fullmatch(r"\d+ bytes of .* were read in ([\d.]+) s", record.getMessage())
        self.seconds = float(found[1]) if found else self.seconds


def work(rank: int, plan: conjoin.Plan, folder: Path, target: Path) -> Seen:
    """Load, then save, on one rank."""
    torch.set_num_threads(1)
    model = on_meta()
    told = Told()
    logging.getLogger("conjoin").addHandler(told)
    logging.getLogger("conjoin").setLevel(logging.INFO)
    before, start = from_here(), time.perf_counter()
    step = conjoin.load(plan, model, weights=folder, device="cpu")
    loading = time.perf_counter() - start
    peak = resident("VmHWM") - before
    pieces = sum(x.nbytes for x in (*step.parameters(), *step.buffers()))
    before, start = from_here(), time.perf_counter()
    conjoin.save_weights(target, step, max_shard_bytes=SHARD_BYTES)
    return Seen(told.seconds, loading, pieces, peak, time.perf_counter() - start, resident("VmHWM") - before)


def same_values(folder: Path, other: Path) -> bool:
    """Whether both have the same tensors, read by the library of the format."""

    def opened(path: Path) -> dict[str, Path]:
        index = json.loads((path / "model.safetensors.index.json").read_text(encoding="utf-8"))
        return {name: path / file for name, file in index["weight_map"].items()}

    first, second = opened(folder), opened(other)
    for name, path in first.items():
        with safe_open(path, "pt") as one, safe_open(second[name], "pt") as two:
            if not torch.equal(one.get_tensor(name), two.get_tensor(name)):
                return False
    return first.keys() == second.keys()


def measure(strategy: str, folder: Path, target: Path) -> Row:
    plan, reading, taking = make_plan(strategy), list[float](), list[float]()
    for _ in range(ROUNDS):
        forget(folder)
        reading.append(read_all(folder))
        forget(folder)
        ranks = launch(RANKS, work, plan, folder, target)
        taking.append(max(seen.read_seconds for seen in ranks))
    assert same_values(folder, target), "what was saved is not what was loaded"
    read, pieces, load = median(reading), median(taking), max(seen.load_seconds for seen in ranks)
    fullest = max(ranks, key=lambda seen: seen.peak_bytes)
    saving = max(seen.save_seconds for seen in ranks), max(seen.save_peak_bytes for seen in ranks)
    seconds = round(read, 2), round(pieces, 2), round(pieces / read, 2), round(load, 2)
    return Row(strategy, *seconds, fullest.piece_bytes, fullest.peak_bytes, round(saving[0], 2), saving[1])


def main() -> int:
    rows, place = [], sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=place) as made:
        folder = Path(made) / "weights"
        folder.mkdir()
        write_files(folder)
        num_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        print(f"{num_bytes:,} bytes in {len(list(folder.glob('*.safetensors')))} files")
        print("strategy   read s  pieces s  ratio  load s  pieces MiB  peak MiB  save s  save peak MiB")
        for strategy in STRATEGIES:
            row = measure(strategy, folder, Path(made) / "saved")
            rows.append(row)
            seconds = f"{row.read_files_seconds:>8.2f} {row.read_pieces_seconds:>9.2f} {row.over_reading:>6.2f}"
            memory = f"{row.piece_bytes / 2**20:>11.0f} {row.peak_bytes / 2**20:>9.0f}"
            saving = f"{row.save_seconds:>7.2f} {row.save_peak_bytes / 2**20:>14.0f}"
            print(f"{strategy:<9} {seconds} {row.load_seconds:>7.2f} {memory} {saving}")
    kept = all(row.peak_bytes <= row.piece_bytes + SPARE_BYTES and row.over_reading <= TIMES_READING for row in rows)
    taken = circumstances("python -m benchmarks.weights_loading FOLDER", WHERE)
    result = {**taken, "file_bytes": num_bytes, "rows": [asdict(row) for row in rows], "kept": kept}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("within its pieces and 1 GiB, and 1.5 times reading" if kept else "TOO MUCH")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
