"""SGD under the name and with the arguments that ColossalAI has for its fused kernel."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.base.validate import as_params
from shardwise.core.optim.whole_tensors import check_least


class FusedSGD(torch.optim.SGD):
    """``torch.optim.SGD``, by torch's kernels.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, which has to be given.
        momentum: factor of the previous update; 0: no momentum.
        dampening: fraction of the gradient that momentum leaves out.
        weight_decay: L2 penalty, added to the gradient.
        nesterov: Nesterov momentum.
        wd_after_momentum: False; decay is added to gradients.

    Raises:
        NotImplementedError: ``wd_after_momentum`` is True.
        ValueError: a number is out of its range, or ``nesterov`` without momentum.

    Examples:
        >>> from shardwise.nn.optimizer import FusedSGD
        >>> session = shardwise.shard(model, FusedSGD(model.parameters(), lr=0.1, momentum=0.9), stage=2)
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise NotImplementedError(
                f"wd_after_momentum={wd_after_momentum}: decay that does not go through the momentum is that of "
                "torch.optim.AdamW and its like; leave it out"
            )
        check_least("lr", lr)
        super().__init__(as_params(params), lr, momentum, dampening, weight_decay, nesterov)
