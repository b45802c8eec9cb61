"""``from shardwise.nn.optimizer import HybridAdam``, as ``colossalai.nn.optimizer`` is imported from."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardwise.optim import CPUAdam, FusedAdam, HybridAdam
from shardwise.optim.fused_sgd import FusedSGD
from shardwise.optim.lamb import FusedLAMB, Lamb
from shardwise.worlds.absent import refusing

__all__ = ["CPUAdam", "FusedAdam", "FusedLAMB", "FusedSGD", "HybridAdam", "Lamb"]

_ADAFACTOR = "use torch.optim.Adafactor, which boost() shards"
_LOW_RANK = "use torch.optim.Adafactor or torch.optim.Muon, which keep less state than Adam, or LoRA"
INSTEAD = {
    "Adafactor": _ADAFACTOR,
    "CAME": _ADAFACTOR,
    "DistGaloreAwamW": _LOW_RANK,
    "DistributedAdaFactor": _ADAFACTOR,
    "DistributedCAME": _ADAFACTOR,
    "DistributedLamb": "use Lamb(bias_correction=True), which boost() shards",
    "GaLoreAdafactor": _LOW_RANK,
    "GaLoreAdamW": _LOW_RANK,
    "GaLoreAdamW8bit": _LOW_RANK,
    "Lars": "use Lamb, or torch.optim.SGD with momentum",
    "cast_to_distributed": "leave the call out, since boost() shards the optimizer as it is",
    "get_galore_param_groups": _LOW_RANK,
}
"""ColossalAI's other names, each with what to do. They can be imported, and raise when they are called."""


@cache
def __getattr__(name: str) -> Any:
    if name not in INSTEAD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return refusing(f"{__name__}.{name}", INSTEAD[name])
