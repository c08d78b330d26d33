"""Code in the documentation runs: every Python and shell block of every Markdown file, in order.

Python blocks of one file share a namespace; one that has `>>>` prompts is checked like a doctest. Of shell blocks the
`conjoin` commands are run, in the same empty folder as the Python and in this process, which spares importing torch for
each; `make` targets must exist; set-up commands are only read. In a `console` block what follows a `$ conjoin ...` line
must be its output, `...` standing for what varies.
"""

from __future__ import annotations

import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from conjoin.cli import main
from conjoin.search.strategies import registered
from tests.zoo.commands import captured_once

REPOSITORY = Path(__file__).parent.parent
PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "conjoin/**/*.md", "zoo/**/*.md")
PYTHON = ("python", "py", "pycon")
SHELL = ("bash", "sh", "shell", "console")
READ_ONLY = (".", "cd", "export", "git", "pip", "python", "python3", "source", "torchrun")
"""Commands that set things up or start many processes: the scripts they name must exist, that is all."""
LENIENT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its language, its text, and the line of the file on which the text begins."""

    language: str
    text: str
    line: int


class BrokenBlock(AssertionError):
    """A block that does not do what the page says."""


def find_blocks(markdown: str) -> Iterator[Block]:
    """All fenced blocks of a page, those inside lists too.

    >>> [(block.language, block.text) for block in find_blocks("Say\\n```python\\nx = 1\\n```\\n")]
    [('python', 'x = 1\\n')]
    """
    pattern = r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>\w*)[^\n`]*\n(?P<text>.*?)^ *(?P=fence) *$"
    for match in re.finditer(pattern, markdown, re.MULTILINE | re.DOTALL):
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
        yield Block(match["language"].lower(), text, markdown.count("\n", 0, match.start("text")) + 1)


Shell = Callable[[list[str]], tuple[int, str, str]]
"""Runs `conjoin` with these words; its exit status, what it printed and what it complained of."""


def run_page(path: Path, namespace: dict[str, object], shell: Shell) -> int:
    """Run all blocks of a page in the current folder; how many were run."""
    blocks = [block for block in find_blocks(path.read_text()) if block.language in (*PYTHON, *SHELL)]
    for block in blocks:
        try:
            if block.language in PYTHON:
                _run_python(block, path, namespace)
            else:
                _run_shell(block, shell)
        except Exception as error:
            where = f"{path.name}:{block.line}"
            raise BrokenBlock(f"{where}: {type(error).__name__}: {error}\n\n{block.text}") from error
    return len(blocks)


def _run_python(block: Block, path: Path, namespace: dict[str, object]) -> None:
    if re.search(r"^\s*>>> ", block.text, re.MULTILINE):
        examples = doctest.DocTestParser().get_doctest(block.text, namespace, path.name, str(path), block.line - 1)
        told: list[str] = []
        doctest.DocTestRunner(optionflags=LENIENT, verbose=False).run(examples, out=told.append, clear_globs=False)
        namespace.update(examples.globs)
        if told:
            raise BrokenBlock("".join(told))
        return
    # Blank lines in front keep the line numbers of a traceback those of the page.
    exec(compile("\n" * (block.line - 1) + block.text, str(path), "exec"), namespace)


def _run_shell(block: Block, shell: Shell) -> None:
    for line, output in _find_commands(block):
        for command in line.split("&&"):
            words = shlex.split(command, comments=True)
            if words and Path(words[0]).name == "conjoin":
                check_command(command.replace(words[0], "conjoin", 1), output, shell)
            elif words:
                _check_words(words)


def _find_commands(block: Block) -> Iterator[tuple[str, str]]:
    """(command, output shown for it); in a console block commands follow `$ `, elsewhere every line is one."""
    text = block.text.replace("\\\n", " ")
    if block.language != "console":
        yield from ((line.strip(), "") for line in text.splitlines())
        return
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        yield command.strip(), output


def check_command(command: str, output: str, shell: Shell) -> None:
    """One command of conjoin runs in this process; what needs a shell (`||`, pipes) gets one."""
    words = shlex.split(command, comments=True)
    code, printed, complaint = run_in_bash(command) if set(command) & set("|&;<>$`") else shell(words[1:])
    if code != 0:
        raise BrokenBlock(f"`{command}` ends with {code}:\n{printed}{complaint}")
    if output.strip() and not doctest.OutputChecker().check_output(output.strip(), printed.strip(), LENIENT):
        raise BrokenBlock(f"`{command}` prints\n{printed}\nand the page shows\n{output}")


def run_in_bash(command: str) -> tuple[int, str, str]:
    places = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    line, environment = f"set -euo pipefail; {command}", {**os.environ, "PATH": places}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def _check_words(words: list[str]) -> None:
    program = Path(words[0]).name or words[0]
    if program == "make":
        targets = set(re.findall(r"^([a-z]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
        missing = {word for word in words[1:] if "=" not in word} - targets
        if missing:
            raise BrokenBlock(f"the Makefile has no target {', '.join(sorted(missing))}")
    elif program not in READ_ONLY:
        raise BrokenBlock(f"`{program}` is neither conjoin nor make nor one of {', '.join(READ_ONLY)}")
    missing_scripts = [word for word in words[1:] if word.endswith(".py") and not (REPOSITORY / word).exists()]
    if missing_scripts and program.startswith(("python", "torchrun")):
        raise BrokenBlock(f"there is no {', '.join(missing_scripts)}")


def find_pages() -> list[str]:
    """Every Markdown page of the project, by its path."""
    return sorted({str(p.relative_to(REPOSITORY)) for pattern in PATTERNS for p in REPOSITORY.glob(pattern)})


def anchors(markdown: str) -> set[str]:
    """What may stand behind `#` in a link to a page: its headings, as GitHub names them.

    >>> sorted(anchors("# How good is it?\\n## `run`, and *Data*\\n"))
    ['how-good-is-it', 'run-and-data']
    """
    headings = re.findall(r"^#+ (.*)$", _without_code(markdown), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """Links of a page to files or headings of the project that are not there."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "", _without_code(page.read_text()))):
        path, _, anchor = target.partition("#")
        place = page.parent / path if path else page
        is_there = place.exists() and (not anchor or anchor in anchors(place.read_text()))
        if not is_there and not target.startswith("https://"):
            found.append(target)
    return found


