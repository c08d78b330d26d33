"""The file of a graph, which holds its text form line by line, and the fingerprint that tells it from others."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from conjoin.errors import GraphError
from conjoin.ir.custom_operators import read_statements, statements_to_json
from conjoin.ir.files import read_json, write_file
from conjoin.ir.graph import Graph
from conjoin.ir.limits import MAX_NUMBER
from conjoin.ir.parser import parse_graph

FORMAT = "conjoin.graph"
VERSION = 2
_KEYS = {"format", "version", "graph", "operators"}
_DATA = re.compile(r" = b64:\S*$|, halos=\[[\d, ]*\]", re.MULTILINE)
"""Values of constants, and what was counted of the edges of a graph: the meta device has neither."""


def fingerprint(graph: Graph, *, constants: bool = True) -> str:
    """A digest of what the graph computes: the same in every process and on every machine, blind to names of files.

    Without `constants` their values do not count: a graph captured on the meta device has none.

    >>> lines = ['graph "g" eval', "input:x f32[2]", "takes [input:x] in null", "%0: f32[2] = relu(input:x)"]
    >>> fingerprint(parse_graph("\\n".join([*lines, "returns [%0] in null"])))[:12]
    '64937186399b'
    """
    text = str(replace(graph, name="", sources=(), labels=()))
    return hashlib.sha256((text if constants else _DATA.sub("", text)).encode()).hexdigest()


def save_graph(graph: Graph, path: str | Path) -> None:
    """Write a graph to a file, aside first and then renamed, so that a half-written file never stands there."""
    write_file(path, json.dumps(graph_to_json(graph), indent=1), "graph", GraphError)


def load_graph(path: str | Path) -> Graph:
    """Read a graph file; GraphError says what is wrong with it."""
    return graph_from_json(read_json(path, "graph", GraphError))


def graph_to_json(graph: Graph) -> dict[str, Any]:
    """A graph as its file holds it: the text form, and what is to be known of custom operators."""
    operators = statements_to_json(graph)
    stated = {"operators": operators} if operators else {}
    return {"format": FORMAT, "version": VERSION, **stated, "graph": str(graph).splitlines()}


def graph_from_json(data: Any) -> Graph:
    """Read what `graph_to_json` wrote."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise GraphError(
            f"This is not a graph: its 'format' is not {FORMAT!r}. Another kind of file was given. Check the path."
        )
    version = data.get("version")
    if type(version) is not int or version != VERSION:
        raise GraphError(
            f"The graph has format version {_shown(version)}, this program reads version {VERSION}. "
            f"It was written by another release. Capture the model again."
        )
    lines = data.get("graph")
    if data.keys() - _KEYS or not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise GraphError(
            f"The graph data is malformed: it holds other things than {', '.join(sorted(_KEYS))}, or no lines of text. "
            f"It was damaged or edited wrongly. Capture the model again."
        )
    try:
        read_statements(data.get("operators", []))
    except ValueError as error:
        raise GraphError(
            f"The graph data is malformed: {str(error)[:300]}. It was damaged or edited wrongly. "
            f"Capture the model again."
        ) from None
    return parse_graph("\n".join(lines))


def _shown(version: Any) -> str:
    return str(version) if type(version) is int and 0 <= version < MAX_NUMBER else f"of type {type(version).__name__}"
