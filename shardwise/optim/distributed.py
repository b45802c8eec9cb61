"""ColossalAI's second names of optimizers that need whole tensors.

There each has a version that exchanges norms and rows between ranks. Here a rank has a tensor whole when it updates it
(``docs/optim.md``), so both names are one optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardwise.checked import as_kind
from shardwise.optim.factored import CAME, Adafactor
from shardwise.optim.galore import GaLoreAdamW8bit
from shardwise.optim.lamb import Lamb

__all__ = ["DistGaloreAwamW", "DistributedAdaFactor", "DistributedCAME", "DistributedLamb", "cast_to_distributed"]


class _Distributed(torch.optim.Optimizer):
    def setup_distributed(
        self,
        tp_group: dist.ProcessGroup | None = None,
        dp_group: dist.ProcessGroup | None = None,
        shard_to_working_param: Mapping[int, torch.Tensor] | None = None,
        padding_map: Mapping[int, int] | None = None,
        is_zero: bool = False,
        use_zero: bool | None = None,
    ) -> None:
        """Nothing is left to do where parameters are whole, under a plugin or without.

        Args:
            tp_group: of ranks with parts of the same layers; of one rank, since these optimizers need whole layers.
            dp_group: of ranks with the same parameters.
            shard_to_working_param: where parameters are shards of others: none.
            padding_map: of these.
            is_zero, use_zero: whether they are.

        Raises:
            ValueError: parameters are parts of others, which are then updated as if they were whole.
        """
        if tp_group is not None and tp_group.size() > 1:
            raise ValueError(
                f"tp_group has {tp_group.size()} ranks: {type(self).__name__} needs whole layers; give it to boost() "
                "with tp_size=1"
            )
        sharded = [key for key, value in (shard_to_working_param or {}).items() if not self._is_own(key, value)]
        if sharded:
            raise ValueError(
                f"shard_to_working_param has {len(sharded)} parameters that are shards of others: give the optimizer "
                "the parameters themselves, and let boost() shard them"
            )

    def _is_own(self, key: int, value: torch.Tensor) -> bool:
        own = {id(param): param for group in self.param_groups for param in group["params"]}
        return key in own and own[key] is value


class DistributedLamb(_Distributed, Lamb):
    """:class:`~shardwise.optim.lamb.Lamb` with bias correction as its default."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        bias_correction: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction)


class DistributedCAME(_Distributed, CAME):
    """:class:`~shardwise.optim.factored.CAME`."""


class DistributedAdaFactor(_Distributed, Adafactor):
    """:class:`~shardwise.optim.factored.Adafactor`."""


class DistGaloreAwamW(_Distributed, GaLoreAdamW8bit):
    """:class:`~shardwise.optim.galore.GaLoreAdamW8bit`."""


_DISTRIBUTED: dict[type[torch.optim.Optimizer], type[torch.optim.Optimizer]] = {
    Lamb: DistributedLamb,
    CAME: DistributedCAME,
    Adafactor: DistributedAdaFactor,
    GaLoreAdamW8bit: DistGaloreAwamW,
}


def cast_to_distributed(optim: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """``optim`` itself, which from here on is of the class of its second name, where it has one.

    Raises:
        TypeError: it is no optimizer.
    """
    as_kind("optim", optim, torch.optim.Optimizer, "an optimizer of torch's kind")
    optim.__class__ = _DISTRIBUTED.get(type(optim), type(optim))
    return optim
