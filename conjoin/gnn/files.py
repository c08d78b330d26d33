"""Graphs from files as people have them: `.npz`, lists of edges (text, gz), and OGB's folders. Nothing is unpickled.

An `.npz` holds one of: `indptr` and `indices` (scipy's CSR, `data` are weights); `row` and `col` (scipy's COO, as DGL's
Reddit); `edge_index` (OGB's raw form); each also with the prefix `adj_`. A row of a scipy matrix is a target, also
where columns are stored (CSC). Features, labels and splits, which are vertices or masks, are taken where they are.
"""

from __future__ import annotations

import gzip
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tokenize import TokenError
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from conjoin.errors import GraphError
from conjoin.gnn.adjacency import Adjacency, Ints, from_edges, narrow, transposed

MAX_BYTES = 64 << 30
"""What a file may unpack to, unless more is allowed: a compressed file of a megabyte can hold a terabyte of zeros."""
LINES = 1 << 20
"""Lines of text that are read at a time."""

_DAMAGED = ValueError, EOFError, OSError, MemoryError, zlib.error

FEATURES = ("features", "feat", "feature", "x", "node_feat", "attr_matrix")
LABELS = ("labels", "label", "y", "node_label")


@dataclass(frozen=True, slots=True, eq=False)
class GraphData:
    """A graph, and what is known of its vertices."""

    adjacency: Adjacency
    features: NDArray[np.floating] | None = None
    labels: NDArray[np.generic] | None = None
    splits: Mapping[str, Ints] = field(default_factory=dict)
    """Vertices of `train`, `valid`, `test`, where the files say."""

    def __post_init__(self) -> None:
        rows = self.adjacency.num_vertices
        for name, values in (("features", self.features), ("labels", self.labels)):
            if values is not None and values.shape[:1] != (rows,):
                found = values.shape[0] if values.ndim else "no"
                raise GraphError(
                    f"A graph of {rows} vertices was asked for with {found} rows of {name}. Each vertex has one. "
                    "Give files that belong together."
                )
        for name, vertices in self.splits.items():
            if len(vertices) and not (vertices.min() >= 0 and vertices.max() < rows):
                raise GraphError(
                    f"A graph of {rows} vertices was asked for whose split {name} names vertex {vertices.max()}. "
                    f"Vertices are 0 to {rows - 1}. Give files that belong together."
                )


def load_graph(path: str | Path, num_vertices: int | None = None, max_bytes: int = MAX_BYTES) -> GraphData:
    """Read a graph from an `.npz`, a list of edges (`source target [weight]` a line, `.gz` or not) or an OGB folder.

    `num_vertices` is for lists of edges, which do not say how many vertices no edge touches.
    """
    path = Path(path)
    if not path.exists():
        raise GraphError(f"A graph was asked for from {path}. There is no such file. Check the path.")
    try:
        return _load(path, num_vertices, max_bytes)
    except MemoryError as error:
        raise GraphError(
            f"A graph was asked for from {path}. It does not fit in this computer's memory: {error}. Number vertices "
            "from 0 on without gaps, or use a larger computer."
        ) from error


def _load(path: Path, num_vertices: int | None, max_bytes: int) -> GraphData:
    if path.is_dir():
        return _load_folder(path, max_bytes)
    if path.suffix == ".npz":
        return _from_arrays(_arrays(path, max_bytes), path)
    edges = _table(path, max_bytes)
    return GraphData(_from_table(edges, num_vertices, path))


def save_graph(path: str | Path, data: GraphData) -> None:
    """Write a graph to an `.npz` that `load_graph` reads."""
    arrays: dict[str, NDArray[np.generic]] = {"indptr": data.adjacency.indptr, "indices": data.adjacency.indices}
    named = {"data": data.adjacency.weights, "features": data.features, "labels": data.labels}
    arrays |= {name: values for name, values in named.items() if values is not None}
    arrays |= {f"split_{name}": vertices for name, vertices in data.splits.items()}
    with Path(path).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)


def _load_folder(path: Path, max_bytes: int) -> GraphData:
    raw = path / "raw" if (path / "raw").is_dir() else path
    packed = [raw / name for name in ("data.npz", "node-label.npz") if (raw / name).exists()]
    if packed:
        arrays = {name: values for file in packed for name, values in _arrays(file, max_bytes).items()}
        data = _from_arrays(arrays, raw)
    else:
        data = _load_tables(raw, max_bytes)
    found = {}
    for name in ("train", "valid", "test"):
        for file in sorted((raw.parent if raw.name == "raw" else raw).glob(f"split/*/{name}.csv*")):
            found[name] = _integers(_table(file, max_bytes)[:, 0], file)
    return replace(data, splits=found) if found else data


