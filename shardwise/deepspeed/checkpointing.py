"""``deepspeed.checkpointing``: ``checkpoint(function, *args)`` computes ``function`` again in backward, by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from shardwise.compat import alias_table, lookup
from shardwise.core.base.warnings import warn_user

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

_configured: list[bool] = []


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """No effect: what :func:`checkpoint` keeps are the arguments of each call, whole, where they are. A warning names
    what was asked for."""
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    named = [name for name, value in asked.items() if value]
    if named and not _configured:
        warn_user(
            f"checkpointing.configure({', '.join(named)}) has no effect: arguments of checkpointed calls stay whole on "
            "their device; torch.autograd.graph.save_on_cpu() moves activations to the host"
        )
    _configured[:] = [True]


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return bool(_configured)


def reset() -> None:
    """Nothing: no buffers are kept."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, computed again in backward: ``torch.utils.checkpoint`` without reentrance."""
    return torch_checkpoint(function, *args, use_reentrant=False)


def __getattr__(name: str) -> Any:
    """What DeepSpeed has there and this file does not."""
    return lookup(alias_table("deepspeed"), "runtime.activation_checkpointing.checkpointing", name)
