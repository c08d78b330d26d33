"""Arrows point one way: which room may import which, and always through its front door."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
FOUNDATION = "errors"
"""The one file beside the rooms that every room may import."""
PLUGINS = "plugins"
"""Beside the rooms too: what is asked for by name may be in a package that extends conjoin."""
SURFACE = "conjoin"
"""What `import conjoin` and `from conjoin import plan` name: the package's own front door."""

DECIDING = "ops machine schedules ir frontends rules comm cost sim memory"
ALL = f"{DECIDING} search runtime gnn report"
MAY_IMPORT = {
    "ops": f"{PLUGINS} environment",
    "machine": PLUGINS,
    "schedules": "",
    "ir": "ops machine schedules",
    "frontends": "ops ir",
    "rules": "ops ir",
    "comm": "ops ir machine",
    "cost": "ops ir machine comm",
    "sim": "ops ir machine schedules comm cost",
    "memory": "ops ir machine cost sim",
    "search": f"{DECIDING} {PLUGINS}",
    "runtime": "ops ir machine schedules comm environment",
    "gnn": "ops ir machine comm cost runtime",
    "report": "ops ir machine schedules comm sim",
    "api": f"{ALL} environment",
    "cli": f"{ALL} environment api conjoin",
    FOUNDATION: "",
    PLUGINS: "",
    "environment": "",
    SURFACE: f"{ALL} api",
    "__main__": "cli",
}


@dataclass(frozen=True, slots=True)
class Import:
    """One name imported at one place: `conjoin.ops.Call` and `from conjoin.ops import Call` are the same."""

    where: str
    target: tuple[str, ...]


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Every statement, wherever it stands; expressions, of which there are far more, hold none."""
    for block in ("body", "handlers", "orelse", "finalbody", "cases"):
        for inner in getattr(tree, block, ()):
            if isinstance(inner, ast.stmt):
                yield inner
            yield from statements(inner)


def imports_of(path: Path, root: Path) -> Iterator[Import]:
    """Every import in a file, wherever it stands in it, with relative ones made absolute."""
    inside = path.relative_to(root)
    package = inside.parent.parts
    for node in statements(ast.parse(path.read_text())):
        where = f"{inside}:{node.lineno}"
        if isinstance(node, ast.Import):
            yield from (Import(where, tuple(alias.name.split("."))) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            yield from (Import(where, (*module, alias.name)) for alias in node.names)


def room_of(path: Path, root: Path) -> str:
    """The room a file of the package stands in; a file beside the rooms is one of its own."""
    parts = path.relative_to(root).with_suffix("").parts[1:]
    return SURFACE if parts == ("__init__",) else parts[0]


def public_names(room: str, root: Path) -> frozenset[str]:
    """The names that a room's `__init__.py` lists in `__all__`; for a room that is one file, the names it defines."""
    package, module = root / "conjoin" / room / "__init__.py", root / "conjoin" / f"{room}.py"
    if not package.exists() and not module.exists():
        return frozenset()
    return names_in((package if package.exists() else module).read_text())


@cache
def names_in(source: str) -> frozenset[str]:
    """The names that a file lists in `__all__`, else those it defines."""
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return frozenset(ast.literal_eval(node.value))
    definitions = (ast.ClassDef, ast.FunctionDef)
    return frozenset(n.name for n in tree.body if isinstance(n, definitions) and not n.name.startswith("_"))


def is_room(name: str, root: Path) -> bool:
    """Whether `conjoin.<name>` is a folder or a file, not a name that the package's front door hands out."""
    return name in MAY_IMPORT or (root / "conjoin" / name).is_dir() or (root / "conjoin" / f"{name}.py").exists()


def objection(room: str | None, found: Import, root: Path) -> str | None:
    """Why code in `room` (None: outside the package) must not import this, or None where it may."""
    if found.target[0] != "conjoin":
        return None
    below = found.target[1:]
    target = below[0] if below and is_room(below[0], root) else SURFACE
    if target == room:
        return None
    if room is not None and target not in {*MAY_IMPORT.get(room, "").split(), FOUNDATION}:
        return f"{found.where}: {room} may not import {target}"
    at_the_door = target == SURFACE or len(below) == 1 or (len(below) == 2 and below[1] in public_names(target, root))
    if not at_the_door:
        return f"{found.where}: {'.'.join(found.target)} is not a public name; import the room, not its files"
    return None


def violations(root: Path) -> list[str]:
    """Everything in the tree that breaks the table, one line each."""
    found: list[str | None] = []
    for path in sorted((root / "conjoin").rglob("*.py")):
        room = room_of(path, root)
        if room not in MAY_IMPORT:
            found.append(f"{path.relative_to(root)}: the table has no room {room}")
        found += [objection(room, item, root) for item in imports_of(path, root)]
    for path in sorted((root / "zoo").rglob("*.py")):
        names = [item for item in imports_of(path, root) if item.target[0] == "conjoin"]
        found += [f"{item.where}: the zoo is plain torch and knows nothing of conjoin" for item in names]
    for folder in ("examples", "benchmarks"):
        for path in sorted((root / folder).rglob("*.py")):
            found += [objection(None, item, root) for item in imports_of(path, root)]
    return [line for line in found if line is not None]


