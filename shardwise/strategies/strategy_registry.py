"""The strategies' classes for each of Lightning's packages, and their registered names."""

from __future__ import annotations

from typing import Any

from shardwise.strategies.colossalai import ColossalAI, FabricColossalAI
from shardwise.strategies.consolidate_checkpoint import read_directories
from shardwise.strategies.deepspeed import DeepSpeed, FabricDeepSpeed
from shardwise.strategies.fully_sharded import FabricFullySharded, FullyShardedStrategy
from shardwise.strategies.lightning_packages import Namespace, build
from shardwise.strategies.precision import CastingPrecision, ColossalAIPrecision, ShardedPrecision
from shardwise.strategies.trainer import MetricsCallback

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
"""DeepSpeed's strategy names without prefix, with their description and arguments."""


_DDP, _PRECISION = "strategies.ddp.DDPStrategy", "plugins.precision.precision.Precision"
_OF_TRAINER: dict[str, tuple[type, str]] = {
    "ColossalAIPrecisionPlugin": (ColossalAIPrecision, _PRECISION),
    "ColossalAIStrategy": (ColossalAI, _DDP),
    "DDPFullyShardedStrategy": (FullyShardedStrategy, _DDP),
    "DeepSpeedStrategy": (DeepSpeed, _DDP),
    "MetricsCallback": (MetricsCallback, "callbacks.Callback"),
    "ShardedPrecision": (ShardedPrecision, _PRECISION),
}
_OF_FABRIC: dict[str, tuple[type, str]] = {
    "ColossalAIStrategy": (FabricColossalAI, _DDP),
    "DDPFullyShardedStrategy": (FabricFullySharded, _DDP),
    "DeepSpeedStrategy": (FabricDeepSpeed, _DDP),
    "ShardedPrecision": (CastingPrecision, _PRECISION),
}
"""Exported names, with the class body and the class of Lightning that it extends."""


def classes(namespace: Namespace) -> dict[str, Any]:
    """Return the classes that ``namespace.home`` exports, by name.

    Raises:
        ImportError: this version of Lightning is too old or too new.
    """
    namespace.check_version()
    bodies = _OF_FABRIC if namespace.of_fabric else _OF_TRAINER
    made = {name: build(namespace, body, base, name) for name, (body, base) in bodies.items()}
    for name, (_, base) in bodies.items():
        if namespace.of_fabric and base == _DDP:  # an interface without methods
            namespace.load("strategies.strategy._Sharded").register(made[name])
    return made


def _registry(namespace: Namespace) -> Any:
    return namespace.load(f"strategies.{'STRATEGY_REGISTRY' if namespace.of_fabric else 'StrategyRegistry'}")


def register(namespace: Namespace) -> list[Any]:
    """Register the strategies' names, replacing earlier ones; return the classes in the order of their names."""
    registry, made = _registry(namespace), classes(namespace)
    read_directories(namespace)
    for name, strategy, meaning in (
        ("colossalai", made["ColossalAIStrategy"], "Gemini: chunks on device and host"),
        ("shardwise_colossalai", made["ColossalAIStrategy"], "Gemini: chunks on device and host"),
        ("ddp_fully_sharded", made["DDPFullyShardedStrategy"], "Fully sharded data parallel"),
    ):
        registry.register(name, strategy, f"{meaning} (shardwise)", override=True)
    _register_stages(registry, "shardwise_deepspeed_", made["DeepSpeedStrategy"])
    return [made[name] for name in sorted(made)]


def _register_stages(registry: Any, prefix: str, deepspeed: Any) -> None:
    for name, (meaning, arguments) in STAGES.items():
        registry.register(prefix + name, deepspeed, f"{meaning} (shardwise)", override=True, **arguments)


def take_over_deepspeed_names(namespace: Namespace) -> None:
    """Make ``"deepspeed"`` and ``"deepspeed_stage_..."`` mean our ``DeepSpeedStrategy`` in this process."""
    registry, deepspeed = _registry(namespace), classes(namespace)["DeepSpeedStrategy"]
    registry.register("deepspeed", deepspeed, "ZeRO stage 2 (shardwise)", override=True)
    _register_stages(registry, "deepspeed_", deepspeed)
