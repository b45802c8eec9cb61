"""Precision: Lightning's words for number formats, and the plugin through which it clips and runs backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.strategies.namespace import Namespace
from shardwise.strategies.sessions import scaled_pass

__all__ = [
    "PRECISIONS",
    "CastingPrecision",
    "ColossalAIPrecision",
    "NumberFormat",
    "ShardedPrecision",
    "check_replaceable",
    "correct_throughput",
    "format_of",
]


@dataclass(frozen=True)
class NumberFormat:
    """What a precision means.

    Attributes:
        name: Lightning's.
        dtype: in which is computed; ``None`` for each parameter's own.
        masters: whether fp32 copies of the parameters are updated.
        scaled: whether losses need a scale.
    """

    name: str
    dtype: torch.dtype | None
    masters: bool
    scaled: bool


PRECISIONS: dict[str, NumberFormat] = {
    each.name: each
    for each in (
        NumberFormat("32-true", None, False, False),
        NumberFormat("64-true", torch.float64, False, False),
        NumberFormat("16-mixed", torch.float16, True, True),
        NumberFormat("bf16-mixed", torch.bfloat16, True, False),
        NumberFormat("16-true", torch.float16, False, False),
        NumberFormat("bf16-true", torch.bfloat16, False, False),
    )
}
_SHORT = {"32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def format_of(precision: Any) -> NumberFormat:
    """What ``precision`` means; the short forms of Lightning 1.x (``16``, ``"bf16"``) included.

    Raises:
        ValueError: it is none of :data:`PRECISIONS`.
    """
    name = str(precision)
    found = PRECISIONS.get(_SHORT.get(name, name))
    if found is None:
        raise ValueError(f"precision={precision!r}: a sharded strategy runs in {', '.join(PRECISIONS)}")
    return found


REPLACEABLE = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision", "FSDPPrecision", "DeepSpeedPrecision")


def check_replaceable(namespace: Namespace, plugin: Any) -> None:
    """Whether :class:`ShardedPrecision` does what ``plugin`` would: those that Lightning chooses itself.

    Raises:
        TypeError: it is another; what it does would be lost.
        ValueError: it has a loss scale with settings of its own.
    """
    known = [namespace.find(f"plugins.precision.{name}") for name in REPLACEABLE]
    if type(plugin) not in known:
        raise TypeError(
            f"precision plugin {type(plugin).__name__}: sharded strategies cast and scale by themselves and would not "
            "call it; give the Trainer a precision, or the strategy a ShardedPrecision"
        )
    scaler = getattr(plugin, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return
    settings = {
        "init_scale": getattr(scaler, "_init_scale", 2.0**16),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
    }
    if tuple(settings.values()) != (2.0**16, 2.0, 0.5, 2000):
        raise ValueError(
            f"a GradScaler with {settings}: sharded strategies scale by themselves; give the numbers to a strategy "
            "that has arguments for them (ColossalAIStrategy, DeepSpeedStrategy)"
        )


def correct_throughput(namespace: Namespace, trainer: Any, dtype: torch.dtype) -> None:
    """Have ``ThroughputMonitor`` count by the operations a second of ``dtype``.

    It looks the dtype up by the plugin's class, and takes ours for fp32. Its hook ran before.
    """
    monitor = namespace.find("callbacks.throughput_monitor.ThroughputMonitor")
    for callback in trainer.callbacks if monitor is not None else ():
        if isinstance(callback, monitor):
            flops = namespace.load_fabric("utilities.throughput").get_available_flops(
                trainer.strategy.root_device, dtype
            )
            for each in (callback, *callback._throughputs.values()):
                each.available_flops = flops


def _always(_value: float, _algorithm: str) -> bool:
    return True


_Precision: Any = object  # Lightning's Precision, once built for a namespace


class CastingPrecision(_Precision):  # type: ignore[misc]
    """A plugin for number formats that the engine takes care of.

    The engine casts parameters and inputs, keeps fp32 masters and scales losses; so "mixed" is no autocast here: the
    model computes in 16 bits, as it does with DeepSpeed and FairScale.

    Args:
        precision: one of :data:`PRECISIONS`. Given to a strategy as its precision plugin it also gives fp16 on a CPU,
            where Lightning makes bf16 of ``precision="16-mixed"``.
    """

    def __init__(self, precision: Any = "32-true") -> None:
        super().__init__()
        self.format = format_of(precision)
        self.precision = self.format.name

    def convert_module(self, module: Any) -> Any:
        """The engine casts."""
        return module

    @property
    def _half(self) -> torch.dtype | None:
        return None if self.format.masters else self.format.dtype

    @contextmanager
    def _default_dtype(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self._half or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Tensors made inside have the dtype of the ``true`` precisions."""
        return self._default_dtype() if self._half is not None else nullcontext()

    module_init_context = tensor_init_context
    forward_context = tensor_init_context


class ShardedPrecision(CastingPrecision):
    """Replaces the plugin that Lightning's Trainer chooses for a sharded strategy.

    Args:
        precision: see :class:`CastingPrecision`.
    """

    def __init__(self, precision: Any = "32-true") -> None:
        super().__init__(precision)
        self.clips: Callable[[float, str], bool] = _always
        """Whether a clipping by the Trainer is done, by value and algorithm; the strategy may have its own."""

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """``model.backward`` inside a pass of the engine, with the loss scale."""
        with scaled_pass(model.trainer.strategy.session, tensor) as scaled:
            model.backward(scaled, *args, **kwargs)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """What ``LightningModule.clip_gradients`` calls."""
        algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        if clip_val > 0 and self.clips(float(clip_val), algorithm):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Of all ranks' averaged, unscaled gradients of ``optimizer``; torch's factor."""
        if hasattr(optimizer, "clip_grad_by_norm"):
            optimizer.clip_grad_by_norm(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Each element of the averaged, unscaled gradients."""
        if hasattr(optimizer, "clip_grad_by_value"):
            optimizer.clip_grad_by_value(float(clip_val))


class ColossalAIPrecision(ShardedPrecision):
    """``ColossalAIPrecisionPlugin``, which is for fp16 with a loss scale where nothing else is said.

    Args:
        precision: see :class:`CastingPrecision`; the published one takes ``"16-mixed"`` alone.
    """

    def __init__(self, precision: Any = "16-mixed") -> None:
        super().__init__(precision)
