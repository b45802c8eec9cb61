"""Who beside its owners reads a parameter: autograd, which saves some parameters themselves, or code that keeps one.

A view of a gathered array has an identity of its own and keeps its array. The parameter does not: it is pointed
elsewhere at eviction, for all who hold it. So before it is, they are counted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from shardwise.core.base.torch_internals import tensor_holders

__all__ = ["is_read", "python_holders"]


# [Note: Who counts as a reader]
# Whoever keeps the parameter itself: norms, attention and RNNs save it, kernels put it on their ``ctx``, programs keep
# lists. Two counts tell, because neither sees all.
# * torch's, of the tensor: its Python object is one, the node that accumulates its gradient another; more is a graph.
# * Python's, of the object: compared with what it was when the parameter was pointed at the gathered array, since
#   modules, hooks and the user's own lists hold it for good. More than then is somebody who took it since.
# Both err on one side: a list that a forward pass made and kept looks like a reader, so its unit stays gathered, which
# costs memory. A reader that was not counted would cost right numbers.
def _added_by_torch() -> int:
    """How many references Python counts more as long as torch itself holds a tensor, however often."""
    param = nn.Parameter(torch.empty(1, device="cpu"))
    before = sys.getrefcount(param)
    view = param.view(1)  # holds its base
    added = sys.getrefcount(param) - before
    del view
    return added


_ADDED = _added_by_torch()


def python_holders(params: Sequence[nn.Parameter]) -> list[int]:
    """Python's references to each, to be compared by :func:`is_read` with those at a later time."""
    # Counted here, where one more name holds each, whoever asks.
    return [sys.getrefcount(param) - (_ADDED if tensor_holders(param) > 1 else 0) for param in params]


def is_read(params: Sequence[nn.Parameter], holders: Sequence[int], in_transform: bool) -> bool:
    """Whether a graph holds any of them, or Python holds it more often than when ``holders`` were counted.

    Args:
        params: the parameters.
        holders: what :func:`python_holders` gave for them.
        in_transform: a ``torch.func`` transform uses them, whose wrappers hold a parameter without a graph.
    """
    # Nothing but the comprehensions may name a parameter here, which would count as a holder.
    if in_transform:
        saved = True in [_saved_in_transform(param) for param in params]
    else:
        # Beside its Python object, the node that accumulates its gradient holds it as long as any graph leads there.
        saved = True in [tensor_holders(param) > 1 + param.requires_grad for param in params]
    now = python_holders(params)
    return saved or (now != holders and any(each > before for each, before in zip(now, holders, strict=True)))


def _saved_in_transform(param: nn.Parameter) -> bool:
    if not param.requires_grad:
        return tensor_holders(param) > 1
    edge = get_gradient_edge(param)  # makes that node if there is none: two owners for certain
    return edge is not None and tensor_holders(param) > 2
