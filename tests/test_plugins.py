"""Packages that extend conjoin: loaded when something is asked for that nobody knows, and never before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conjoin import plugins
from tests.cli.processes import Forked
from tests.waiting import HUNG_SECONDS

PACKAGE = """\
from dataclasses import replace

import torch

import conjoin
from conjoin.ops import register_operator


@torch.library.custom_op("plugged::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return x / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda ctx, gradient: gradient / 2)
register_operator(halved, "... -> ...", terms="x")
conjoin.register_machine(replace(conjoin.Machine.preset("dgx-h100"), name="plugged-office"))


def register():
    conjoin.register_strategy("plugged", "zero3+recompute=full")
"""
ENTRIES = "[conjoin.plugins]\nall = plugged:register\nbroken = plugged_wrong\n"
ASKED = {
    "machines": "'plugged-office' in registered_names()",
    "machine": "parse_machine('plugged-office:2').num_devices == 16",
    "strategy": "str(read_request('plugged+micro=2')) == 'fsdp+recompute=full+micro=2'",
    "operator": "find_spec('plugged::halved').terms == 'x'",
}
# Imports conjoin once, and what torch imports for an operator of one's own; each question is asked in a fork of its
# own, which tells whether the package was loaded by then.
PROGRAM = """
import json, os, sys
import conjoin, conjoin.api, torch._dynamo
from conjoin.machine import parse_machine, registered_names
from conjoin.ops import find_spec
from conjoin.search import read_request

parse_machine("dgx-h100"), conjoin.strategy_names(), find_spec("linear"), find_spec("nonzero")
for what, asked in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        before = "plugged" in sys.modules
        print(what, before, eval(asked), "plugged" in sys.modules, flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_package_is_loaded_when_something_is_not_known(tmp_path: Path) -> None:
    (tmp_path / "plugged.py").write_text(PACKAGE)
    metadata = tmp_path / "plugged-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "asking.py").write_text(PROGRAM)
    process = Forked(tmp_path, "asking", [json.dumps(ASKED)])
    out, err = process.communicate(HUNG_SECONDS)
    assert process.returncode == 0 and out.splitlines() == [f"{what} False True True" for what in ASKED], err
    assert err.count("the plugin broken is not used: ModuleNotFoundError") == len(ASKED)


def test_packages_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[str] = []
    monkeypatch.setattr(plugins, "_asked", [])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: times.append(group) or [])
    assert not plugins.load_plugins("first") and not plugins.load_plugins("second")
    plugins.forget_plugins()
    plugins.load_plugins("third")
    assert times == ["conjoin.plugins"] * 2