def test_every_import_is_in_the_table() -> None:
    assert (REPOSITORY / "conjoin" / "ops" / "__init__.py").exists()
    assert violations(REPOSITORY) == []


def test_the_table_has_no_cycle() -> None:
    table = {room: allowed.split() for room, allowed in MAY_IMPORT.items()}
    assert {name for allowed in table.values() for name in allowed} <= set(table)
    TopologicalSorter(table).prepare()


def test_readers_are_shown_the_same_table() -> None:
    shown: dict[str, set[str]] = {}
    for line in (REPOSITORY / "docs" / "architecture.md").read_text().splitlines():
        if line.startswith("| `conjoin/"):
            _, name, _, allowed, _ = (cell.strip() for cell in line.split("|"))
            words = {"nothing": set(), "every room above": set(shown)}.get(allowed, set(allowed.split()))
            shown[name.strip("`").removeprefix("conjoin/")] = words
    files = {FOUNDATION, PLUGINS, SURFACE, "environment", "__main__"}
    assert shown == {room: set(allowed.split()) - files for room, allowed in MAY_IMPORT.items() if room not in files}


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("conjoin/ops/spec.py", "from conjoin.ir import Graph", "ops may not import ir"),
        ("conjoin/ops/spec.py", "def late():\n    import conjoin.ir", "ops may not import ir"),
        ("conjoin/ops/deep/spec.py", "from ...ir import Graph", "ops may not import ir"),
        ("conjoin/ops/spec.py", "from conjoin import ir", "ops may not import ir"),
        ("conjoin/ir/graph.py", "import conjoin", "ir may not import conjoin"),
        ("conjoin/ir/graph.py", "from conjoin import plan", "ir may not import conjoin"),
        ("conjoin/ir/graph.py", "from conjoin.api import plan", "ir may not import api"),
        ("conjoin/api/plan.py", "from conjoin.cli import main", "api may not import cli"),
        ("conjoin/runtime/step.py", "from conjoin.search import search", "runtime may not import search"),
        ("conjoin/ir/graph.py", "from conjoin.ops.spec import Call", "conjoin.ops.spec.Call is not a public name"),
        ("conjoin/ir/graph.py", "import conjoin.ops.spec", "conjoin.ops.spec is not a public name"),
        ("conjoin/ir/graph.py", "from conjoin.ops import spec", "conjoin.ops.spec is not a public name"),
        ("conjoin/ir/graph.py", "from conjoin.ops import *", "conjoin.ops.* is not a public name"),
        ("conjoin/errors.py", "from conjoin.ops import Call", "errors may not import ops"),
        ("conjoin/helpers.py", "", "the table has no room helpers"),
        ("zoo/mlp.py", "from conjoin.ops import Call", "the zoo is plain torch"),
        ("examples/demo.py", "from conjoin.ops.spec import Call", "conjoin.ops.spec.Call is not a public name"),
    ],
)
def test_a_false_import_is_caught(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    _write_tree(tmp_path)
    assert violations(tmp_path) == []
    _append(tmp_path / file, line)
    found = violations(tmp_path)
    assert len(found) == 1 and file in found[0] and complaint in found[0]


def _write_tree(root: Path) -> None:
    """A small tree in which every import is right."""
    files = {
        "conjoin/__init__.py": "from conjoin.api import plan",
        "conjoin/errors.py": "class ConjoinError(Exception): ...",
        "conjoin/ops/__init__.py": "from conjoin.ops.spec import Call\n__all__ = ['Call']",
        "conjoin/ops/spec.py": "from torch import Tensor\nfrom conjoin.errors import ConjoinError",
        "conjoin/ops/deep/spec.py": "from ..spec import Call\nfrom conjoin.ops import Call",
        "conjoin/ir/__init__.py": "from .graph import Graph\n__all__ = ['Graph']",
        "conjoin/ir/graph.py": "import conjoin.ops\nfrom conjoin.ops import Call",
        "conjoin/api/__init__.py": "from conjoin.ir import Graph\n__all__ = ['plan']\ndef plan(): ...",
        "conjoin/cli.py": "import conjoin\nfrom conjoin import plan\nfrom conjoin.api import plan",
        "zoo/mlp.py": "from zoo.workload import Entry",
        "examples/demo.py": "import conjoin\nfrom conjoin.ops import Call\nfrom zoo import build",
    }
    for name, text in files.items():
        _append(root / name, text)


def _append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(f"{text}\n")
