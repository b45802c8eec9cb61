"""Sparse tensors by their parts, which are ordinary tensors."""

from __future__ import annotations

import torch

__all__ = ["SPARSE", "parts_of"]

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
SPARSE = (torch.sparse_coo, *_BY_ROWS, *_BY_COLUMNS)


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Indices and values of a sparse tensor, as they lie in memory; an ordinary one is its own part."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _BY_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _BY_COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]
