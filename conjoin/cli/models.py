"""What a user may name as MODEL: a model of the zoo, a function in a file or module, or a saved graph."""

from __future__ import annotations

import importlib
import importlib.util
import inspect as python_inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import nn

from conjoin.api import (
    ConjoinError,
    Graph,
    Pipeline,
    Plan,
    PlanError,
    UsageError,
    capture,
    load_graph,
    load_plan,
    verify,
)
from conjoin.frontends import Precision, resize
from conjoin.ir import import_operators, plain_model

_PACKAGES = tuple(f"{path}{os.sep}" for path in (*torch.__path__, *importlib.__path__, Path(__file__).parents[1]))
"""Code that is not the user's."""


def load_model_graph(
    model: str,
    *,
    batch_size: int | None,
    training: bool | None,
    precision: Precision | None = None,
    sizes: Mapping[str, int] = MappingProxyType({}),
    like: Graph | None = None,
) -> Graph:
    """Find MODEL, build it without memory where that is possible, and capture it; a saved graph is verified instead.

    A graph that it is `like`, of another batch size, is taken over where nothing but sizes differs.
    """
    if model.endswith(".json"):
        return _from_file(model, batch_size, training, precision, sizes)
    found, batch, loss = (_from_function if _is_function(model) else _from_zoo)(model, batch_size, sizes)
    run_own(f"Setting the mode of {model}", lambda: found.train(training is not False))
    made = None if like is None else _resized(like, found, batch, loss, precision)
    return capture_model(found, batch, loss, check=True, precision=precision) if made is None else made


def _resized(like: Graph, model: nn.Module, batch: Any, loss: Any, precision: Precision | None) -> Graph | None:
    """The graph of a model without values for another batch, found out much sooner than by capturing."""
    if any(tensor.device.type != "meta" for tensor in (*model.parameters(), *model.buffers())):
        return None
    if precision is not None:
        model, batch = precision.converted(model, batch)
    with _without_torch_logs(), redirect_stdout(sys.stderr):
        return resize(like, model, batch, loss, () if precision is None else precision.autocast)


def import_modules(imports: Sequence[str] | None) -> None:
    """Import what a user names, for what it registers; it may lie in the current folder, as a model may."""
    if imports:
        _search(Path.cwd())
        with redirect_stdout(sys.stderr):
            import_operators(imports)


def read_plan(path: str | Path, imports: Sequence[str] | None, model: str = "") -> Plan | Pipeline:
    """A plan, after what is imported for its operators; those may also be declared where its model is."""
    import_modules(imports)
    try:
        return load_plan(path)
    except PlanError:
        if not _is_function(model):
            raise
        _find_function(model)
        return load_plan(path)


def read_plan_of_one_stage(path: str | Path, imports: Sequence[str] | None) -> Plan:
    """A plan that is no pipeline."""
    return of_one_stage(read_plan(path, imports))


def of_one_stage(found: Plan | Pipeline) -> Plan:
    """A plan, if it is no pipeline."""
    if isinstance(found, Plan):
        return found
    raise UsageError(
        f"The {found} was given where a plan of one stage is asked for. It has {len(found.stages)} stages. Give "
        f"another plan; explain and simulate show a pipeline."
    )


def capture_model(
    model: nn.Module, batch: Any, loss: Any, *, check: bool = False, precision: Precision | str | None = None
) -> Graph:
    """Capture a model; what its forward prints goes to stderr, since stdout has the answer of the command."""
    with _without_torch_logs(), redirect_stdout(sys.stderr):
        return capture(model, batch, loss, check=check, precision=precision)


def load_workload(
    model: str, batch_size: int | None, sizes: Mapping[str, int] = MappingProxyType({})
) -> tuple[nn.Module, Any, Any]:
    """MODEL in training mode with its values, a batch and the loss, to be run; a saved graph has no values."""
    if model.endswith(".json"):
        raise UsageError(
            f"The saved graph {model} was given to be run. A graph has no parameters' values. Name the model itself: "
            f"a zoo name, file.py:function or module:function."
        )
    own = _is_function(model)
    found, batch, loss = _from_function(model, batch_size, sizes) if own else _from_zoo(model, batch_size, sizes, "cpu")
    run_own(f"Setting the mode of {model}", lambda: found.train(True))
    return found, batch, loss


