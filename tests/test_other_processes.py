"""What is written to files and compared between ranks is the same in every process, whatever its hashes of strings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from conjoin.cost import write_key
from conjoin.ir import fingerprint, parse_graph
from conjoin.machine import parse_machine
from conjoin.ops import Call, TensorType
from conjoin.rules.library import operators_version
from tests.ir.graphs import GOLDEN

REPOSITORY = Path(__file__).parent.parent


def _long_key() -> str:
    many = tuple(TensorType((1000 + i, 64), torch.float32) for i in range(200))
    return write_key(Call("cat", (many, 0)), (3,))


NAMES: dict[str, Callable[[], str]] = {
    "fingerprint of a graph": lambda: fingerprint(parse_graph(GOLDEN)),
    "fingerprint of a machine": lambda: parse_machine("summit:2").fingerprint(),
    "version of the operators": operators_version,
    "key of a long call": _long_key,
    "hashes of strings": lambda: str(hash("a string")),
}


def here() -> dict[str, str]:
    return {what: make() for what, make in NAMES.items()}


def test_names_are_the_same_in_another_process() -> None:
    program = f"import json; from {__name__} import here; print(json.dumps(here()))"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    mine, theirs = here(), json.loads(ran.stdout)
    assert [what for what in NAMES if mine[what] != theirs[what]] == ["hashes of strings"]