def _without_code(markdown: str) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", markdown, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def namespace(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> dict[str, object]:
    """The names that the blocks of a page share, as a module so that classes defined there can be found again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CONJOIN_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("CONJOIN_COSTS", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    module = ModuleType("documented")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("OWN", "SHORT"):  # what a page registers is no strategy of the tests that come after it
        monkeypatch.setattr(registered, name, dict(getattr(registered, name)))
    return vars(module)


@pytest.fixture(scope="module")
def _zoo_captured_once() -> Iterator[None]:
    with captured_once():
        yield


@pytest.fixture
def shell(capfd: pytest.CaptureFixture[str], _zoo_captured_once: None) -> Shell:
    def run(words: list[str]) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(words)
        return code, *capfd.readouterr()

    return run


@pytest.mark.parametrize("page", find_pages())
def test_the_code_on_a_page_runs(page: str, namespace: dict[str, object], shell: Shell) -> None:
    run_page(REPOSITORY / page, namespace, shell)


def test_links_lead_somewhere() -> None:
    assert {page: links for page in find_pages() if (links := dead_links(REPOSITORY / page))} == {}


def test_a_dead_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A page\n[itself](#a-page) [nothing](#b) [gone](gone.md) [far](https://x.org)\n```text\n[no](link)\n```\n")
    assert dead_links(page) == ["#b", "gone.md"]


def test_blocks_share_names_and_folder(tmp_path: Path, namespace: dict[str, object], shell: Shell) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 20\n```\n"
        "- in a list\n  ```python\n  from pathlib import Path\n  x += 1\n  Path('kept').write_text(str(2 * x))\n  ```\n"
        "```python\n>>> Path('kept').read_text(), x\n('42', ...)\n>>> y = 1\n```\n"
        "```python\nassert y == 1\n```\n"
        "```bash\nmake test PYTHON=python3\npip install conjoin  # and wait\n\n# a comment\n```\n"
        "```text\nnot code\n```\n"
    )
    assert run_page(page, namespace, shell) == 5


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("```python\nx = 1\n1 / 0\n```", "page.md:3: ZeroDivisionError"),
        ("```python\nx = \n```", "page.md:3: SyntaxError"),
        ("```python\n>>> 1 + 1\n3\n```", "Expected:\n    3"),
        ("```bash\ncd conjoin && make coffee\n```", "no target coffee"),
        ("```bash\nrm -rf everything\n```", "`rm` is neither"),
        ("```bash\npython examples/missing.py\n```", "there is no examples/missing.py"),
        ("```bash\nconjoin no-such-command\n```", "`conjoin no-such-command` ends with"),
        ("```console\n$ conjoin no-such-command\nwell done\n```", "`conjoin no-such-command` ends with"),
        ("```console\n$ conjoin no-such-command | cat\nwell done\n```", "`conjoin no-such-command | cat` ends with"),
        ("```console\n$ conjoin --version\nconjoin 99.0\n```", "and the page shows\nconjoin 99.0"),
    ],
)
def test_a_broken_block_is_caught(
    tmp_path: Path, namespace: dict[str, object], shell: Shell, block: str, complaint: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"A page.\n{block}\n")
    with pytest.raises(BrokenBlock, match=re.escape(complaint)):
        run_page(page, namespace, shell)