@contextmanager
def _without_torch_logs() -> Iterator[None]:
    """Keep the traceback that torch logs of a failing forward off the screen: the error is told in one message."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _from_file(
    model: str, batch_size: int | None, training: bool | None, precision: Precision | None, sizes: Mapping[str, int]
) -> Graph:
    graph = verify(load_graph(model))
    mode = "train" if graph.training else "eval"
    asked = [f"--batch {batch_size}"] if batch_size is not None else []
    asked += [f"--{'train' if training else 'eval'}"] if training not in (None, graph.training) else []
    asked += [f"--precision {precision.title}"] if precision is not None else []
    asked += [f"--size {name}={size}" for name, size in sizes.items()]
    if asked:
        raise UsageError(
            f"{asked[0]} was given for the saved graph {model}. Its sizes, its precision and its mode ({mode}) were "
            f"fixed at capture. Leave the option out, or capture the model again with it."
        )
    return graph


def _is_function(model: str) -> bool:
    return ":" in model and (not model.endswith(":tiny") or model.removesuffix(":tiny").endswith(".py"))


def _from_zoo(
    model: str, batch_size: int | None, sizes: Mapping[str, int], device: str = "meta"
) -> tuple[nn.Module, Any, Any]:
    if model.endswith(".py"):
        raise UsageError(
            f"{model} was given without a function. A model is named path/to/file.py:function. "
            f"Add a colon and the name of the function that returns the model and a batch."
        )
    zoo = importlib.import_module("zoo")
    if model.removesuffix(":tiny") not in zoo.names():
        raise _not_in_the_zoo(model)
    for name in sizes:
        if name not in zoo.sizes(model):
            raise _no_such_size(model, name, zoo.sizes(model))
    try:
        workload = zoo.build(model, batch_size=batch_size, device=device, sizes=sizes)
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError, AssertionError) as error:
        asked = [] if batch_size is None else [f"--batch {batch_size}"]
        asked += [f"--size {name}={size}" for name, size in sizes.items()]
        if not asked:
            raise
        reason, what = str(error).partition("\n")[0][:200], "model" if sizes else "batch"
        raise UsageError(
            f"{model} was asked for with {' '.join(asked)}. Such a {what} could not be made: {reason}. "
            f"Give a smaller one{', or sizes that divide each other' if sizes else ''}."
        ) from error
    return workload.model, workload.batch, workload.loss


def _no_such_size(model: str, name: str, known: Sequence[str]) -> UsageError:
    near = get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"Did you mean {near[0]}?" if near else f"Give one of {', '.join(known)}." if known else "Leave it out."
    return UsageError(
        f"{model} was asked for with another {name[:40]}. Its sizes are {', '.join(known) or 'not to be changed'}. "
        f"{hint}"
    )


def _not_in_the_zoo(model: str) -> UsageError:
    name, _, size = model.partition(":")
    known = importlib.import_module("zoo").names()
    near = get_close_matches(name.lower().replace("_", "-"), known, n=3)
    meant = " or ".join(f"{found}:tiny" if size else found for found in near)
    hint = f"Did you mean {meant}?" if near else f"Known are {', '.join(known)}."
    return UsageError(
        f"There is no model named {model!r} in the zoo. {hint} "
        f"A model of your own is named path/to/file.py:function or package.module:function, a saved graph file.json."
    )


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"There is no file {path}. A model is named path/to/file.py:function. Check the path.")
    place, stamp = path.resolve(), path.stat().st_mtime_ns
    if place in _imported and _imported[place][0] == stamp:
        return _imported[place][1]  # what it registers is registered once
    held = sys.modules.get(path.stem)
    is_this = held is not None and _file_of(held) == place
    if is_this and place not in _imported:  # by its name, as with --import
        _imported[place] = stamp, held
        return held
    # A user's file may be called like a module in use: it must not take that one's place.
    name = path.stem if held is None or is_this else f"{path.stem} of {place}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file. A model is named path/to/file.py:function. Name a file in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _search(path.parent.resolve())
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _imported[place] = stamp, module
    return module


def _file_of(module: ModuleType) -> Path | None:
    return None if module.__file__ is None else Path(module.__file__).resolve()


_imported: dict[Path, tuple[int, Any]] = {}
"""Files of users by their path, each as it was when it was imported."""


def _import_module(name: str, function: str) -> Any:
    _search(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name and get_close_matches(name, importlib.import_module("zoo").names()):
            raise _not_in_the_zoo(f"{name}:{function}") from None
        raise


def _search(folder: Path) -> None:
    """Let the user's program import what lies beside it, as `python` itself would."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _user_line(error: BaseException) -> str:
    """The innermost line of the user's own code that an error came through."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"\n  at {error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_PACKAGES, "<"))]
    return f"\n  at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""


_TORCHS_OWN = "\nException raised from "
"""After it torch tells the calls inside itself."""


def own_words(error: BaseException) -> str:
    """What a stranger's error says, without its own full stop."""
    return str(error).partition(_TORCHS_OWN)[0][:300].strip().removesuffix(".")


