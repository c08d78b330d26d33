"""MODEL on the command line: everything that can be wrong with it is told in one message, with the user's line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import conjoin
from conjoin.ir.graph_file import graph_to_json
from tests.cli.conftest import MODELS, Ran
from tests.ir.graphs import GOLDEN

Run = Callable[..., Ran]


def line_of(text: str) -> int:
    return next(number for number, line in enumerate(MODELS.splitlines(), 1) if text in line)


def refuse(run: Run, folder: Path, *arguments: str) -> str:
    """The message; and nothing was written."""
    before = sorted(folder.iterdir())
    message = run("inspect", *arguments, "-o", "graph.json").refused()
    assert sorted(folder.iterdir()) == before
    return message


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("lenett:tiny", "no model named 'lenett:tiny' in the zoo. Did you mean lenet"),
        ("bert-larg", "Did you mean bert-large"),
        ("BERT_Large", "Did you mean bert-large"),
        ("bert-large:tinny", "no model named 'bert-large:tinny' in the zoo. Did you mean bert-large:tiny"),
        ("lenet:small", "Did you mean lenet:tiny"),
        ("qqqqqq", "Known are alexnet, "),
        ("", "no model named ''"),
        ("my_models.py", "my_models.py was given without a function"),
        ("missing.py:small", "There is no file missing.py"),
        ("missing/my_models.py:small", "There is no file missing/my_models.py"),
        ("./my_models.txt:small", "There is no file my_models.txt"),
        ("missing_module:small", "No module named 'missing_module'"),
        ("my_models.missing:small", "'my_models' is not a package"),
        (":small", "Empty module name"),
        ("my_models.py:", "no function ''"),
        ("my_models.py:smal", "no function 'smal'. Did you mean small?"),
        ("my_models.py:xyz", "no function 'xyz'. It must be a function"),
        ("my_models.py:NOT_A_FUNCTION", "no function 'NOT_A_FUNCTION'"),
        ("my_models.py:wrong_return", "returned Linear. It must return (model, batch)"),
        ("my_models.py:wrong_tuple", "returned Tensor first, which is no nn.Module. It must return (model, batch)"),
        ("my_models.py:needing", "missing 1 required positional argument: 'path'"),
        ("my_models.py:without_tensors", "without any tensor"),
    ],
)
def test_a_model_that_is_not_there(run: Run, folder: Path, model: str, told: str) -> None:
    assert told in refuse(run, folder, model)


@pytest.mark.parametrize(
    ("function", "told", "line"),
    [
        ("raising", "failed with NameError: name 'undefined_name' is not defined", "return undefined_name"),
        ("overflowing", 'with error "Overflow when unpacking long long. The error is', "return torch.ones(2**64)"),
        ("quitting", "failed with SystemExit: the data is not there", 'raise SystemExit("the data is not there")'),
        ("stubborn", "this model has one mode", 'raise RuntimeError("this model has one mode")'),
        ("wrong_batch", "could not be captured on this batch", "return self.fc(x).relu()"),
        ("branching", "depends on tensor values", "if x.sum() > 0:"),
    ],
)
def test_a_users_error_is_told_with_its_line(run: Run, folder: Path, function: str, told: str, line: str) -> None:
    message = refuse(run, folder, f"my_models.py:{function}")
    assert told in message
    assert message.rstrip().endswith(f"at {folder / 'my_models.py'}:{line_of(line)}: {line}")


def test_the_users_line_is_told_whatever_their_folder_is_called(run: Run, folder: Path) -> None:
    place = folder / "conjoin" / "models.py"
    place.parent.mkdir()
    place.write_text("def make():\n    return 1 / 0\n")
    assert f"at {place}:2: return 1 / 0" in refuse(run, folder, "conjoin/models.py:make")


@pytest.mark.parametrize(
    ("content", "told", "line"),
    [
        ("def make(:\n", "SyntaxError", 1),
        ("x = 1\n  y = 2\n", "IndentationError", 2),
        ("import torch\nimport missing_thing\n", "No module named 'missing_thing'", 2),
        ("x = 1\n\n1 / 0\n", "ZeroDivisionError", 3),
        ("import sys\nsys.exit(0)\n", "SystemExit", 2),
    ],
)
def test_a_file_that_cannot_be_loaded(run: Run, folder: Path, content: str, told: str, line: int) -> None:
    (folder / "broken.py").write_text(content)
    message = refuse(run, folder, "broken.py:make")
    assert "Loading broken.py failed with" in message and told in message
    assert f"{folder / 'broken.py'}:{line}: {content.splitlines()[line - 1].strip()}" in message
    assert "broken" not in sys.modules


def test_a_file_that_is_no_python(run: Run, folder: Path) -> None:
    (folder / "notes.txt").write_text("hello")
    assert "notes.txt is not a Python file" in refuse(run, folder, "./notes.txt:make")
    (folder / "binary.py").write_bytes(b"\x00\xff\x00")
    assert "Loading binary.py failed with" in refuse(run, folder, "binary.py:make")


CHATTY = """\
import torch
print("imported")

