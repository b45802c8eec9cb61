"""How much training state a rank holds, and how much an unsharded run would.

Counted are parameters, gradients, fp32 master weights and optimizer state; not activations, nor the program itself.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwise.build import ShardedModule

__all__ = ["held_bytes", "unsharded_bytes"]

# fp32: parameter, gradient and Adam's two moments, 4 bytes each. Mixed: 2 + 2, and 4 each for master and moments.
ADAM_BYTES_PER_PARAMETER = 16


def unsharded_bytes(parameters: int) -> int:
    """What one process would hold to train that many parameters with Adam, in fp32 as in mixed precision."""
    return ADAM_BYTES_PER_PARAMETER * parameters


def _local_bytes(tensors: Iterable[Tensor | None]) -> int:
    seen: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            seen[local.data_ptr()] = max(seen.get(local.data_ptr(), 0), local.numel() * local.element_size())
    return sum(seen.values())


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes on this rank now: from the engine where it trains, otherwise counted from the tensors.

    Call it between backward and the step, when gradients are there. Where parameters are gathered in turns, the most
    that was ever gathered counts.
    """
    if isinstance(model, ShardedModule):
        report = model.memory()
        return report.total_bytes - report.copied_bytes + report.peak_copied_bytes
    parameters = list(model.parameters())
    moments = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    gradients = (parameter.grad for parameter in parameters)
    return _local_bytes(parameters) + _local_bytes(gradients) + _local_bytes(moments)
