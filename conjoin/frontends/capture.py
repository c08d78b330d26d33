"""`capture`: a plain model, a batch and a loss become a graph, or one complete report of why not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from conjoin.errors import CaptureError
from conjoin.frontends.exporting import Batch, export
from conjoin.frontends.lowering import Lowering
from conjoin.frontends.report import not_understood
from conjoin.frontends.torch_private import settle_autograd
from conjoin.ir import Graph, verify

_log = logging.getLogger("conjoin")


def capture(
    model: nn.Module,
    batch: Batch,
    loss: Callable[..., Any] | None = None,
    check: Callable[[Graph], str] | None = None,
) -> Graph:
    """Turn a model into a graph, in the mode (train or eval) it is in.

    `batch` is a tensor, a tuple of positional inputs or a dict of keyword inputs. With a `loss`, inputs that the
    model's forward does not take are given to the loss after the model's output, and the graph returns the loss.
    What is kept but not understood is told in one report on the logger `conjoin`, and what `check` says of the graph.

    >>> import torch
    >>> graph = capture(nn.Linear(4, 2), torch.zeros(3, 4))
    >>> [node.op for node in graph.nodes]
    ['linear']
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(
            f"A {type(model).__name__} was given to capture. Capture takes a torch.nn.Module, whose parameters it can "
            f"name. Wrap the function in a module, or pass the module itself."
        )
    if loss is not None and not callable(loss):
        raise CaptureError(
            f"A loss of type {type(loss).__name__} was given. A loss is called with the model's output. "
            f"Pass a function or None."
        )
    settle_autograd()
    exported = export(model, batch, loss)
    lowering = Lowering(exported, model)
    graph = lowering.run(type(model).__name__, model.training)
    if graph is None:
        problems = list(dict.fromkeys(map(str, lowering.problems)))
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise CaptureError(
            f"{len(problems)} part(s) of the model cannot be captured. Every one is listed here, with the user's line "
            f"and what to do. Change them and capture again:\n{listed}"
        )
    if loss is not None and graph.loss is None:
        raise CaptureError(
            "The loss did not return one floating-point number. Training minimises a single number. "
            "Return a scalar tensor, for example with reduction='mean'."
        )
    verify(graph)
    report = not_understood(graph, exported.dropped, check(graph) if check else "")
    _log.log(logging.INFO if report.complete else logging.WARNING, "%s: %s", graph.name, report)
    return graph
