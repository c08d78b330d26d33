"""A sparse matrix as the dense tensors it is made of: a graph of vertices, as people multiply with it.

A graph and a plan name dense tensors alone; a batch may hold matrices all the same. The order of the entries is kept,
and so is the memory they lie in: what is made of a graph once is found again in the next step.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from conjoin.ops import identity, tells_of_writes


class SparseMatrix(NamedTuple):
    """The row and the column of every entry, its value, and what else torch is told to make it."""

    indices: Tensor
    values: Tensor
    rows: int
    columns: int
    layout: str
    """`coo`, with entries in any order; `coalesced`, where they are in that of rows and columns; `csr`; or `csc`."""


_COMPRESSED = {torch.sparse_csr: "csr", torch.sparse_csc: "csc"}


def is_matrix(leaf: Any) -> bool:
    """Whether it is a sparse matrix that can be taken apart."""
    if not isinstance(leaf, Tensor) or leaf.dim() != 2:
        return False
    return (leaf.layout is torch.sparse_coo and leaf.dense_dim() == 0) or (
        leaf.layout in _COMPRESSED and leaf.values().dim() == 1
    )


def as_parts(leaf: Any) -> Any:
    """What a sparse matrix is made of; all else as it is.

    >>> as_parts(torch.tensor([[0.0, 5.0], [7.0, 0.0]]).to_sparse_csr()).indices.tolist()
    [[0, 1], [1, 0]]
    """
    if not is_matrix(leaf):
        return leaf
    rows, columns = leaf.shape
    if leaf.layout in _COMPRESSED:
        return SparseMatrix(_indices_of(leaf), leaf.values(), rows, columns, _COMPRESSED[leaf.layout])
    if leaf.requires_grad:  # its gradient comes by this way alone
        leaf = leaf.coalesce()
        return SparseMatrix(leaf.indices(), leaf.values(), rows, columns, "coalesced")
    layout = "coalesced" if leaf.is_coalesced() else "coo"
    return SparseMatrix(leaf._indices(), leaf._values(), rows, columns, layout)


def as_matrix(parts: SparseMatrix) -> Any:
    """The matrix itself; on the meta device, where torch makes none, its parts, which are taken for it."""
    if parts.indices.is_meta:
        return parts
    if parts.layout == "csc":  # by its columns what the other way round is by its rows
        turned = parts.indices.flip(0), parts.values, parts.columns, parts.rows, "csr"
        return as_matrix(SparseMatrix(*turned)).t()
    indices, values, shape = parts.indices, parts.values, (parts.rows, parts.columns)
    if parts.layout == "coo":
        return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    places = indices[0].long() * parts.columns + indices[1]
    if not bool((places[1:] >= places[:-1]).all()):  # others were put in; equal ones stay apart, and add up
        order = places.argsort(stable=True)
        indices, values = indices[:, order], values[order]
    if parts.layout == "coalesced":
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True, check_invariants=False)
    first = indices.new_zeros(parts.rows + 1)
    first[1:] = torch.bincount(indices[0], minlength=parts.rows).cumsum(0)
    return torch.sparse_csr_tensor(first, indices[1], values, shape, check_invariants=False)


_ROWS: MutableMapping[Tensor, tuple[object, Tensor]] = WeakTensorKeyDictionary()
"""The row and the column of every entry of matrices that say only where each row begins, or each column, and what they
were made of."""


def _indices_of(matrix: Tensor) -> Tensor:
    by_rows = matrix.layout is torch.sparse_csr
    first = matrix.crow_indices() if by_rows else matrix.ccol_indices()
    others = matrix.col_indices() if by_rows else matrix.row_indices()
    mark = identity(first), identity(others)
    held, made = _ROWS.get(matrix, (None, others))
    if held != mark or not tells_of_writes(first) or not tells_of_writes(others):
        lines = torch.arange(len(first) - 1, dtype=others.dtype, device=others.device)
        spread = lines.repeat_interleave(first.diff(), output_size=len(others))
        made = torch.stack((spread, others) if by_rows else (others, spread))
        _ROWS[matrix] = mark, made
    return made
