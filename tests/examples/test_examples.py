"""The examples do what they say: they run, and many processes train like one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_parallel.py"
MAX_LINES = 30
Figures = list[tuple[float, float]]


def run_script(launcher: tuple[str, ...], folder: Path) -> Figures:
    """Run the example in a folder of its own; the loss and the gradient norm of each step that it prints."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(SCRIPT)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert (folder / "checkpoint" / "conjoin.json").exists()
    lines = re.findall(r"^step \d+ +loss ([\d.]+) +gradient norm ([\d.]+)$", done.stdout, re.MULTILINE)
    assert len(lines) == len(done.stdout.splitlines()), "one rank prints, and only its steps"
    return [(float(loss), float(norm)) for loss, norm in lines]


def test_training_on_many_processes_prints_what_one_prints(tmp_path: Path) -> None:
    alone = run_script((), tmp_path / "alone")
    together = run_script(("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), tmp_path / "two")
    assert len(alone) == 5 and alone[-1][0] < 0.5 * alone[0][0], "it learns"
    for mine, theirs in zip(together, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=2e-6)


def test_a_training_loop_is_short() -> None:
    text = SCRIPT.read_text()
    documentation = ast.parse(text).body[0]
    lines = text.splitlines()[documentation.end_lineno :]
    code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
    assert len(code) <= MAX_LINES