def run_own(what: str, action: Callable[[], Any]) -> Any:
    """Run the user's own code; what it prints goes to stderr, and whatever it raises is told with its line.

    A folder that it goes to is left again: paths on the command line are those of whoever typed them.
    """
    try:
        with redirect_stdout(sys.stderr), chdir(os.curdir):
            return action()
    except ConjoinError:
        raise
    except (Exception, SystemExit) as error:  # a user's program may raise anything; it is told, never swallowed
        raise UsageError(
            f"{what} failed with {type(error).__name__}: {own_words(error)}. The error is in the program that was "
            f"named, not in conjoin. Run it by itself to see more.{_user_line(error)}"
        ) from error


def _from_function(model: str, batch_size: int | None, sizes: Mapping[str, int]) -> tuple[nn.Module, Any, Any]:
    function = _find_function(model)
    keywords = {**_batch_keyword(model, function, batch_size), **sizes}
    taken = tuple(python_inspect.signature(function).parameters)
    for name in sizes:
        if name not in taken:
            raise _no_such_size(model, name, [other for other in taken if other not in ("batch", "batch_size")])
    made = run_own(f"{model}()", lambda: function(**keywords))
    return _check(model, made)


def call_function(name: str) -> Any:
    """What a function of the user's returns that takes nothing."""
    function = _find_function(name)
    return run_own(f"{name}()", function)


def _find_function(model: str) -> Callable[..., Any]:
    """The function that makes a model."""
    place, _, name = model.rpartition(":")
    is_file = place.endswith(".py") or os.sep in place
    module = run_own(f"Loading {place}", lambda: _import_file(Path(place)) if is_file else _import_module(place, name))
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        near = get_close_matches(name, public, n=1)
        hint = f"Did you mean {near[0]}?" if near else "It must be a function that returns the model and a batch."
        raise UsageError(f"{place} has no function {name!r}. {hint} Check the name after the colon.")
    return function


def _batch_keyword(model: str, function: Callable[..., Any], batch_size: int | None) -> dict[str, int]:
    if batch_size is None:
        return {}
    for name in ("batch_size", "batch"):
        if name in python_inspect.signature(function).parameters:
            return {name: batch_size}
    raise UsageError(
        f"A batch of {batch_size} was asked for, but {model} takes no batch_size. Only the function knows how to make "
        f"its batch. Give it a parameter batch_size, or plan for the batch that it makes, without --batch."
    )


def _check(model: str, made: Any) -> tuple[nn.Module, Any, Any]:
    if isinstance(made, tuple | list) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        return plain_model(made[0]), made[1], made[2] if len(made) == 3 else None
    if isinstance(made, tuple | list) and len(made) in (2, 3):
        shape = f"{type(made[0]).__name__} first, which is no nn.Module"
    else:
        shape = f"a tuple of {len(made)}" if isinstance(made, tuple | list) else type(made).__name__
    raise UsageError(
        f"{model} returned {shape}. It must return (model, batch) or (model, batch, loss). Change its return statement."
    )
