"""Operators that torch does not come with: a file says what they take and give and which module registers them.

So it can be read, shown and priced where nobody imported that module. Reading imports nothing: only the user does.
One that a user declared may be split, and a plan that does so is read where the declaration is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import fields
from importlib import import_module
from typing import Any

from conjoin.errors import ConjoinError, GraphError, UsageError
from conjoin.ir.graph import Graph
from conjoin.ir.limits import MAX_ITEMS
from conjoin.ir.literals import literal_from_json, literal_to_json
from conjoin.ops import (
    Kind,
    NotRegistered,
    OpSpec,
    Parameter,
    Signature,
    declaring_module,
    find_spec,
    is_custom,
    registered_signature,
    registering_module,
    signature,
    state_signature,
)

_MAX_LENGTH = 200
"""Of the name of an operator, a parameter or a module."""


def custom_operators(graph: Graph) -> dict[str, str]:
    """The operators of a graph that are neither torch's own nor ours, each with the module that registers it.

    The module is empty where nobody can tell, or where it has no name that others could import it by.
    """
    names = dict.fromkeys(node.op for node in graph.nodes if is_custom(node.op))
    modules = ((name, registering_module(name)) for name in names)
    return {name: module if _is_module(module) else "" for name, module in modules}


def declared_in(graph: Graph) -> list[str]:
    """What users have declared of the operators of a graph, in words that change with it."""
    specs = [(op, find_spec(op)) for op in sorted({node.op for node in graph.nodes if is_custom(node.op)})]
    return [f"{op}: {_facts_of(spec)}" for op, spec in specs if spec is not None and declaring_module(op) is not None]


def _facts_of(spec: OpSpec) -> str:
    """A declaration in one line; of functions among it the code."""
    facts = [(field.name, getattr(spec, field.name)) for field in fields(spec) if field.name != "sample"]
    code = [(name, value.__code__.co_code.hex() if hasattr(value, "__code__") else str(value)) for name, value in facts]
    return hashlib.sha256(repr(code).encode()).hexdigest()[:16]


def statements_to_json(graph: Graph) -> list[dict[str, Any]]:
    """What is to be known of the custom operators of a graph, as plain data."""
    return [
        {"module": module, **_signature_to_json(signature(op)), **_declared_to_json(op)}
        for op, module in custom_operators(graph).items()
    ]


def _declared_to_json(op: str) -> dict[str, str]:
    module = declaring_module(op)
    return {} if module is None else {"declared": module if _is_module(module) else ""}


def _signature_to_json(known: Signature) -> dict[str, Any]:
    outputs = "list" if known.returns_list else known.num_outputs
    facts = {"name": known.name, "takes": [_parameter_to_json(p) for p in known.parameters], "outputs": outputs}
    return {**facts, **({"random": True} if known.random else {})}


def _parameter_to_json(parameter: Parameter) -> dict[str, Any]:
    default = {"default": literal_to_json(parameter.default)} if parameter.has_default else {}
    keyword = {"keyword_only": True} if parameter.keyword_only else {}
    return {"name": parameter.name, "kind": parameter.kind.value, **default, **keyword}


def read_statements(entries: Any) -> dict[str, str]:
    """Let the operators be known that a file states; ValueError where one is malformed, or is otherwise here.

    Those are returned that somebody had declared and nobody has here, with the module that does.
    """
    undeclared: dict[str, str] = {}
    if not isinstance(entries, list) or len(entries) > MAX_ITEMS:
        raise ValueError("the operators are not a list")
    for entry in entries:
        match entry:
            case {"name": str(name), "module": str(module), "takes": list(), "outputs": int() | "list", **rest} if (
                rest.keys() <= {"random", "declared"} and len(name) <= _MAX_LENGTH
            ):
                stated = _signature_from_json(entry)
            case _:
                raise ValueError(f"{str(entry)[:60]} does not state an operator")
        declared = entry.get("declared", "")
        if not is_custom(name) or not all(isinstance(m, str) and (not m or _is_module(m)) for m in (module, declared)):
            raise ValueError(f"{name!r} of {module[:60]!r} is not an operator that a module registers")
        state_signature(stated, module)
        if "declared" in entry and find_spec(name) is None:
            undeclared[name] = declared
    return undeclared


def _signature_from_json(entry: dict[str, Any]) -> Signature:
    outputs, random = entry["outputs"], entry.get("random", False)
    parts = entry["name"].replace("::", ".").split(".")
    if not all(part.isidentifier() for part in parts) or type(random) is not bool or outputs is True:
        raise ValueError(f"{entry['name']!r} is not stated as an operator is")
    if outputs != "list" and not 1 <= outputs <= 100:
        raise ValueError(f"{entry['name']} is said to give {outputs} tensors")
    parameters = tuple(_parameter_from_json(parameter) for parameter in entry["takes"])
    if len({parameter.name for parameter in parameters}) < len(parameters):
        raise ValueError(f"{entry['name']} is said to take a parameter twice")
    count = 1 if outputs == "list" else outputs
    return Signature(entry["name"], parameters, count, outputs == "list", mutates=False, random=random)


def _parameter_from_json(entry: Any) -> Parameter:
    match entry:
        case {"name": str(name), "kind": str(kind), **rest} if (
            rest.keys() <= {"default", "keyword_only"} and name.isidentifier() and len(name) <= _MAX_LENGTH
        ):
            default = literal_from_json(entry["default"]) if "default" in entry else None
            return Parameter(name, Kind(kind), default, "default" in entry, entry.get("keyword_only") is True)
    raise ValueError(f"{str(entry)[:60]} is not a parameter of an operator")


def _is_module(name: str) -> bool:
    return len(name) <= _MAX_LENGTH and all(part.isidentifier() for part in name.split(".")) and name != "__main__"


def import_operators(modules: Iterable[str]) -> None:
    """Import the modules that a user names, for the operators that they register."""
    for name in modules:
        if not _is_module(name):
            raise UsageError(
                f"The module {name[:60]!r} was to be imported for what it registers. That is not the name of a module. "
                f"Write it as in an import statement: package.module."
            )
        try:
            import_module(name)
        except ConjoinError:
            raise
        except (Exception, SystemExit) as error:  # a module may raise anything when it is imported; it is told
            raise UsageError(
                f"The module {name} was to be imported for what it registers, and that failed with "
                f"{type(error).__name__}: {str(error)[:200]}. It is not installed here, or is broken. Import it in "
                f"Python to see more, and check its name."
            ) from error


def check_registered(graph: Graph) -> None:
    """Refuse to run operators that nobody registered, or that are not what the graph was read with."""
    missing = {op: module for op, module in custom_operators(graph).items() if not _runs(op)}
    if missing:
        modules = sorted({*missing.values()} - {""})
        raise GraphError(
            f"{graph.name} was to be run, and torch lacks its operators {', '.join(list(missing)[:8])} here, or has "
            f"others of these names. They are registered by {', '.join(modules) or 'a module that nobody could tell'}. "
            f"Import it first: with --import, with imports= where the plan is read, or by hand."
        )


def _runs(op: str) -> bool:
    try:
        return registered_signature(op) == signature(op)
    except NotRegistered:
        return False
