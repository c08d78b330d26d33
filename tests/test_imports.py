"""Importing does nothing: no output, no files, no threads, no change of environment or of torch's own state."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
UNWANTED = ("zoo", "transformers")
"""Packages that are heavy, or that nothing in the package may depend on."""
# Runs in a fresh interpreter whose folders are empty: imports torch, then every module in a fork of its own, and writes
# for each what the import changed. Forking spares a second import of torch, not a first import of the module.
PROBE = """
import os, random, signal, sys, threading, hashlib, json, logging
from importlib import import_module
from pathlib import Path
import torch

folders, reports, unwanted, modules = sys.argv[1], Path(sys.argv[2]), sys.argv[3].split(","), sys.argv[4].split(",")

def digest(value):
    return hashlib.sha256(value).hexdigest()

def state():
    return {
        "environment": dict(os.environ),
        "working directory": os.getcwd(),
        "files": sorted(str(path) for path in Path(folders).rglob("*")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "import path": list(sys.path),
        "log handlers": [repr(handler) for handler in logging.getLogger().handlers],
        "interrupt handler": repr(signal.getsignal(signal.SIGINT)),
        "exception hook": repr(sys.excepthook),
        "random state": digest(repr(random.getstate()).encode()),
        "torch random state": digest(torch.get_rng_state().numpy().tobytes()),
        "torch default dtype": str(torch.get_default_dtype()),
        "torch default device": str(torch.get_default_device()),
        "torch gradient mode": torch.is_grad_enabled(),
        "torch thread count": torch.get_num_threads(),
        "torch deterministic mode": torch.are_deterministic_algorithms_enabled(),
        "torch matmul precision": torch.get_float32_matmul_precision(),
        "unwanted imports": [name for name in unwanted if name in sys.modules],
    }

def probe(module):
    output = os.open(reports / f"{module}.output", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    before = state()
    import_module(module)
    after = state()
    sys.stdout.flush()
    changed = [f"{what}: {before[what]} -> {after[what]}" for what in before if before[what] != after[what]]
    (reports / f"{module}.json").write_text(json.dumps(changed))

for module in modules:
    child = os.fork()
    if child == 0:
        try:
            probe(module)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(child, 0)
"""


def effects_of(modules: list[str], scratch: Path, search_path: Sequence[Path]) -> dict[str, list[str]]:
    """What importing each module does besides importing it, in words; nothing where it does nothing."""
    folders, reports = scratch / "folders", scratch / "reports"
    for folder in (folders / "work", folders / "home", folders / "temporary", reports):
        folder.mkdir(parents=True)
    settings = {"HOME": folders / "home", "TMPDIR": folders / "temporary", "XDG_CACHE_HOME": folders / "home" / "cache"}
    environment = {**os.environ, **{name: str(path) for name, path in settings.items()}}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, search_path)), "PYTHONDONTWRITEBYTECODE": "1"}
    arguments = [str(folders), str(reports), ",".join(UNWANTED), ",".join(modules)]
    subprocess.run([sys.executable, "-c", PROBE, *arguments], cwd=folders / "work", env=environment, check=True)
    return {module: _read_report(reports, module) for module in modules}


def _read_report(reports: Path, module: str) -> list[str]:
    output = (reports / f"{module}.output").read_text()
    report = reports / f"{module}.json"
    changed = json.loads(report.read_text()) if report.exists() else ["it failed"]
    return [*changed, *([f"output: {output}"] if output else [])]


def package_modules() -> list[str]:
    """The package, its rooms and the files beside them."""
    rooms = [path.parent.name for path in (REPOSITORY / "conjoin").glob("*/__init__.py")]
    files = [path.stem for path in (REPOSITORY / "conjoin").glob("*.py") if not path.stem.startswith("__")]
    return ["conjoin", *(f"conjoin.{name}" for name in sorted(rooms + files))]


@pytest.fixture(scope="module")
def effects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Of what imports the whole package, of a module that does nothing, and of those of `EFFECTS`, by their names."""
    place = tmp_path_factory.mktemp("imports")
    (place / "quiet.py").write_text("import torch.fx")
    for module, complaint in NOISY.items():
        (place / f"{module}.py").write_text(EFFECTS[complaint])
    return effects_of(["conjoin.api", "conjoin.cli", "quiet", *NOISY], place / "scratch", (place, REPOSITORY))


def test_importing_has_no_effects(effects: dict[str, list[str]]) -> None:
    assert effects["conjoin.api"] == effects["conjoin.cli"] == []


def test_these_import_all_others() -> None:
    for module in ("api", "cli", "gnn", "memory"):
        import_module(f"conjoin.{module}")
    assert {"conjoin.ops", "conjoin.search"} <= set(package_modules()) <= set(sys.modules)


@pytest.mark.parametrize("asked", ["--version", "--help", "plan --help", "rules prove --help"])
def test_help_does_not_wait_for_torch(asked: str) -> None:
    ending = "import sys, atexit; atexit.register(lambda: print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules))))"
    program = f"{ending}\nfrom conjoin.cli import main\nsys.exit(main({asked.split()}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


EFFECTS = {
    "output: hello": "print('hello')",
    "output: uh-oh": "import sys; sys.stderr.write('uh-oh')",
    "files": "open('left.txt', 'w').close()",
    "files: ": "from pathlib import Path; (Path.home() / 'left.txt').touch()",
    "environment": "import os; os.environ['LEFT'] = '1'",
    "threads": "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "torch random state": "import torch; torch.manual_seed(7)",
    "random state": "import random; random.random()",
    "torch default dtype": "import torch; torch.set_default_dtype(torch.float64)",
    "torch default device": "import torch; torch.set_default_device('meta')",
    "torch gradient mode": "import torch; torch.set_grad_enabled(False)",
    "torch thread count": "import torch; torch.set_num_threads(torch.get_num_threads() + 1)",
    "unwanted imports": "import zoo",
    "it failed": "1 / 0",
}


NOISY = {f"noisy{i}": complaint for i, complaint in enumerate(EFFECTS)}


def test_every_effect_is_caught(effects: dict[str, list[str]]) -> None:
    assert effects["quiet"] == []
    told = {complaint: "\n".join(effects[module]) for module, complaint in NOISY.items()}
    assert {complaint: text for complaint, text in told.items() if complaint not in text} == {}
