"""The JSON form: its versions and keys, its fingerprint, and the file it is kept in."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conjoin.errors import GraphError
from conjoin.ir import Graph, fingerprint, from_json, limits, load_graph, parse_graph, save_graph, to_json
from tests.ir.graphs import GOLDEN
from tests.ir.wording import assert_three_sentences

REPOSITORY = Path(__file__).parents[2]
FINGERPRINT = "019b04b52eda8b2d54d4dd5dd0218c6ca2e59295560e8bfa7081895b182aab7c"
"""Of the golden graph. When it changes, plans made for older graphs no longer match: raise VERSION then."""


@pytest.fixture
def graph() -> Graph:
    return parse_graph(GOLDEN)


def refuse(action: Callable[[], object]) -> str:
    with pytest.raises(GraphError) as told:
        action()
    assert_three_sentences(told.value)
    return str(told.value)


def test_the_form_names_itself_and_its_version(graph: Graph) -> None:
    data = to_json(graph)
    assert (data["format"], data["version"]) == ("conjoin.graph", 1)
    assert data["nodes"][0] == {
        "op": "linear",
        "args": {
            "input": {"leaf": "input:x"},
            "weight": {"leaf": "param:fc.weight"},
            "bias": {"leaf": "param:fc.bias"},
        },
        "types": ["f32[4,3]"],
    }
    assert data["leaves"][2] == {
        "kind": "param", "name": "fc.weight", "type": "f32[3,8]", "trainable": True, "aliases": ["head.weight"],
    }  # fmt: skip
    assert data["sources"][:2] == [["mlp.py", 12, "fc"], None]


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None, [], pytest.param(10**6000, id="huge")])
def test_another_version_is_refused(graph: Graph, version: Any) -> None:
    assert "format version" in refuse(lambda: from_json({**to_json(graph), "version": version}))


@pytest.mark.parametrize("data", [None, 3, "graph", [], {}, {"format": "conjoin.plan", "version": 1}, {"format": []}])
def test_another_format_is_refused(data: Any) -> None:
    assert "'conjoin.graph'" in refuse(lambda: from_json(data))


KEYS = (
    "name", "training", "leaves", "nodes", "inputs", "outputs", "updates", "loss", "input_structure",
    "output_structure", "sources",
)  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_missing_key_is_told(graph: Graph, key: str) -> None:
    data = to_json(graph)
    del data[key]
    assert f"'{key}' is missing" in refuse(lambda: from_json(data))


def test_an_unknown_key_is_told(graph: Graph) -> None:
    assert set(to_json(graph)) == {"format", "version", *KEYS}
    assert "'colour' is unknown" in refuse(lambda: from_json({**to_json(graph), "colour": "red"}))


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("name",), 3, "name is '3', not of type str"),
        (("training",), 1, "training is '1', not of type bool"),
        (("leaves",), {}, "leaves is '{}', not of type list"),
        (("nodes",), "", "nodes is '', not of type list"),
        (("sources",), {}, "sources is '{}', not of type list"),
        (("sources",), [None], "there are 9 nodes and 1 sources"),
        (("sources", 0), ["a.py", True, ""], "is not a source"),
        (("sources", 0), ["a.py", -1, ""], "-1 is not a number"),
        (("loss",), True, "loss is 'True', not of type int"),
        (("loss",), -1, "-1 is not a number"),
        (("loss",), 0.0, "loss is '0.0', not of type int"),
        (("inputs",), [[1]], "something other than values"),
        (("inputs",), [{"value": 0}], "value 0 is used before it is made"),
        (("outputs",), [{"value": 10}], "value 10 is used before it is made"),
        (("outputs",), [{"value": -1}], "value -1 is used before it is made"),
        (("outputs",), [{"value": True}], "is not a literal"),
        (("outputs",), [{"leaf": "input:x", "more": 1}], "is not a literal"),
        (("outputs",), [2**63], "is not a literal"),
        pytest.param(("outputs",), [10**6000], "integer string conversion", id="huge"),
        (("outputs",), [{"word": "f32"}], "something other than values"),
        (("updates",), [["running mean", 3]], "is not an update"),
        (("updates",), [["running mean"]], "is not an update"),
        (("updates",), [[3, {"value": 0}]], "is not an update"),
        (("input_structure",), [], "is not a structure"),
        (("leaves", 0), None, "None is not a leaf"),
        (("leaves", 0, "kind"), "weight", "'weight' is not a valid LeafKind"),
        (("leaves", 0, "name"), None, "is not a leaf"),
        (("leaves", 0, "type"), "f32", "is not a tensor type"),
        (("leaves", 0, "colour"), "red", "is not a leaf"),
        (("leaves", 0, "name"), "target", "there are two leaves input:target"),
        (("leaves", 2, "trainable"), 1, "trainable is '1', not of type bool"),
        (("leaves", 2, "aliases"), "head", "aliases is 'head', not of type list"),
        (("leaves", 2, "aliases"), [3], "an alias is '3', not of type str"),
        (("leaves", 5, "data"), None, "data is 'None', not of type str"),
        (("leaves", 5, "data"), "####", "base64"),
        (("leaves", 5, "data"), "AAAA", "takes 4 bytes"),
        (("nodes", 0), [], "is not a node"),
        (("nodes", 0, "op"), "lineer", "has no operator 'lineer'"),
        (("nodes", 0, "op"), "", "is not an operator"),
        (("nodes", 0, "args"), [], "is not a node"),
        (("nodes", 0, "args", "colour"), 1, "linear does not take colour"),
        (("nodes", 0, "args", "weight"), "w", "linear cannot take this for 'weight'"),
        (("nodes", 1, "args", "p"), {"value": 0}, "dropout cannot take this for 'p'"),
        (("nodes", 1, "args", "p"), {"word": "f33"}, "'f33' is not a dtype"),
        (("nodes", 1, "args", "p"), [[[[[[[[[1]]]]]]]]], "lists are nested too deeply"),
        (("nodes", 0, "types"), [3], "a type is '3', not of type str"),
        (("nodes", 0, "colour"), "red", "is not a node"),
        (("nodes", 0, "pinned"), 1, "pinned is '1', not of type bool"),
        (("nodes", 0, "occurrence"), True, "occurrence is 'True', not of type int"),
        (("nodes", 0, "occurrence"), -1, "-1 is not a number"),
        (("nodes", 2, "occurrence"), 0, "the same call stands above"),
    ],
)
def test_wrong_data_is_told(graph: Graph, path: tuple[Any, ...], value: Any, reason: str) -> None:
    data = copy.deepcopy(to_json(graph))
    place = data
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    message = refuse(lambda: from_json(data))
    assert message.startswith("The graph data is malformed: ") and reason in message


def test_too_many_nodes_are_refused(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ITEMS", 10)
    assert "limit is 10" in refuse(lambda: from_json(to_json(graph)))


def test_the_fingerprint_of_the_golden_graph(graph: Graph) -> None:
    assert fingerprint(graph) == FINGERPRINT


def test_the_fingerprint_is_the_same_in_another_process(graph: Graph) -> None:
    program = "import sys; from conjoin.ir import *; print(fingerprint(parse_graph(sys.stdin.read())))"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(REPOSITORY)}
    ran = subprocess.run(
        [sys.executable, "-c", program], input=GOLDEN, env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == fingerprint(graph)


def test_the_fingerprint_is_blind_to_sources_and_the_name(graph: Graph) -> None:
    assert fingerprint(replace(graph, name="other", sources=())) == fingerprint(graph)


CHANGES = {
    "operator": ("mul.Tensor(", "div.Tensor("),
    "attribute": ("p=0.5, train=true)\n", "p=0.25, train=true)\n"),
    "type of an attribute": ("alpha=2", "alpha=2.0"),
    "a default": (", alpha=2", ""),
    "order of operands": ("cat([%6, %5]", "cat([%5, %6]"),
    "dtype": ("%4: f32[3]", "%4: f64[3]"),
    "shape": ("%4: f32[3]", "%4: f32[1,3]"),
    "layout": ("%4: f32[3]", "%4: f32[3]{x:P}"),
    "leaf type": ("input:x f32[4,8]", "input:x f16[4,8]"),
    "leaf name": ("fc.bias", "fc.shift"),
    "alias": ("head.weight", "tail.weight"),
    "trainable": ("param:fc.bias f32[3]", "param:fc.bias f32[3] trainable"),
    "constant": ("AACAPw==", "AACAvw=="),
    "occurrence": ("#1", "#2"),
    "pin": (" pinned", ""),
    "plain input": ("[input:x, 2,", "[input:x, 3,"),
    "plain output": ('none, "done"]', 'none, "gone"]'),
    "update": ('mean" = %4', 'mean" = %9'),
    "training": ("train\n", "eval\n"),
    "loss": ("loss 0", "loss 1"),
    "structure": ('["loss","aux","note"]', '["loss","aux","text"]'),
    "kind of structure": ('{"kind":"tuple"', '{"kind":"list"'),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fingerprint_sees_every_change(graph: Graph, change: str) -> None:
    old, new = CHANGES[change]
    assert old in GOLDEN
    other = parse_graph(GOLDEN.replace(old, new))
    assert fingerprint(other) != fingerprint(graph) and other != graph


def test_a_file_gives_the_graph_back(graph: Graph, tmp_path: Path) -> None:
    save_graph(graph, tmp_path / "g.json")
    assert load_graph(tmp_path / "g.json") == graph == load_graph(str(tmp_path / "g.json"))
    save_graph(replace(graph, name="other"), str(tmp_path / "g.json"))
    assert load_graph(tmp_path / "g.json").name == "other"
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]


def test_a_saved_graph_may_be_read_by_whom_the_user_lets_read(graph: Graph, tmp_path: Path) -> None:
    save_graph(graph, tmp_path / "g.json")
    (tmp_path / "plain").touch()
    assert (tmp_path / "g.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("step", ["replace", "open"])
def test_a_failing_write_leaves_what_was_there(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException, step: str
) -> None:
    save_graph(graph, tmp_path / "g.json")

    def fail(path: Path, *args: Any, **kwargs: Any) -> Any:
        path.touch()
        raise failure

    with monkeypatch.context() as patched:
        patched.setattr(Path, step, fail)
        expected = GraphError if isinstance(failure, OSError) else KeyboardInterrupt
        with pytest.raises(expected) as told:
            save_graph(replace(graph, name="other"), tmp_path / "g.json")
    if isinstance(failure, OSError):
        assert str(failure.strerror) in str(told.value)
        assert_three_sentences(told.value)
    assert load_graph(tmp_path / "g.json") == graph
    assert [path.name for path in tmp_path.iterdir()] == ["g.json"]


@pytest.mark.parametrize("path", ["missing/g.json", "file/g.json", ".", "folder", "\0.json", "n" * 300])
def test_a_path_that_cannot_be_written_is_told(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    assert "could not be written" in refuse(lambda: save_graph(graph, path))
    assert sorted(found.name for found in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    assert "No such file" in refuse(lambda: load_graph(tmp_path / "missing.json"))
    assert "it is not a file" in refuse(lambda: load_graph(tmp_path))
    assert "null byte" in refuse(lambda: load_graph("\0.json"))
    os.mkfifo(tmp_path / "pipe.json")
    assert "it is not a file" in refuse(lambda: load_graph(tmp_path / "pipe.json"))
    assert "it is not a file" in refuse(lambda: load_graph("/dev/zero"))


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\x00", b"\x80abc", b"[" * 200_000, b'{"a":' * 50_000, b"9" * 10_000, b"{", b"\xef\xbb\xbf{"],
    ids=("empty", "utf-16", "binary", "lists", "objects", "digits", "half", "mark"),
)
def test_a_file_that_is_not_json_is_told(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "g.json").write_bytes(content)
    assert "is not JSON" in refuse(lambda: load_graph(tmp_path / "g.json"))


def test_a_truncated_file_is_told(graph: Graph, tmp_path: Path) -> None:
    text = json.dumps(to_json(graph))
    for length in range(1, len(text), 97):
        (tmp_path / "g.json").write_text(text[:length])
        assert "is not JSON" in refuse(lambda: load_graph(tmp_path / "g.json"))


def test_too_large_a_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "g.json").open("wb") as file:
        file.truncate(limits.MAX_BYTES + 1)
    assert "268,435,457 bytes, the limit is 268,435,456" in refuse(lambda: load_graph(tmp_path / "g.json"))
