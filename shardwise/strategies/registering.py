"""The strategies' classes for one of Lightning's packages, and the names under which its Trainer finds them."""

from __future__ import annotations

from typing import Any

from shardwise.strategies.colossalai import ColossalAI, FabricColossalAI
from shardwise.strategies.deepspeed import DeepSpeed, FabricDeepSpeed
from shardwise.strategies.fully_sharded import FabricFullySharded, FullyShardedStrategy
from shardwise.strategies.namespace import Namespace, build
from shardwise.strategies.precision import CastingPrecision, ColossalAIPrecision, ShardedPrecision
from shardwise.strategies.single_file import read_directories

__all__ = ["STAGES", "classes", "fabric_classes", "register", "take_over_deepspeed_names"]

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
    ddp, precision = "strategies.ddp.DDPStrategy", "plugins.precision.precision.Precision"
    bodies: dict[str, tuple[type, str]] = {
        "ColossalAIPrecisionPlugin": (ColossalAIPrecision, precision),
        "ColossalAIStrategy": (ColossalAI, ddp),
        "DDPFullyShardedStrategy": (FullyShardedStrategy, ddp),
        "DeepSpeedStrategy": (DeepSpeed, ddp),
        "ShardedPrecision": (ShardedPrecision, precision),
    }
    return {name: build(namespace, body, base, name) for name, (body, base) in bodies.items()}


def fabric_classes(namespace: Namespace) -> dict[str, Any]:
    """The same of one of Fabric's packages."""
    namespace.check_version()
    ddp = "strategies.ddp.DDPStrategy"
    bodies: dict[str, tuple[type, str]] = {
        "ColossalAIStrategy": (FabricColossalAI, ddp),
        "DDPFullyShardedStrategy": (FabricFullySharded, ddp),
        "DeepSpeedStrategy": (FabricDeepSpeed, ddp),
        "ShardedPrecision": (CastingPrecision, "plugins.precision.precision.Precision"),
    }
    made = {name: build(namespace, body, base, name) for name, (body, base) in bodies.items()}
    for name, (_, base) in bodies.items():
        if base == ddp:  # an interface, which has no more than a name
            namespace.load("strategies.strategy._Sharded").register(made[name])
    return made


def _registry(namespace: Namespace) -> Any:
    name = "STRATEGY_REGISTRY" if namespace.of_fabric else "StrategyRegistry"
    return namespace.load(f"strategies.{name}")


def _made(namespace: Namespace) -> dict[str, Any]:
    return fabric_classes(namespace) if namespace.of_fabric else classes(namespace)


def register(namespace: Namespace) -> None:
    """Make the strategies known by name. A name that somebody registered before is replaced."""
    registry, made = _registry(namespace), _made(namespace)
    read_directories(namespace)
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
    registry, deepspeed = _registry(namespace), _made(namespace)["DeepSpeedStrategy"]
    registry.register("deepspeed", deepspeed, "ZeRO stage 2 (shardwise)", override=True)
    _register_stages(registry, "deepspeed_", deepspeed)
