"""The strategies' classes for one of Lightning's packages, and the names under which its Trainer finds them."""

from __future__ import annotations

from typing import Any

from shardwise.strategies.colossalai import ColossalAI
from shardwise.strategies.deepspeed import DeepSpeed
from shardwise.strategies.fully_sharded import FullyShardedStrategy
from shardwise.strategies.lightning_precision import ShardedPrecision
from shardwise.strategies.namespace import Namespace, build

__all__ = ["STAGES", "classes", "register", "take_over_deepspeed_names"]

_NVME = {"remote_device": "nvme", "offload_params_device": "nvme", "offload_optimizer_device": "nvme"}
STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "stage_1": ("ZeRO stage 1", {"stage": 1}),
    "stage_2": ("ZeRO stage 2", {"stage": 2}),
    "stage_2_offload": ("ZeRO stage 2, optimizer on the host", {"stage": 2, "offload_optimizer": True}),
    "stage_3": ("ZeRO stage 3", {"stage": 3}),
    "stage_3_offload": (
        "ZeRO stage 3, parameters and optimizer on the host",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
    "stage_3_offload_nvme": (
        "ZeRO stage 3, parameters and optimizer on a disk",
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True, **_NVME},
    ),
}
"""DeepSpeed's names after their prefix, with what they mean."""


def classes(namespace: Namespace) -> dict[str, Any]:
    """What ``namespace.home`` exports, by name.

    Raises:
        ImportError: this version of Lightning is too old or too new.
    """
    namespace.check_version()
    ddp = "strategies.ddp.DDPStrategy"
    bodies: dict[str, tuple[type, str]] = {
        "ColossalAIStrategy": (ColossalAI, ddp),
        "DDPFullyShardedStrategy": (FullyShardedStrategy, ddp),
        "DeepSpeedStrategy": (DeepSpeed, ddp),
        "ShardedPrecision": (ShardedPrecision, "plugins.precision.precision.Precision"),
    }
    return {name: build(namespace, body, base, name) for name, (body, base) in bodies.items()}


def _registry(namespace: Namespace) -> Any:
    return namespace.load("strategies.StrategyRegistry")


def register(namespace: Namespace) -> None:
    """Make the strategies known by name. A name that somebody registered before is replaced."""
    registry, made = _registry(namespace), classes(namespace)
    for name, strategy, meaning in (
        ("colossalai", made["ColossalAIStrategy"], "Gemini: chunks on device and host"),
        ("shardwise_colossalai", made["ColossalAIStrategy"], "Gemini: chunks on device and host"),
        ("ddp_fully_sharded", made["DDPFullyShardedStrategy"], "Fully sharded data parallel"),
    ):
        registry.register(name, strategy, f"{meaning} (shardwise)", override=True)
    _register_stages(registry, "shardwise_deepspeed_", made["DeepSpeedStrategy"])


def _register_stages(registry: Any, prefix: str, deepspeed: Any) -> None:
    for name, (meaning, arguments) in STAGES.items():
        registry.register(prefix + name, deepspeed, f"{meaning} (shardwise)", override=True, **arguments)


def take_over_deepspeed_names(namespace: Namespace) -> None:
    """From here on ``"deepspeed"`` and ``"deepspeed_stage_..."`` mean ours in this process."""
    registry, deepspeed = _registry(namespace), classes(namespace)["DeepSpeedStrategy"]
    registry.register("deepspeed", deepspeed, "ZeRO stage 2 (shardwise)", override=True)
    _register_stages(registry, "deepspeed_", deepspeed)
