"""The project works wherever it stands: in a folder of any name, for any user, under any locale."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
ROOMS = ("conjoin", "zoo", "examples", "benchmarks")
NAMES = ("conjoin", "a b", "ü ñ/中文", "it's $HOME (1)")
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")

# A Python for `make`, and the one it puts into the environment: they tell where and with what they were called.
BASE = """#!/bin/sh
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin; cp inner .venv/bin/python ;;
    *cpu_count*) echo 3 ;;
esac
"""
INNER = '#!/bin/sh\necho "$PWD: $* [$PYTHONUTF8]"\n'
OUTER = '#!/bin/sh\necho "$PWD: $* [$TMPDIR] $(umask)"; ls -a; test "$1" != {fails}\n'


def script(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def make(folder: Path, *targets: str) -> list[str]:
    """What `make` runs in a folder, a line each."""
    command = ["make", "--silent", "PYTHON=./base", *targets]
    environment = {name: text for name, text in os.environ.items() if name in ("PATH", "TMPDIR", "LC_ALL", "LANG")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.fixture(params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder with the Makefile in it, and a Python that installs nothing."""
    made: Path = tmp_path / request.param
    made.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, made)
    script(made / "base", BASE)
    script(made / "inner", INNER)
    return made


@needs_make
def test_make_works_in_a_folder_of_any_name(folder: Path) -> None:
    installed = make(folder, "setup")
    assert len(installed) == 2 and all(line.startswith(f"{folder}: -m pip install ") for line in installed)
    (ran,) = make(folder, "test")
    assert ran.startswith(f"{folder}: -m pytest --numprocesses 3 ") and ran.endswith(" [1]"), "once installed it stays"
    assert make(folder, "demo") == [f"{folder}: examples/demo.py []"]
    assert make(folder, "lint", "types") == [f"{folder}: -m ruff check []", f"{folder}: -m mypy []"]


@needs_make
def test_a_folder_that_was_renamed_or_copied_is_set_up_again(folder: Path, tmp_path: Path) -> None:
    make(folder, "setup")
    renamed = folder.rename(tmp_path / "renamed")
    assert [" -m pip install " in line for line in make(renamed, "lint")] == [True, True, False]
    assert len(make(renamed, "lint")) == 1
    copied = shutil.copytree(renamed, tmp_path / "copied", symlinks=True)
    assert len(make(copied, "lint")) == 3


@needs_make
def test_an_environment_that_is_linked_to_is_left_alone(folder: Path, tmp_path: Path) -> None:
    make(folder, "setup")
    other = shutil.copytree(folder, tmp_path / "other", ignore=shutil.ignore_patterns(".venv"))
    (other / ".venv").symlink_to(folder / ".venv")
    assert len(make(other, "lint")) == 1


@pytest.mark.parametrize("fails", ["none", "lint", "types", "test"])
def test_the_checks_run_in_a_copy_where_such_faults_show(tmp_path: Path, fails: str) -> None:
    original, places = tmp_path / "checkout", tmp_path / "places"
    for folder in (original / ".ci", original / ".venv", original / "conjoin" / "__pycache__", places):
        folder.mkdir(parents=True)
    shutil.copy(REPOSITORY / ".ci" / "run", original / ".ci")
    (original / "conjoin" / "new.py").touch()
    (tmp_path / "programs").mkdir()
    script(tmp_path / "programs" / "make", OUTER.format(fails=fails))
    environment = {**os.environ, "PATH": f"{tmp_path / 'programs'}:{os.environ['PATH']}", "TMPDIR": str(places)}
    command = [str(original / ".ci" / "run")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, encoding="utf-8")
    ran = [line for line in done.stdout.splitlines() if line.startswith("/")]
    asked = [line.partition(": ")[2].partition(" ")[0] for line in ran]
    targets = ["lint", "types", "test"]
    assert asked == targets[: targets.index(fails) + 1 if fails in targets else 3] and done.stderr == ""
    assert done.returncode == (fails != "none"), "what `make` says is what is said"
    for line in ran:
        where = Path(line.partition(": ")[0])
        assert where.is_relative_to(places) and where.name == "conjoin"
        assert " " in str(where) and not str(where).isascii()
        assert " " in line.partition("[")[2].partition("]")[0] and line.endswith("077")
    assert {".ci", "conjoin"} <= set(done.stdout.splitlines()) and ".venv" not in done.stdout
    assert list(places.iterdir()) == [], "nothing is left behind"


def calls_without_encoding(text: str) -> Iterator[int]:
    """The lines on which text is read or written in whatever encoding the locale has."""
    asked_for = ("read_text", "write_text", "open", "text=", "universal_newlines")
    for call in ast.walk(ast.parse(text)) if any(word in text for word in asked_for) else ():
        if isinstance(call, ast.Call) and "encoding" not in {word.arg for word in call.keywords} and _is_text(call):
            yield call.lineno


def _is_text(call: ast.Call) -> bool:
    words = {word.arg: word.value for word in call.keywords}
    match call.func:
        case ast.Attribute(attr="read_text"):
            return not call.args
        case ast.Attribute(attr="write_text"):
            return len(call.args) < 2
        case ast.Name(id="open"):
            return "b" not in _mode(words.get("mode"), call.args[1:2])
        case ast.Attribute(value=ast.Name(id="os" | "gzip"), attr="open"):
            return False
        case ast.Attribute(attr="open"):
            return "b" not in _mode(words.get("mode"), call.args[:1])
    return bool({"text", "universal_newlines"} & words.keys())


def _mode(word: ast.expr | None, places: list[ast.expr]) -> str:
    given = word if word is not None else next(iter(places), None)
    return given.value if isinstance(given, ast.Constant) and isinstance(given.value, str) else "r"


def test_text_is_read_and_written_in_utf_8() -> None:
    files = {path: path.read_text(encoding="utf-8") for room in ROOMS for path in (REPOSITORY / room).rglob("*.py")}
    assert len(files) > 200
    assert [f"{path}:{line}" for path, text in files.items() for line in calls_without_encoding(text)] == []


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text)", True),
        ("path.write_text(text, encoding='utf-8')", False),
        ("open(path)", True),
        ("open(path, 'w')", True),
        ("open(path, mode='rb')", False),
        ("path.open()", True),
        ("path.open('xb')", False),
        ("os.open(path, flags)", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command, encoding='utf-8')", False),
    ],
)
def test_a_missing_encoding_is_found(line: str, wrong: bool) -> None:
    assert list(calls_without_encoding(line)) == [1] * wrong
