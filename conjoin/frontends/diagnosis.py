"""Why export stopped: told in three sentences at the user's line, with every place that depends on tensor values."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from conjoin.errors import CaptureError
from conjoin.frontends.problems import HIDDEN, MODEL_PREFIX, find_user_line
from conjoin.frontends.torch_private import FollowedCalls, InnerGradient, PackedRows, is_fake, pretend_exporting, quiet
from conjoin.frontends.value_checks import answer_of_check
from conjoin.ir import copied_model

_DATA_DEPENDENT = (
    "data-dependent", "DataDependent", "unbacked", "_local_scalar_dense", "aten.item", "aten.nonzero",
    "expected to contain only concrete integers",
)  # fmt: skip
_LONGEST = 300


class _ValueWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the user's lines whose result, or its shape, depends on the values of tensors."""

    def __init__(self, outermost: CodeType) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outermost = outermost
        self.places: dict[tuple[str, int], None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _depends_on_values(func, args) and answer_of_check(sys._getframe()) is None:
            place = find_user_line(sys._getframe(), self.outermost)
            if place is not None:
                self.places[place] = None
        return func(*args, **(kwargs or {}))


def _depends_on_values(func: Any, args: Any) -> bool:
    if func is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _places_that_depend_on_values(step: nn.Module, tensors: tuple[Tensor, ...]) -> list[tuple[str, int]]:
    """Run a copy of the step on the batch itself, which export cannot, and note every such place."""
    if any(is_fake(tensor) for tensor in (*step.parameters(), *step.buffers(), *tensors)):
        return []
    watch = _ValueWatch(type(step).forward.__code__)
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), quiet(), pretend_exporting():
            clones = [tensor.clone() for tensor in tensors]
            with FollowedCalls(lambda _: None, lambda *_: None), watch:
                copied_model(step)(*clones)
    except Exception:  # export has failed already and is reported; this only adds what can be found
        pass
    return list(watch.places)


_SPARSE = ("SparseTensorImpl", "SparseCsr", "compressed tensor instance")


def refuse_sparse(what: str, where: str = "") -> CaptureError:
    """Of something that is sparse, with what to write instead of a product with a sparse matrix."""
    return CaptureError(
        f"{what} is sparse. A graph names dense tensors alone, and how many numbers a sparse one has depends on its "
        f"values. Give a matrix A that is multiplied with tensors h to the right with the batch; or give its edges as "
        f"row, column and weight, and write A @ h as `h.new_zeros(len(A), h.shape[1]).index_add(0, row, "
        f"h[column] * weight[:, None])`, which runs as one product; or, where it is small, call .to_dense() on it."
        + where
    )


def refuse_packed(what: str) -> CaptureError:
    """Of packed sequences, with what to do instead."""
    return CaptureError(
        f"{what} packs sequences of different lengths (torch.nn.utils.rnn). How many rows a step has then depends on "
        f"the lengths, which are others in the next batch, and a graph is for one shape of every tensor. Run the layer "
        f"on the padded batch, and mask what lies behind the end, or read the last state as "
        f"output[torch.arange(len(output)), lengths - 1]; for a layer that runs backward, flip each sequence by its "
        f"length."
    )


_WORDS_OF_TORCH = (
    (
        (os.path.join("torch", "nested", ""), "nested_tensor"),
        "The model makes a nested tensor, rows of different lengths. A graph is for one shape of every tensor. Keep "
        "the rows padded to one length, and mask what was added.",
    ),
    (
        (".numpy() is not supported",),
        "The model hands a tensor to NumPy. What NumPy makes of it would be kept as the numbers of this batch, and "
        "gets no gradient. Write it with torch's functions, or compute it before and give it with the batch.",
    ),
    (
        ("CustomObjArgument",),
        "The model draws from a torch.Generator of its own. A plan keeps the numbers of the ranks apart or alike by "
        "seeding the generator of torch, and knows of no other. Draw without generator=, or give the numbers with the "
        "batch.",
    ),
    (
        ("is mutated in the forward method",),
        "Forward writes to a tensor that is neither a parameter nor a buffer of the model. A graph returns new values "
        "of buffers, and would forget these. Hold it by register_buffer in the module that writes to it.",
    ),
    (
        ("fake tensor in the exported program constant",),
        "A tensor of forward was made where torch.export does not follow calls, as in another thread. It would be kept "
        "as a constant of this batch. Make it in the thread that calls forward, with torch's own functions.",
    ),
)
"""Signs of what torch cannot follow, files of its own or words of its message, and what that is."""


