"""A step of a pipeline on Gloo ranks beside one by `torch.distributed.pipelining`: same model, stages and schedule.

    python -m benchmarks.pipelines_torch        # writes results/pipelines_torch.json

Both run in the same processes, in rounds of one step each, and who begins takes turns, so that whatever else the host
does meets both. A step is forward and backward of all micro-batches and an update by SGD; it is timed from a barrier to
the end of the slowest rank. Losses of both are compared. The ratio is ours to torch's, the median of those of the
rounds; and beside it that of the seconds that processors worked, all ranks together, which does not know how long a
rank had to wait for one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

import conjoin
from conjoin.frontends import capture
from conjoin.ir import LeafKind, Pipeline, load_plan
from conjoin.machine import Machine
from conjoin.runtime import launch
from conjoin.search import make_pipeline

RESULT = Path(__file__).parent / "results" / "pipelines_torch.json"
BLOCKS, WIDTH, ROWS = 8, 256, 64
THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.relu(self.up(x)))
        return made


def model_of() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


def batch_of(micro: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randn(micro * ROWS, WIDTH), torch.randn(micro * ROWS, WIDTH)


@dataclass(frozen=True, slots=True)
class Row:
    """Both, at one number of ranks."""

    schedule: str
    ranks: int
    micro_batches: int
    ours_ms: float
    theirs_ms: float
    ours_steps_ms: list[float]
    theirs_steps_ms: list[float]
    ratio: float
    """Ours to theirs, the median of the rounds."""
    processor_ratio: float
    """Of the seconds that processors worked."""


Measured = tuple[list[list[float]], list[list[float]], list[float]]


def measure(rank: int, path: str, schedule: str, steps: int) -> Measured:
    """On one rank: seconds of our steps and of theirs, those of its processors, and both first losses as far as they
    are known here."""
    torch.set_num_threads(1)
    plan = load_plan(path)
    assert isinstance(plan, Pipeline)
    batch = batch_of(plan.num_micro_batches)
    ours = conjoin.load(plan, model_of(), device="cpu")
    ours.compare_every(0)
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)

    def our_step() -> float:
        optimizer.zero_grad()
        loss = ours(*batch)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    their_step = theirs(rank, plan, schedule, batch)
    told = [our_step(), their_step()]  # also what is set up in the first
    seconds: list[list[float]] = [[], []]
    worked: list[list[float]] = [[], []]
    both = [*enumerate((our_step, their_step))]
    for number in range(steps):
        for which, step in both[:: -1 if number % 2 else 1]:
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            step()
            seconds[which].append(time.perf_counter() - start)
            worked[which].append(time.process_time() - before)
    return seconds, worked, told


def theirs(rank: int, plan: Pipeline, schedule: str, batch: tuple[Tensor, Tensor]) -> Callable[[], float]:
    """A step by torch's own pipelining, of the same blocks in every stage; NaN where a rank does not see the loss."""
    model, count = model_of(), len(plan.stages)
    stages = []
    for number, stage in enumerate(plan.stages):
        if rank in stage.ranks:
            names = {leaf.name.split(".")[0] for leaf in stage.plan.graph.leaves_of(LeafKind.PARAMETER)}
            part = nn.Sequential(*(model[int(name)] for name in sorted(names, key=int)))
            stages.append(PipelineStage(part, number, count, torch.device("cpu")))
    kind, several = THEIRS[schedule], schedule == "interleaved"
    made = kind(stages if several else stages[0], plan.num_micro_batches, loss_fn=nn.functional.mse_loss)  # type: ignore[arg-type]
    parameters = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    first, last = (plan.stages[i].ranks[0] == rank for i in (0, -1))

    def step() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        given = {"target": batch[1], "losses": losses} if last else {}
        made.step(*(batch[:1] if first else ()), **given)
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if last else float("nan")

    return step


def compare(schedule: str, ranks: int, micro: int, steps: int) -> Row:
    graph = capture(model_of().train(), batch_of(micro), nn.functional.mse_loss)
    virtual = ",v=2" if schedule == "interleaved" else ""
    strategy = f"pipeline:pp={ranks}{virtual},micro={micro},schedule={schedule}"
    plan = make_pipeline(graph, Machine("here", 1, ranks, "cpu"), strategy)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        answers = launch(ranks, measure, str(path), schedule, steps)
    ours, others = ([max(each) for each in zip(*(a[0][which] for a in answers), strict=True)] for which in (0, 1))
    worked = [[sum(each) for each in zip(*(a[1][which] for a in answers), strict=True)] for which in (0, 1)]
    ratio, processors = (statistics.median(a / b for a, b in zip(*x, strict=True)) for x in ((ours, others), worked))
    losses = answers[plan.stages[-1].ranks[0]][2]
    assert abs(losses[0] - losses[1]) < 1e-5 * abs(losses[1]), f"losses differ: {losses}"
    medians = (round(1e3 * statistics.median(seconds), 2) for seconds in (ours, others))
    each = ([round(1e3 * x, 1) for x in seconds] for seconds in (ours, others))
    row = Row(schedule, ranks, micro, *medians, *each, round(ratio, 3), round(processors, 3))
    told = f"ours {row.ours_ms:7.1f} ms  torch {row.theirs_ms:7.1f} ms  {row.ratio:.2f}, of processors {processors:.2f}"
    print(f"{schedule:<12} {ranks} ranks  {told}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--schedules", nargs="+", choices=THEIRS, default=list(THEIRS))
    parser.add_argument("--micro", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path, default=RESULT)
    given = parser.parse_args()
    rows = [compare(name, ranks, given.micro, given.steps) for ranks in given.ranks for name in given.schedules]
    given.output.write_text(json.dumps({
        "command": f"python -m benchmarks.pipelines_torch {' '.join(sys.argv[1:])}".strip(), "date": str(date.today()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores", "torch": torch.__version__,
        "python": platform.python_version(), "load_average": os.getloadavg()[0],
        "rows": [asdict(row) for row in rows],
    }, indent=1) + "\n", encoding="utf-8")  # fmt: skip


if __name__ == "__main__":
    main()
