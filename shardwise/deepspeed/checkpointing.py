"""``deepspeed.checkpointing``: activation checkpointing by ``torch.utils.checkpoint``."""

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
    """Do nothing, and warn about options that were set: :func:`checkpoint` saves the full arguments of each call in
    place.
    """
    options = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    named = [name for name, value in options.items() if value]
    if named and not _configured:
        warn_user(
            f"checkpointing.configure({', '.join(named)}) has no effect: arguments of checkpointed calls stay whole on "
            "their device; torch.autograd.graph.save_on_cpu() moves activations to the host"
        )
    _configured[:] = [True]


def is_configured() -> bool:
    """Return True if :func:`configure` was called."""
    return bool(_configured)


def reset() -> None:
    """Do nothing, because there are no buffers."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, which backward recomputes with the non-reentrant ``torch.utils.checkpoint``."""
    return torch_checkpoint(function, *args, use_reentrant=False)


def __getattr__(name: str) -> Any:
    """Return DeepSpeed's other names of this module."""
    return lookup(alias_table("deepspeed"), "runtime.activation_checkpointing.checkpointing", name)