def _load_tables(raw: Path, max_bytes: int) -> GraphData:
    """OGB's tables: edges, how many vertices each graph has, features, labels."""
    edges, counts = _beside(raw, "edge.csv"), _beside(raw, "num-node-list.csv")
    if edges is None or counts is None:
        raise GraphError(
            f"A graph was asked for from the folder {raw}. It has neither data.npz nor edge.csv.gz with "
            "num-node-list.csv.gz. Give the folder that OGB unpacked, or the one named raw in it."
        )
    nodes = _one_graph(_integers(_table(counts, max_bytes).ravel(), counts), counts)
    weights = _beside(raw, "edge-weight.csv")
    table = _table(edges, max_bytes)
    if weights is not None:
        table = np.column_stack([table[:, :2], _table(weights, max_bytes)[:, :1]])
    features, labels = _beside(raw, "node-feat.csv"), _beside(raw, "node-label.csv")
    return GraphData(
        _from_table(table, nodes, edges),
        None if features is None else _table(features, max_bytes).astype(np.float32),
        None if labels is None else _labels(_table(labels, max_bytes)),
    )


def _beside(folder: Path, name: str) -> Path | None:
    return next((file for file in (folder / f"{name}.gz", folder / name) if file.exists()), None)


def _arrays(path: Path, max_bytes: int) -> dict[str, NDArray[np.generic]]:
    """The arrays of an `.npz`, whose sizes are looked at before anything is unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            _check_bytes(path, sum(item.file_size for item in archive.infolist()), max_bytes)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (*_DAMAGED, zipfile.BadZipFile, TokenError, SyntaxError) as error:
        raise GraphError(
            f"A graph was asked for from {path}. It cannot be read as arrays of numbers: {error}. "
            "Write it again with numpy.savez; objects are never unpickled."
        ) from error


def _from_arrays(arrays: Mapping[str, NDArray[np.generic]], path: Path) -> GraphData:
    known = {name.removeprefix("adj_"): values for name, values in arrays.items()}
    stored = next((known[name] for name in ("weights", "data", "edge_weight") if name in known), None)
    weights, count = _floats(stored, path), _num_vertices(known, path)
    if {"indptr", "indices"} <= set(known):
        indices = _vertices(known["indices"], path)
        indptr = _vertices(known["indptr"], path)
        adjacency = Adjacency(indptr, narrow(indices, indptr.size - 1) if _fits(indices) else indices, weights)
        if "format" in known and known["format"].astype(str) == "csc":  # what is stored are columns
            adjacency = transposed(adjacency)
    elif {"row", "col"} <= set(known):
        adjacency = from_edges(count, _vertices(known["col"], path), _vertices(known["row"], path), weights)
    elif "edge_index" in known and known["edge_index"].ndim == 2 and len(known["edge_index"]) == 2:
        sources, targets = _vertices(known["edge_index"], path)
        adjacency = from_edges(count, sources, targets, weights)
    else:
        raise GraphError(
            f"A graph was asked for from {path}, which holds {', '.join(sorted(arrays)) or 'nothing'}. None of these "
            "are edges. Name them indptr and indices, or row and col, or edge_index of two rows."
        )
    features = next((known[name] for name in FEATURES if name in known), None)
    labels = next((known[name] for name in LABELS if name in known), None)
    splits = {name.removeprefix("split_"): _members(v, path) for name, v in known.items() if name.startswith("split_")}
    return GraphData(adjacency, _floats(features, path), None if labels is None else _labels(labels), splits)


def _num_vertices(known: Mapping[str, NDArray[np.generic]], path: Path) -> int:
    """How many vertices an archive says there are, or else what its edges name."""
    for name in ("num_nodes_list", "num_nodes", "num_vertices"):
        if name in known:
            return _one_graph(_vertices(known[name].ravel(), path), path)
    if "shape" in known:
        return int(_vertices(known["shape"].ravel(), path).max(initial=0))
    named = [known[name] for name in ("row", "col", "edge_index") if name in known and known[name].size]
    return max((int(_vertices(vertices, path).max()) + 1 for vertices in named), default=0)


def _one_graph(counts: Ints, path: Path) -> int:
    """How many vertices there are: edges of several graphs are numbered anew in each, and would be taken for one's."""
    if len(counts) != 1 or counts[0] < 0:
        raise GraphError(
            f"A graph was asked for from {path}, which says it holds {len(counts)} graphs of {counts[:4].tolist()} "
            "vertices. There must be one, of a number of vertices. Put several together, each numbered after the one "
            "before, or give one of them."
        )
    return int(counts[0])


