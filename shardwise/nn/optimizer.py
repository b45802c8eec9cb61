"""``from shardwise.nn.optimizer import HybridAdam``, as ``colossalai.nn.optimizer`` is imported from."""

from __future__ import annotations

from shardwise.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.optim.distributed import (
    DistGaloreAwamW,
    DistributedAdaFactor,
    DistributedCAME,
    DistributedLamb,
    cast_to_distributed,
)
from shardwise.optim.factored import CAME, Adafactor
from shardwise.optim.fused_sgd import FusedSGD
from shardwise.optim.galore import GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit, get_galore_param_groups
from shardwise.optim.lamb import FusedLAMB, Lamb, Lars

__all__ = [
    "CAME",
    "Adafactor",
    "CPUAdam",
    "DistGaloreAwamW",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedLamb",
    "FusedAdam",
    "FusedLAMB",
    "FusedSGD",
    "GaLoreAdafactor",
    "GaLoreAdamW",
    "GaLoreAdamW8bit",
    "HybridAdam",
    "Lamb",
    "Lars",
    "cast_to_distributed",
    "get_galore_param_groups",
]
