"""The next command after `plan`; `test_run.py` really types one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Ran

Run = Callable[..., Ran]


def test_for_one_node(run: Run, folder: Path) -> None:
    shown = run("plan", "my_models.py:sized", "--batch", "8", "--size", "width=6", "--machine", "local:2", "--strategy",
                "fsdp", "-o", "my plan.json")  # fmt: skip
    assert shown.code == 0, shown.err
    title, command = shown.out.splitlines()[-1].split(None, 1)
    assert title == "next" and command == (
        "torchrun --nproc-per-node 2 -m conjoin run 'my plan.json' my_models.py:sized --batch 8 --size width=6"
    )


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