def _fits(indices: Ints) -> bool:
    return not indices.size or -(2**31) <= int(indices.min()) <= int(indices.max()) < 2**31


def _from_table(table: NDArray[np.float64], num_vertices: int | None, path: Path) -> Adjacency:
    if not len(table) and num_vertices is None:
        raise GraphError(
            f"A graph was asked for from {path}, which has no line with an edge. Then nothing says how many vertices "
            "there are. Give num_vertices, or another file."
        )
    if len(table) and table.shape[1] not in (2, 3):
        raise GraphError(
            f"A graph was asked for from {path}, whose lines have {table.shape[1]} numbers. An edge is a source, a "
            "target and perhaps a weight. Leave other columns out."
        )
    ends = _integers(table[:, :2] if len(table) else np.empty((0, 2)), path)
    count = int(ends.max(initial=-1)) + 1 if num_vertices is None else num_vertices
    weights = table[:, 2] if len(table) and table.shape[1] == 3 else None
    return from_edges(count, ends[:, 0].copy(), ends[:, 1].copy(), weights)


def _table(path: Path, max_bytes: int) -> NDArray[np.float64]:
    """The numbers of a text, a row a line; lines that begin with # or % say nothing."""
    parts: list[NDArray[np.float64]] = []
    try:
        with _text(path) as file:
            for lines in _chunks(file, path, max_bytes):
                delimiter = "," if "," in lines[0] else None
                parts.append(np.loadtxt(lines, delimiter=delimiter, ndmin=2, comments=None))
        return np.concatenate(parts) if parts else np.empty((0, 2))
    except _DAMAGED as error:
        raise GraphError(
            f"A graph was asked for from {path}. It is not a table of numbers, the same count in each line: {error}. "
            "Give a line for each row, its numbers apart by spaces or commas."
        ) from error


def _text(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def _chunks(file: TextIO, path: Path, max_bytes: int) -> Iterator[list[str]]:
    read, lines = 0, []
    while line := file.readline(1 << 20):
        read += len(line)
        _check_bytes(path, read, max_bytes)
        if line.strip() and line.lstrip()[0] not in "#%":
            lines.append(line)
        if len(lines) == LINES:
            yield lines
            lines = []
    if lines:
        yield lines


def _check_bytes(path: Path, unpacked: int, max_bytes: int) -> None:
    if unpacked > max_bytes:
        raise GraphError(
            f"A graph was asked for from {path}, which unpacks to {unpacked} bytes or more. No more than {max_bytes} "
            "are allowed, so that a damaged file does not fill the memory. Give a larger max_bytes."
        )


def _integers(values: NDArray[np.float64], path: Path) -> Ints:
    whole = np.isfinite(values) & (values == np.rint(values)) & (np.abs(values) < 2**53)
    if not whole.all():
        raise GraphError(
            f"A graph was asked for from {path}, in which {values[~whole][0]} stands for a vertex. Vertices are whole "
            "numbers from 0 on. Correct the file."
        )
    return values.astype(np.int64)


def _vertices(values: NDArray[np.generic], path: Path) -> Ints:
    _check_numbers(values, path)
    if np.issubdtype(values.dtype, np.integer):
        return values.astype(np.int64)
    return _integers(values.astype(np.float64), path)


def _members(values: NDArray[np.generic], path: Path) -> Ints:
    """Vertices as numbers, or as a mask of all of them."""
    return np.flatnonzero(values).astype(np.int64) if values.dtype == np.bool_ else _vertices(values, path)


def _check_numbers(values: NDArray[np.generic], path: Path) -> None:
    if values.dtype.kind not in "biuf":
        raise GraphError(
            f"A graph was asked for from {path}, in which there is an array of {values.dtype}. Edges, weights and "
            "features are real numbers. Write it again with arrays of integers and floats."
        )


def _floats(values: NDArray[np.generic] | None, path: Path) -> NDArray[np.floating] | None:
    if values is None:
        return None
    _check_numbers(values, path)
    return values.astype(np.float64 if values.dtype == np.float64 else np.float32, copy=False)


def _labels(values: NDArray[np.generic]) -> NDArray[np.generic]:
    """One number a vertex where there is one, and whole numbers as such; where it is not known (papers100M), -1."""
    flat = values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values
    if np.issubdtype(flat.dtype, np.floating):
        known = np.where(np.isnan(flat), -1.0, flat.astype(np.float64))
        whole = (known == np.rint(known)) & (np.abs(known) < 2**53)
        return known.astype(np.int64) if whole.all() else flat
    return flat
