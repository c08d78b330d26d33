"""Reading the text form back into a graph; every error names its line."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from conjoin.errors import GraphError
from conjoin.ir.builder import GraphBuilder
from conjoin.ir.graph import Graph, Result
from conjoin.ir.limits import MAX_NESTING, MAX_NUMBER, check_constant, check_count, check_size
from conjoin.ir.literals import parse_word
from conjoin.ir.nodes import LeafKind, Node, Section, Source, Value, fits, make_leaf, make_node
from conjoin.ir.rounding import EXACT, Rounding, parse_rounding
from conjoin.ir.structure import LEAF, Structure, structure_from_json
from conjoin.ir.types import parse_type
from conjoin.ops import Args, Signature, bind_args, signature

_TYPE = r"\w+\[[0-9,]*\](?:\{[^}]*\})?"
_NUMBER = r"[0-9]{1,10}"
_WORD = re.compile(r"[^\s\[\](),=\"]+")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_NAME = re.compile(r"(\w+)=")
_LEAF = re.compile(
    rf"(input|param|buffer|const):(?:([\w.]+)|({_STRING.pattern})) ({_TYPE})"
    rf"( trainable)?( channels-last)?((?: also {_STRING.pattern})*)"
    rf"(?: section ({_STRING.pattern}) dim ({_NUMBER}) from ({_NUMBER}) of ({_NUMBER}))?(?: = b64:(\S*))?"
)
_OUTPUT = re.compile(rf"%({_NUMBER}): ({_TYPE})")
_NODE = re.compile(rf"(%{_NUMBER}: {_TYPE}(?:, %{_NUMBER}: {_TYPE})*) = ([\w:.]+)\(")
_PLACE = rf"  @ ({_STRING.pattern}):({_NUMBER})(?: ({_STRING.pattern}))?(?: segment ({_NUMBER}))?"
_MARKS = re.compile(rf"(?: #({_NUMBER}))?( pinned)?(?:{_PLACE})?")


class _Malformed(ValueError):
    """What is wrong with the line being read."""


@dataclass(slots=True)
class _Cursor:
    """A position in a line."""

    text: str
    at: int = 0

    def skip(self, mark: str) -> bool:
        """Step over a mark if it is next."""
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
            return True
        return False

    def expect(self, mark: str) -> None:
        if not self.skip(mark):
            raise _Malformed(f"expected {mark!r} at column {self.at + 1}, found {self.text[self.at : self.at + 20]!r}")

    def take(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if not found:
            raise _Malformed(f"nothing readable at column {self.at + 1}: {self.text[self.at : self.at + 20]!r}")
        self.at = found.end()
        return found.group()

    def finish(self) -> None:
        """Refuse what is left of the line."""
        if self.at < len(self.text):
            raise _Malformed(f"nothing may follow at column {self.at + 1}: {self.text[self.at : self.at + 20]!r}")


@dataclass(slots=True)
class _Reader:
    """What has been read so far."""

    builder: GraphBuilder = field(default_factory=GraphBuilder)
    values: dict[int, Value] = field(default_factory=dict)
    labels: list[int] = field(default_factory=list)
    name: str | None = None
    training: bool = False
    rounding: Rounding = EXACT
    inputs: tuple[tuple[Result, ...], Structure] | None = None
    outputs: tuple[tuple[Result, ...], Structure] | None = None
    loss: int | None = None
    updates: list[tuple[str, Value]] = field(default_factory=list)

    def item(self, cursor: _Cursor, depth: int = 0) -> Any:
        """A value, a literal, or a list of them."""
        if cursor.skip("["):
            if depth >= MAX_NESTING:
                raise _Malformed("lists are nested too deeply")
            items: list[Any] = []
            while not cursor.skip("]"):
                if items:
                    cursor.expect(", ")
                items.append(self.item(cursor, depth + 1))
            return tuple(items)
        if cursor.text.startswith('"', cursor.at):
            return json.loads(cursor.take(_STRING))
        word = cursor.take(_WORD)
        if word.startswith("%"):
            return self._value(word)
        if word.startswith(tuple(f"{kind.value}:" for kind in LeafKind)):
            quoted = cursor.take(_STRING) if word.endswith(":") else ""
            return self._leaf_value(word + json.loads(quoted) if quoted else word)
        return parse_word(word)

    def _value(self, word: str) -> Value:
        number = int(word[1:]) if word[1:].isdigit() and len(word) < 12 else -1
        if number not in self.values:
            raise _Malformed(f"{word} is used before it is made")
        return self.values[number]

    def _leaf_value(self, reference: str) -> Value:
        leaf = self.builder.leaf(reference)
        if leaf is None:
            raise _Malformed(f"there is no {reference}")
        return Value(leaf)

    def arguments(self, op: str, cursor: _Cursor) -> Args:
        """The arguments up to the closing bracket, lined up with the signature."""
        known = signature(op)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        while not cursor.skip(")"):
            if positional or named:
                cursor.expect(", ")
            key = _NAME.match(cursor.text, cursor.at)
            if key:
                cursor.at = key.end()
                _check_name(known, key[1], positional, named)
                named[key[1]] = self.item(cursor)
            else:
                positional.append(self.item(cursor))
        return bind_checked(op, tuple(positional), named)


def _check_name(known: Signature, name: str, positional: list[Any], named: dict[str, Any]) -> None:
    place = known.position(name)
    if place < 0 or name in named or place < len(positional):
        raise _Malformed(f"{known.name} takes no {name!r} here")


def bind_checked(op: str, positional: tuple[Any, ...], named: dict[str, Any]) -> Args:
    """Line arguments up, refusing a wrong number of them and tensors where a literal belongs."""
    known = signature(op)
    if len(positional) > len(known.parameters):
        raise _Malformed(f"{op} takes {len(known.parameters)} arguments, not {len(positional)}")
    args = bind_args(op, positional, named)
    for parameter, value in zip(known.parameters, args, strict=True):
        if not fits(parameter.kind, value):
            raise _Malformed(f"{op} cannot take this for {parameter.name!r}")
    return args


def checked_results(items: Any) -> tuple[Result, ...]:
    """What a graph takes or returns: a flat list of values and plain values."""
    if not isinstance(items, tuple):
        raise _Malformed("a list is expected")
    for item in items:
        if not isinstance(item, Value | bool | int | float | str | None):
            raise _Malformed("the list holds something other than values, numbers, strings and none")
    return items


def checked_number(number: int) -> int:
    """A line or an occurrence; neither is negative or beyond counting."""
    if not 0 <= number < MAX_NUMBER:
        raise _Malformed(f"{number} is not a number from 0 to {MAX_NUMBER - 1}")
    return number


def add_new(builder: GraphBuilder, node: Node, source: Source | None) -> Node:
    """Add a node that must not stand above already: two random draws written alike would silently become one."""
    if builder.holds(node):
        raise _Malformed("the same call stands above; tell them apart with another occurrence (#1)")
    return builder.add_node(node, source)


def _read_header(reader: _Reader, line: str) -> None:
    if reader.name is not None:
        raise _Malformed("the graph has its name already")
    cursor = _Cursor(line)
    cursor.expect("graph ")
    reader.name = json.loads(cursor.take(_STRING))
    cursor.expect(" ")
    mode, space, rest = cursor.text[cursor.at :].partition(" ")
    if mode not in ("train", "eval"):
        raise _Malformed(f"expected train or eval, found {mode[:20]!r}")
    reader.training = mode == "train"
    reader.rounding = parse_rounding(space + rest) if space else EXACT


def _read_leaf(reader: _Reader, line: str) -> None:
    found = _LEAF.fullmatch(line)
    if not found:
        raise _Malformed("this is not a leaf: expected kind:name dtype[shape]")
    kind, plain, quoted, type_text, trainable, last, also, *whole, data = found.groups()
    name = plain if plain is not None else json.loads(quoted)
    aliases = tuple(json.loads(alias) for alias in _STRING.findall(also))
    leaf_type = parse_type(type_text)
    values = None if data is None else check_constant(base64.b64decode(data, validate=True), leaf_type)
    if reader.builder.leaf(f"{kind}:{name}") is not None:
        raise _Malformed(f"there is a {kind}:{name} already")
    leaf = make_leaf(
        LeafKind(kind), name, leaf_type, trainable=trainable is not None, aliases=aliases, data=values,
        channels_last=last is not None, section=_section(*whole),
    )  # fmt: skip
    reader.builder.add_leaf(leaf)


def _section(of: str | None, dim: str, start: str, whole: str) -> Section | None:
    return None if of is None else Section(json.loads(of), int(dim), int(start), int(whole))


def _read_node(reader: _Reader, line: str) -> None:
    found = _NODE.match(line)
    if not found:
        raise _Malformed("this is not a node: expected %n: type = operator(...)")
    cursor = _Cursor(line, found.end())
    args = reader.arguments(found[2], cursor)
    marks = _MARKS.fullmatch(line, cursor.at)
    if not marks:
        raise _Malformed(f"cannot read {line[cursor.at : cursor.at + 30]!r} after the call")
    outputs = _OUTPUT.findall(found[1])
    types = tuple(parse_type(text) for _, text in outputs)
    occurrence, place, segment = (checked_number(int(marks[i] or 0)) for i in (1, 4, 6))
    module = json.loads(marks[5]) if marks[5] else ""
    source = Source(json.loads(marks[3]), place, module, segment) if marks[3] else None
    node = make_node(found[2], args, types, occurrence=occurrence, pinned=marks[2] is not None)
    add_new(reader.builder, node, source)
    _number_outputs(reader, node, [int(number) for number, _ in outputs])
    reader.labels.append(int(outputs[0][0]))


def _number_outputs(reader: _Reader, node: Node, numbers: list[int]) -> None:
    for number, value in zip(numbers, node.outputs(), strict=True):
        if reader.values.setdefault(number, value) is not value:
            raise _Malformed(f"%{number} is made twice")


def _read_update(reader: _Reader, line: str) -> None:
    cursor = _Cursor(line)
    cursor.expect("update ")
    name = json.loads(cursor.take(_STRING))
    cursor.expect(" = ")
    value = reader.item(cursor)
    cursor.finish()
    if not isinstance(value, Value):
        raise _Malformed("a buffer is updated with a value of the graph")
    reader.updates.append((name, value))


def _read_boundary(reader: _Reader, line: str) -> None:
    cursor = _Cursor(line)
    takes = cursor.skip("takes ")
    if not takes:
        cursor.expect("returns ")
    if (reader.inputs if takes else reader.outputs) is not None:
        raise _Malformed(f"there is a line {line.split(' ', 1)[0]!r} already")
    items = checked_results(reader.item(cursor))
    cursor.expect(" in ")
    data, cursor.at = json.JSONDecoder().raw_decode(line, cursor.at)
    boundary = items, structure_from_json(data)
    if takes:
        reader.inputs = boundary
    else:
        reader.outputs = boundary
        if cursor.skip(" loss "):
            reader.loss = int(cursor.take(re.compile(_NUMBER)))
    cursor.finish()


def _read_line(reader: _Reader, line: str) -> None:
    match line.split(":", 1)[0].split(" ", 1)[0]:
        case "graph":
            _read_header(reader, line)
        case "input" | "param" | "buffer" | "const":
            _read_leaf(reader, line)
        case "takes" | "returns":
            _read_boundary(reader, line)
        case "update":
            _read_update(reader, line)
        case _:
            _read_node(reader, line)


def parse_graph(text: str) -> Graph:
    """Read the text form of a graph; GraphError names the line that is wrong."""
    check_size(len(text))
    lines = text.splitlines()
    check_count(len(lines))
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            _read_line(reader, line.strip())
        except (ValueError, LookupError, TypeError, RecursionError, OverflowError) as error:
            raise GraphError(
                f"Line {number} of the graph cannot be read: {line.strip()[:80]!r}. "
                f"The reason: {error}. Correct that line, or capture the model again."
            ) from None
    return _finish(reader)


def _finish(reader: _Reader) -> Graph:
    if reader.name is None or reader.outputs is None:
        missing = "graph" if reader.name is None else "returns"
        raise GraphError(
            f"The graph text has no line {missing!r}. It is not a graph, or a part of it is missing. "
            f"Save the graph again."
        )
    (inputs, input_structure), (outputs, output_structure) = reader.inputs or ((), LEAF), reader.outputs
    graph = reader.builder.finish(
        reader.name,
        training=reader.training,
        inputs=inputs,
        outputs=outputs,
        updates=tuple(reader.updates),
        loss=reader.loss,
        input_structure=input_structure,
        output_structure=output_structure,
    )
    return replace(graph, labels=tuple(reader.labels), rounding=reader.rounding)
