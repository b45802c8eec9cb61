"""Helpers for tensors: the memory that they span, parts of sparse ones, and tensors created in inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)
SPARSE = (torch.sparse_coo, *_BY_ROWS, *_BY_COLUMNS)
"""Sparse layouts."""
_NOTHING = nullcontext()


def extent(tensor: Tensor) -> int:
    """Return how many elements of memory a non-empty tensor reaches over, from its first element to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the indices and values of a sparse tensor as they are in memory, or the dense tensor itself."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _BY_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in _BY_COLUMNS:
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor]


@contextmanager
def _outside_inference() -> Iterator[None]:
    """Run the block with neither inference mode nor autograd."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def ordinary_tensors() -> AbstractContextManager[None]:
    """Build no graph inside the block, and create tensors that can be written and trained anywhere.

    A tensor created in inference mode could not be written outside of it, changed in place or trained. The context is
    free if neither mode is active, as in most backward passes.
    """
    if torch.is_inference_mode_enabled():
        return _outside_inference()
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING
