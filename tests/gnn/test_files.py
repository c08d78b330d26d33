"""Graphs are read from files as people have them, and a file that is damaged or hostile is refused."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np
import pytest

from conjoin.errors import GraphError
from conjoin.gnn import GraphData, from_edges, load_graph, save_graph

SOURCES, TARGETS = np.array([2, 0, 3, 3]), np.array([0, 1, 0, 3])
GRAPH, TURNED = from_edges(5, SOURCES, TARGETS), from_edges(5, TARGETS, SOURCES)


def same(data: GraphData, num_vertices: int = 5) -> bool:
    indptr = np.r_[GRAPH.indptr[:num_vertices], GRAPH.num_edges]
    return np.array_equal(data.adjacency.indptr, indptr) and np.array_equal(data.adjacency.indices, GRAPH.indices)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    weighted = from_edges(5, SOURCES, TARGETS, np.array([0.5, 1.0, 2.0, 4.0]))
    data = GraphData(weighted, np.ones((5, 2), np.float32), np.arange(5), {"train": np.array([0, 4])})
    save_graph(tmp_path / "graph.npz", data)
    found = load_graph(tmp_path / "graph.npz")
    assert same(found) and np.array_equal(found.adjacency.weights, weighted.weights)
    assert found.features.dtype == np.float32 and np.array_equal(found.labels, np.arange(5))
    assert found.splits["train"].tolist() == [0, 4]


@pytest.mark.parametrize(
    "arrays",
    [
        {"row": TARGETS, "col": SOURCES, "data": np.ones(4), "shape": np.array([5, 5]), "format": np.array(b"coo")},
        {"edge_index": np.stack([SOURCES, TARGETS]), "num_nodes_list": np.array([5])},
        {"adj_indptr": GRAPH.indptr.astype(np.int32), "adj_indices": GRAPH.indices, "adj_shape": np.array([5, 5])},
        {"indptr": GRAPH.indptr, "indices": GRAPH.indices, "x": np.ones((5, 3)), "y": np.zeros(5)},
        {"indptr": TURNED.indptr, "indices": TURNED.indices, "format": np.array(b"csc"), "shape": np.array([5, 5])},
    ],
    ids=["coo", "ogb", "adj", "csr", "csc"],
)
def test_archives_of_others_are_read(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez_compressed(tmp_path / "graph.npz", **arrays)
    assert same(load_graph(tmp_path / "graph.npz"))


def test_splits_may_be_masks_and_labels_stay_what_they_are(tmp_path: Path) -> None:
    mask, labels = np.array([True, False, False, True, True]), np.array([np.inf, 1, np.nan, 2, 3])
    arrays = {"edge_index": np.stack([SOURCES, TARGETS]), "num_nodes": np.array(5), "split_train": mask, "y": labels}
    np.savez(tmp_path / "graph.npz", **arrays)
    data = load_graph(tmp_path / "graph.npz")
    assert data.splits["train"].tolist() == [0, 3, 4]
    np.testing.assert_array_equal(data.labels, labels)  # no whole number stands for what is infinite


EDGES = np.array([[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"edge_index": EDGES, "num_nodes_list": np.array([2, 2])}, "holds 2 graphs"),
        ({"edge_index": EDGES.astype(complex)}, "an array of complex128"),
        ({"edge_index": EDGES.astype(str)}, "real numbers"),
        ({"edge_index": EDGES, "x": np.array(["a", "b"])}, "real numbers"),
        ({"edge_index": EDGES, "x": np.array(1.0)}, "no rows of features"),
        ({"row": EDGES, "col": EDGES}, "in one dim"),
        ({"indptr": np.array(1), "indices": np.array([0])}, "in one dim"),
    ],
)
def test_arrays_that_are_no_graph_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "graph.npz", **arrays)
    with pytest.raises(GraphError, match=words):
        load_graph(tmp_path / "graph.npz")


def test_a_damaged_header_and_damaged_bytes_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "graph.npz", "w") as archive:
        archive.writestr("indptr.npy", b"\x93NUMPY\x01\x00\x10\x00{'descr': [[[[[[")
    packed = bytearray(gzip.compress(bytes(range(256)) * 4))
    packed[10:30] = b"\xff" * 20
    (tmp_path / "edges.gz").write_bytes(packed)
    for name in ("graph.npz", "edges.gz"):
        with pytest.raises(GraphError, match=r"cannot be read|not a table"):
            load_graph(tmp_path / name)


@pytest.mark.parametrize("separator", [" ", "\t", ",", ", "])
@pytest.mark.parametrize("name", ["edges.txt", "edges.csv.gz"])
def test_lists_of_edges_are_read(tmp_path: Path, name: str, separator: str) -> None:
    lines = ["# source target", "% more", "", *(f"{s}{separator}{t}" for s, t in zip(SOURCES, TARGETS, strict=True))]
    opened = gzip.open if name.endswith("gz") else open
    with opened(tmp_path / name, "wt") as file:
        file.write("\n".join(lines))
    assert same(load_graph(tmp_path / name), num_vertices=4)
    assert same(load_graph(tmp_path / name, num_vertices=5))


def test_weights_stand_in_a_third_column(tmp_path: Path) -> None:
    (tmp_path / "edges.txt").write_text("0 1 0.5\n1 0 2\n")
    assert load_graph(tmp_path / "edges.txt").adjacency.weights.tolist() == [2.0, 0.5]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.write(text)


@pytest.mark.parametrize("inside", ["", "raw"])
def test_folders_of_ogb_are_read(tmp_path: Path, inside: str) -> None:
    raw = tmp_path / inside
    write(raw / "edge.csv.gz", "2,0\n0,1\n3,0\n3,3\n")
    write(raw / "num-node-list.csv.gz", "5\n")
    write(raw / "node-feat.csv.gz", "".join(f"{i},0.5\n" for i in range(5)))
    write(raw / "node-label.csv.gz", "0\n1\n2\n3\n4\n")
    write(tmp_path / "split" / "time" / "train.csv.gz", "4\n1\n")
    found = load_graph(tmp_path)
    assert same(found) and found.features.shape == (5, 2) and found.labels.tolist() == [0, 1, 2, 3, 4]
    assert {name: v.tolist() for name, v in found.splits.items()} == {"train": [4, 1]}


def test_folders_of_ogb_in_archives_are_read(tmp_path: Path) -> None:
    edges = {"edge_index": np.stack([SOURCES, TARGETS]), "num_nodes_list": np.array([5]), "node_feat": np.ones((5, 2))}
    (tmp_path / "raw").mkdir()
    np.savez(tmp_path / "raw" / "data.npz", **edges)
    np.savez(tmp_path / "raw" / "node-label.npz", node_label=np.array([[0.0], [np.nan], [2.0], [1.0], [1.0]]))
    found = load_graph(tmp_path)
    assert same(found) and found.labels.tolist() == [0, -1, 2, 1, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no line with an edge"),
        ("0 1\n1\n", "not a table of numbers"),
        ("zero one\n", "not a table of numbers"),
        ("0 1 2 3\n", "4 numbers"),
        ("0 1.5\n", "1.5 stands for a vertex"),
        ("0 nan\n", "nan stands for a vertex"),
        ("0 -1\n", "names vertex -1"),
        ("0 1 nan\n", "weight nan"),
        ("0 99999999999\n", "with 100000000000 vertices"),
        ("\x00\xff\x80", "not a table of numbers"),
    ],
)
def test_bad_lists_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "edges.txt").write_text(text, encoding="latin-1")
    with pytest.raises(GraphError) as told:
        load_graph(tmp_path / "edges.txt")
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"row": TARGETS, "col": SOURCES, "shape": np.array([2, 2])}, "names vertex 3"),
        ({"indptr": GRAPH.indptr, "indices": np.array([3, 2, 0, 3])}, "not sorted"),
        ({"indptr": np.array([0]), "indices": np.array([], np.int64)}, "with 0 vertices"),
        ({"row": np.array([], np.int64), "col": np.array([], np.int64)}, "with 0 vertices"),
        ({"indptr": np.array([0, 1]), "indices": np.array([2**40])}, "names vertex 1099511627776"),
        ({"picture": np.zeros(3)}, "None of these are edges"),
        ({"indptr": GRAPH.indptr, "indices": GRAPH.indices, "x": np.ones((4, 2))}, "4 rows of features"),
        ({"indptr": GRAPH.indptr, "indices": GRAPH.indices, "split_test": np.array([5])}, "split test names vertex 5"),
        ({"row": np.array([{}], object), "col": SOURCES}, "never unpickled"),
    ],
)
def test_bad_archives_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "graph.npz", **arrays)
    with pytest.raises(GraphError) as told:
        load_graph(tmp_path / "graph.npz")
    assert words in str(told.value)


def test_what_unpacks_to_too_much_is_not_unpacked(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "graph.npz", indptr=np.zeros(10**6, np.int64), indices=np.zeros(0, np.int64))
    assert (tmp_path / "graph.npz").stat().st_size < 20_000
    with gzip.open(tmp_path / "edges.gz", "wt") as file:
        file.write("0 0\n" * 100_000)
    for name in ("graph.npz", "edges.gz"):
        with pytest.raises(GraphError, match="larger max_bytes"):
            load_graph(tmp_path / name, max_bytes=100_000)


def test_what_is_not_there_or_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="no such file"):
        load_graph(tmp_path / "none.npz")
    with pytest.raises(GraphError, match=r"neither data\.npz nor edge"):
        load_graph(tmp_path)
    save_graph(tmp_path / "graph.npz", GraphData(GRAPH))
    whole = (tmp_path / "graph.npz").read_bytes()
    (tmp_path / "graph.npz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(GraphError, match="cannot be read"):
        load_graph(tmp_path / "graph.npz")
    write(tmp_path / "edges.gz", "0 1\n" * 1000)
    packed = (tmp_path / "edges.gz").read_bytes()
    (tmp_path / "edges.gz").write_bytes(packed[:-9])
    with pytest.raises(GraphError, match="not a table"):
        load_graph(tmp_path / "edges.gz")
