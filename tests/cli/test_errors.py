"""Every error the package can tell its user: three sentences each, wherever it is raised."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from conjoin import errors
from tests.ir.wording import num_sentences

PACKAGE = Path(errors.__file__).parent
KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
SENTENCES = {"hint", "listed", "nearest", "nearest_preset", "suggestion"}
"""Variables that hold a sentence of their own, and functions that make one."""
THREE = "It is so. It is so. It is so."


def text_of(node: ast.expr) -> str:
    """The words of a message that stand in the program; nothing in place of what is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(text_of, parts))
        case ast.FormattedValue(value=ast.Name(id=name) | ast.Call(func=ast.Name(id=name))) if name in SENTENCES:
            return "It is so."
        case ast.FormattedValue(value=ast.IfExp(orelse=other)):
            return text_of(other)
        case ast.BinOp(left=left, right=right):
            return text_of(left) + text_of(right)
    return ""


def passes_on(node: ast.expr) -> bool:
    """Whether a message is one that was made elsewhere, perhaps with more before or after it."""
    if not isinstance(node, ast.JoinedStr):
        return not isinstance(node, ast.Constant | ast.BinOp)
    return any(isinstance(part, ast.FormattedValue) and ast.unparse(part.value) == "error" for part in node.values)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of every error made in a file."""
    for node in ast.walk(ast.parse(source)) if any(f"{kind}(" in source for kind in KINDS) else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in KINDS:
            text = text_of(node.args[0]).replace(":\nIt is so.", ":\n")  # a list, not a sentence
            yield node.lineno, THREE if num_sentences(text) < 3 and passes_on(node.args[0]) else text


def test_every_message_has_three_sentences() -> None:
    assert {"ConjoinError", "CaptureError", "GraphError", "UsageError"} <= KINDS
    found = {f"{file}:{line}": text for file in PACKAGE.rglob("*.py") for line, text in messages(file.read_text())}
    assert len(found) > 20
    assert {place: text for place, text in found.items() if num_sentences(text) != 3} == {}


def test_a_message_of_two_sentences_is_found() -> None:
    source = 'raise GraphError(f"The file {path} is bad: {reason[:20]}. " f"Check it.")'
    assert [num_sentences(text) for _, text in messages(source)] == [2]
