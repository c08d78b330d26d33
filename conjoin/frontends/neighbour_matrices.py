"""Products with sparse matrices, as models over graphs have them: `adjacency @ h`, `torch.sparse.mm(adjacency, h)`.

torch.export takes no sparse tensors. While a model is traced, something stands for each sparse matrix that comes with
the batch, or is made of indices and values on the way: it holds these, and multiplies by reading rows at the sources of
edges and adding them up at their targets, which are its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from conjoin.frontends.calls_here import calls_here
from conjoin.frontends.diagnosis import refuse_sparse
from conjoin.ir import SparseMatrix


class NeighbourMatrix:
    """A sparse matrix of edges: the entry at (v, u) is the weight of that from u to v."""

    is_sparse, ndim = True, 2

    def __init__(self, indices: Tensor, values: Tensor, shape: tuple[int, int]) -> None:
        self._indices_2E, self._values_E, self.shape = indices, values, torch.Size(shape)
        self.dtype, self.device, self.requires_grad = values.dtype, values.device, values.requires_grad

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _CALLS.get(function)
        named = kwargs or {}
        if made is None or not any(isinstance(arg, cls) for arg in args):
            given = next((arg for arg in (*args, *named.values()) if isinstance(arg, cls)), None)
            shape = "" if given is None else f" of shape {tuple(given.shape)}"
            raise refuse_sparse(f"What {function.__name__} is called with, a matrix{shape},")
        return made(*args, **named)

    def __matmul__(self, h: Any) -> Tensor:
        if not isinstance(h, Tensor) or h.dim() not in (1, 2) or h.shape[0] != self.shape[1]:
            raise RuntimeError(f"a sparse matrix of shape {tuple(self.shape)} is multiplied with {_told(h)}")
        if h.dtype != self.dtype:
            raise RuntimeError(f"a sparse matrix of {self.dtype} is multiplied with {_told(h)}")
        (target_E, source_E), weight_E = self._indices_2E, self._values_E
        rows_EF = h.index_select(0, source_E) * (weight_E if h.dim() == 1 else weight_E.unsqueeze(-1))
        return h.new_zeros(self.shape[0], *h.shape[1:]).index_add(0, target_E, rows_EF)

    mm = matmul = mv = __matmul__

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refuse_sparse(f"A matrix of shape {tuple(self.shape)} whose {name} is asked for,")

    def size(self, dim: int | None = None) -> Any:
        """As torch has it."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Two."""
        return 2

    def indices(self) -> Tensor:
        """The row and the column of every entry."""
        return self._indices_2E

    def values(self) -> Tensor:
        """The value of every entry."""
        return self._values_E

    _indices, _values = indices, values

    def coalesce(self) -> NeighbourMatrix:
        """Itself: equal entries add up in every product."""
        return self

    def t(self) -> NeighbourMatrix:
        """Of the edges the other way round."""
        return NeighbourMatrix(self._indices_2E.flip(0), self._values_E, (self.shape[1], self.shape[0]))

    @property
    def T(self) -> NeighbourMatrix:
        """The same."""
        return self.t()

    def to_dense(self) -> Tensor:
        """All entries."""
        made = self._values_E.new_zeros(self.shape)
        return made.index_put(tuple(self._indices_2E), self._values_E, accumulate=True)


def _told(h: Any) -> str:
    return f"a tensor of shape {tuple(h.shape)} and {h.dtype}" if isinstance(h, Tensor) else f"a {type(h).__name__}"


def _product(matrix: Any, h: Any, reduce: str = "sum") -> Tensor:
    if reduce != "sum":
        raise refuse_sparse(f"What neighbours are reduced with by {reduce!r}, a matrix of shape {tuple(matrix.shape)},")
    if not isinstance(matrix, NeighbourMatrix):
        raise refuse_sparse(f"What a tensor is multiplied with from the left, a matrix of shape {tuple(h.shape)},")
    made: Tensor = matrix @ h
    return made


def _added(onto: Tensor, matrix: Any, h: Any, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return beta * onto + alpha * _product(matrix, h)


_PRODUCTS = (torch.sparse.mm, torch.mm, torch.spmm, torch.mv, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__)
_CALLS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_PRODUCTS, _product),
    **dict.fromkeys((torch.addmm, torch.sparse.addmm), _added),
    torch.t: NeighbourMatrix.t,
}


def matrix_of(parts: SparseMatrix) -> NeighbourMatrix:
    """What stands for a matrix of the batch."""
    return NeighbourMatrix(parts.indices, parts.values, (parts.rows, parts.columns))


_NO_MATTER = ("device", "is_coalesced", "check_invariants")


def _from_entries(indices: Any, values: Any, size: Any = None) -> NeighbourMatrix | None:
    is_one = isinstance(indices, Tensor) and isinstance(values, Tensor) and size is not None and len(size) == 2
    return NeighbourMatrix(indices, values, tuple(size)) if is_one and values.dim() == 1 else None


def _from_rows(crow_indices: Any, col_indices: Any, values: Any, size: Any = None) -> NeighbourMatrix | None:
    first, columns = crow_indices, col_indices
    if not all(isinstance(part, Tensor) for part in (first, columns, values)) or first.dim() != 1:
        return None
    places = torch.arange(columns.shape[0], dtype=first.dtype, device=first.device)
    rows = torch.searchsorted(first[1:], places, right=True).to(columns.dtype)
    return _from_entries(torch.stack((rows, columns)), values, size)


def _made(make: Callable[..., NeighbourMatrix | None], args: Any, options: dict[str, Any]) -> NeighbourMatrix:
    try:
        made = make(*args, **{name: value for name, value in options.items() if name not in _NO_MATTER})
    except TypeError:  # an option that says something else besides
        made = None
    if made is None:
        raise refuse_sparse("A tensor that the model makes")
    return made


@contextmanager
def matrices_of_edges() -> Iterator[None]:
    """Trace models that make sparse matrices inside so; those whose sizes only values say are refused."""

    def from_entries(*args: Any, **options: Any) -> NeighbourMatrix:
        return _made(_from_entries, args, options)

    def from_rows(*args: Any, **options: Any) -> NeighbourMatrix:
        return _made(_from_rows, args, options)

    with calls_here({(torch, "sparse_coo_tensor"): from_entries, (torch, "sparse_csr_tensor"): from_rows}):
        yield