class Chatty(torch.nn.Linear):
    def forward(self, x):
        print("forward")
        return super().forward(x)

def make():
    print("built")
    return Chatty(4, 4), (torch.zeros(2, 4), torch.zeros(2, 4)), torch.nn.functional.mse_loss
"""


def test_what_a_model_prints_is_kept_apart_from_the_answer(run: Run, folder: Path) -> None:
    (folder / "chatty.py").write_text(CHATTY)
    made = ("plan", "chatty.py:make", "--machine", "local:2", "--strategy", "fsdp", "-o", "p.json", "--json")
    again = ("verify", "p.json", "chatty.py:make", "--steps", "1", "--json")
    for arguments, words in ((made, ("imported", "built", "forward")), (again, ("built", "forward"))):
        shown = run(*arguments)
        assert shown.code == 0 and json.loads(shown.out)
        assert all(word in shown.err for word in words), "a file is imported once in a process"


@pytest.mark.parametrize("batch", [2**63 - 1, 2**63, 10**40])
def test_a_batch_that_no_tensor_can_hold(run: Run, folder: Path, batch: int) -> None:
    message = refuse(run, folder, "bert-large:tiny", "--batch", str(batch))
    assert f"bert-large:tiny was asked for with --batch {batch}. Such a batch could not be made: " in message


def test_a_batch_size_nobody_asked_for(run: Run, folder: Path) -> None:
    message = refuse(run, folder, "my_models.py:fixed", "--batch", "3")
    assert "A batch of 3 was asked for, but my_models.py:fixed takes no batch_size" in message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "its 'format' is not 'conjoin.graph'"),
        (b'{"format": "conjoin.graph", "version": 99}', "format version 99, this program reads version 2"),
        (b'{"format": "conjoin.graph", "version": 2}', "or no lines of text"),
    ],
    ids=range(7),
)
def test_a_graph_file_that_is_damaged(run: Run, folder: Path, content: bytes, told: str) -> None:
    (folder / "bad.json").write_bytes(content)
    assert told in refuse(run, folder, "bad.json")


def test_a_graph_file_that_is_not_there_or_too_large(run: Run, folder: Path) -> None:
    assert "No such file" in refuse(run, folder, "missing.json")
    with (folder / "large.json").open("wb") as file:
        file.truncate(2**40)
    assert "holds 1,099,511,627,776 bytes" in refuse(run, folder, "large.json")
    (folder / "folder.json").mkdir()
    assert "it is not a file" in refuse(run, folder, "folder.json")


def test_a_graph_file_that_is_not_well_formed(run: Run, folder: Path) -> None:
    data = graph_to_json(conjoin.parse_graph(GOLDEN))
    data["graph"] = [line.replace("%0: f32[4,3]", "%0: f32[7,7]") for line in data["graph"]]
    (folder / "wrong.json").write_text(json.dumps(data))
    message = refuse(run, folder, "wrong.json")
    assert "%0 linear at mlp.py:12 (fc): gives f32[4,3], the graph states f32[7,7]" in message


def test_options_that_a_saved_graph_cannot_take(run: Run, folder: Path) -> None:
    conjoin.save_graph(conjoin.parse_graph(GOLDEN), folder / "saved.json")
    assert "--batch 3 was given for the saved graph" in refuse(run, folder, "saved.json", "--batch", "3")
    assert "--eval was given for the saved graph" in refuse(run, folder, "saved.json", "--eval")
    assert run("inspect", "saved.json", "--train").code == 0


@pytest.mark.parametrize("target", ["missing/graph.json", ".", "my_models.py/graph.json"])
def test_an_output_that_cannot_be_written(run: Run, folder: Path, target: str) -> None:
    assert "could not be written" in run("inspect", "my_models.py:small", "-o", target).refused()
    assert [path.name for path in folder.iterdir()] == ["my_models.py"]


def test_a_failing_command_leaves_an_older_graph_alone(run: Run, folder: Path) -> None:
    (folder / "graph.json").write_text("older")
    run("inspect", "my_models.py:wrong_batch", "-o", "graph.json").refused()
    assert (folder / "graph.json").read_text() == "older"
