"""The file of a graph: its version, the text in it, and the fingerprint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conjoin.errors import GraphError
from conjoin.ir import Graph, fingerprint, limits, load_graph, parse_graph, save_graph
from conjoin.ir.graph_file import graph_from_json, graph_to_json
from tests.ir.graphs import GOLDEN
from tests.ir.wording import assert_three_sentences

REPOSITORY = Path(__file__).parents[2]
FINGERPRINT = "8ba766e0876c64065e02d5c4c3ed22a3a5eb6ed49688ea628e7e76cbd80d3f32"
"""Of the golden graph. When it changes, plans made for older graphs no longer match: raise VERSION then."""


@pytest.fixture
def graph() -> Graph:
    return parse_graph(GOLDEN)


def refuse(action: Callable[[], object]) -> str:
    with pytest.raises(GraphError) as told:
        action()
    assert_three_sentences(told.value)
    return str(told.value)


def test_the_file_names_itself_and_holds_the_text(graph: Graph) -> None:
    assert graph_to_json(graph) == {"format": "conjoin.graph", "version": 2, "graph": str(graph).splitlines()}


@pytest.mark.parametrize("version", [0, 1, 3, "2", 2.0, True, None, [], pytest.param(10**6000, id="huge")])
def test_another_version_is_refused(graph: Graph, version: Any) -> None:
    assert "format version" in refuse(lambda: graph_from_json({**graph_to_json(graph), "version": version}))


@pytest.mark.parametrize("data", [None, 3, "graph", [], {}, {"format": "conjoin.plan", "version": 1}, {"format": []}])
def test_another_format_is_refused(data: Any) -> None:
    assert "'conjoin.graph'" in refuse(lambda: graph_from_json(data))


@pytest.mark.parametrize(
    "change",
    [{"colour": "red"}, {"graph": None}, {"graph": "text"}, {"graph": ["graph", 3]}, {"operators": 3}, {"graph": [[]]}],
    ids=str,
)
def test_wrong_data_is_told(graph: Graph, change: dict[str, Any]) -> None:
    message = refuse(lambda: graph_from_json({**graph_to_json(graph), **change}))
    assert message.startswith("The graph data is malformed: ")


def test_a_wrong_line_is_told(graph: Graph) -> None:
    data = graph_to_json(graph)
    data["graph"][1] = "input:x f33[2]"
    assert "Line 2 of the graph cannot be read" in refuse(lambda: graph_from_json(data))


def test_too_many_nodes_are_refused(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ITEMS", 10)
    assert "limit is 10" in refuse(lambda: graph_from_json(graph_to_json(graph)))


def test_the_fingerprint_of_the_golden_graph(graph: Graph) -> None:
    assert fingerprint(graph) == FINGERPRINT


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
    text = json.dumps(graph_to_json(graph))
    for length in range(1, len(text), 97):
        (tmp_path / "g.json").write_text(text[:length])
        assert "is not JSON" in refuse(lambda: load_graph(tmp_path / "g.json"))


def test_too_large_a_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "g.json").open("wb") as file:
        file.truncate(limits.MAX_BYTES + 1)
    assert "268,435,457 bytes, the limit is 268,435,456" in refuse(lambda: load_graph(tmp_path / "g.json"))
