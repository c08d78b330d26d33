"""The worked example of docs/cluster.md: two nodes that are network namespaces, joined by a cable, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zoo
from conjoin.cli import main
from tests.waiting import HUNG_SECONDS

REPOSITORY = Path(__file__).parents[2]
NAMESPACES = ["unshare", "--map-root-user", "--net", "--mount"]
TRIAL = "mount -t tmpfs tmpfs /run; ip netns add a; ip netns add b; ip link add x netns a type veth peer name x netns b"


def _why_not() -> str:
    try:
        tried = subprocess.run([*NAMESPACES, "bash", "-ec", TRIAL], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"namespaces need programs that are not here: {error}"
    return f"namespaces are not permitted here: {tried.stderr.strip()[:200]}" if tried.returncode else ""


@pytest.mark.skipif(bool(_WHY := _why_not()), reason=_WHY or "possible here")
def test_two_nodes_train_like_one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPOSITORY / "docs" / "cluster.md").read_text()
    (script,) = re.findall(r"^```zsh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^\$ conjoin (plan lenet.*)$", page, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    (tmp_path / "two_nodes.sh").write_text(script)
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": places, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*NAMESPACES, "bash", "two_nodes.sh"], env=environment, capture_output=True, text=True, timeout=HUNG_SECONDS,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.count("fsdp:dp=2 plan of ConvNet for 2 ranks (n0:2)") == 1, done.stderr
    losses = [float(found) for found in re.findall(r"^step +\d+   loss (\S+)", done.stdout, re.MULTILINE)]
    torch.manual_seed(0)
    model, (x, target), loss = zoo.build("lenet:tiny")
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    expected = []
    for _ in range(3):
        value = loss(model(x), target)  # type: ignore[misc]
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert losses == pytest.approx(expected, abs=2e-6)
