"""The next command after `plan`: what is printed is really typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import REPOSITORY, Ran
from tests.waiting import HUNG_SECONDS

Run = Callable[..., Ran]


def test_the_printed_command_trains(run: Run, folder: Path) -> None:
    shown = run("plan", "my_models.py:sized", "--batch", "8", "--size", "width=6", "--machine", "local:2", "--strategy",
                "fsdp", "-o", "my plan.json")  # fmt: skip
    assert shown.code == 0, shown.err
    title, command = shown.out.splitlines()[-1].split(None, 1)
    assert title == "next" and command == (
        "torchrun --nproc-per-node 2 -m conjoin run 'my plan.json' my_models.py:sized --batch 8 --size width=6"
    )
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    typed = f"{command} --steps 2 --json"
    done = subprocess.run(
        typed, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=HUNG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout)["losses"]
    assert len(losses) == 2 and losses[1] < losses[0]


def test_for_several_nodes_and_under_slurm(run: Run, folder: Path) -> None:
    ask = ("plan", "lenet:tiny", "--batch", "32", "--machine", "dgx-h100:2", "--strategy", "ddp", "-o", "p.json")
    commands = json.loads(run(*ask, "--json").out)["next"]
    program = "-m conjoin run p.json lenet:tiny --batch 32"
    assert commands["every node"] == (
        f"torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 {program}"
    )
    assert commands["under Slurm"].startswith("srun --nodes 2 --ntasks-per-node 1 torchrun --nnodes 2")
    assert commands["under Slurm"].endswith(program)
    lines = run(*ask).out.splitlines()
    assert lines[-2].startswith("every node   torchrun ") and lines[-1].startswith("under Slurm  srun ")


def test_for_one_device_and_for_what_is_not_trained(run: Run, folder: Path) -> None:
    ask = ("--machine", "local:1", "--strategy", "single", "-o", "p.json", "--json")
    assert json.loads(run("plan", "lenet:tiny", *ask).out)["next"] == {
        "here": "python -m conjoin run p.json lenet:tiny"
    }
    assert json.loads(run("plan", "my_models.py:small", *ask).out)["next"] == {}, "there is no loss"
    assert json.loads(run("plan", "lenet:tiny", *ask[:4], "--json").out)["next"] == {}, "nothing is saved"