def _known_limit(error: Exception) -> str | None:
    """What it is that torch stopped at, where its own words do not say it."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    where = "\n".join([f"{type(error).__name__}: {error}", *files])
    return next((told for signs, told in _WORDS_OF_TORCH if any(sign in where for sign in signs)), None)


_WRITES_TO_SHARED = "expected compiled_fn to be GraphModule"
"""How torch says that inputs which are written to share memory."""


def _shared_buffers(step: nn.Module) -> list[str]:
    """The first buffers that lie in one piece of memory."""
    names: dict[int, list[str]] = {}
    for name, buffer in step.named_buffers(remove_duplicate=False):
        if not is_fake(buffer):
            names.setdefault(buffer.untyped_storage().data_ptr(), []).append(name.removeprefix(MODEL_PREFIX))
    return next((some for some in names.values() if len(some) > 1), [])


def explain(error: Exception, step: nn.Module, tensors: tuple[Tensor, ...], called: str) -> CaptureError:
    """What export said, in three sentences and with the user's lines; `called` is how model and loss were."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(HIDDEN)]
    places = [(frames[-1].filename, frames[-1].lineno or 0)] if frames else []
    if isinstance(error, CaptureError):
        told = f"{error}{''.join(map(_shown, places))}"
        return CaptureError(told)
    if isinstance(error, InnerGradient):
        return CaptureError(
            f"The model takes gradients inside its forward pass or its loss ({error}). A graph is of a forward pass "
            f"whose backward pass is derived once, and torch.export does not follow one in the middle of it. Write the "
            f"inner gradient out as operations, leave a penalty on gradients away, or train it without a plan."
            + "".join(map(_shown, places))
        )
    limit = str(refuse_packed("The model")) if isinstance(error, PackedRows) else _known_limit(error)
    if limit is not None:
        return CaptureError("".join((limit, *map(_shown, places))))
    text = f"{type(error).__name__}: {error}"
    if any(sign in text for sign in _DATA_DEPENDENT):
        places = list(dict.fromkeys(places + _places_that_depend_on_values(step, tensors)))
        return CaptureError(
            "Capture needs one program for every batch, but the model's control flow or a shape depends on tensor "
            "values. Such a branch would be frozen to what this batch happened to take. Compute both sides and choose "
            "with torch.where, use fixed shapes (masks, capacities), or move the decision out of forward."
            + "".join(map(_shown, places))
        )
    if any(sign in text for sign in _SPARSE):
        return refuse_sparse("A tensor that the model makes", "".join(map(_shown, places)))
    shared = _shared_buffers(step)
    if _WRITES_TO_SHARED in text and shared:
        return CaptureError(
            f"The buffers {' and '.join(shared)} share memory, and forward writes to a part of it. torch.export, which "
            f"makes new values of what is written, does not follow that where memory has two names. Keep one buffer "
            f"and read it by one name, or write to it as a whole." + "".join(map(_shown, places))
        )
    said = str(error).replace("FakeTensor", "Tensor")
    first = next((part.strip() for part in said.splitlines() if part.strip()), "no message")
    if isinstance(error, TypeError) and not places:  # raised by the call itself
        return CaptureError(
            f"The model could not be captured on this batch: TypeError: {first[:_LONGEST].rstrip('.')}. It was called "
            f"as {called}: the model gets of a batch what its forward takes, the loss the model's output and the rest. "
            f"Give a batch, or a loss, that fits."
        )
    return CaptureError(
        f"The model could not be captured on this batch: {type(error).__name__}: {first[:_LONGEST].rstrip('.')}. "
        "torch.export stopped there, before any graph was made. Check that model(batch) runs, and rewrite that line "
        "if it does." + "".join(map(_shown, places))
    )


def _shown(place: tuple[str, int]) -> str:
    file, line = place
    return f"\n  at {file}:{line}: {linecache.getline(file, line).strip()}"
