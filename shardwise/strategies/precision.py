"""Lightning's precisions as number formats, and the precision plugins for the Trainer and Fabric."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.strategies.lightning_packages import Namespace, build
from shardwise.strategies.sessions import scaled_pass


@dataclass(frozen=True)
class NumberFormat:
    """The number format of a precision.

    Attributes:
        name: Lightning's name.
        dtype: compute dtype; ``None``: each parameter's own.
        masters: whether the optimizer updates fp32 copies of the parameters.
        scaled: whether losses are scaled.
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
    """Return the number format of ``precision``, which may be a short form of Lightning 1.x (``16``, ``"bf16"``).

    Raises:
        ValueError: ``precision`` is not in :data:`PRECISIONS`.
    """
    name = str(precision)
    number_format = PRECISIONS.get(_SHORT.get(name, name))
    if number_format is None:
        raise ValueError(
            f"precision={precision!r} is not available in sharded strategies; give one of {', '.join(PRECISIONS)}"
        )
    return number_format


REPLACEABLE = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision", "FSDPPrecision", "DeepSpeedPrecision")


def as_sharded(namespace: Namespace, body: type, plugin: Any) -> Any:
    """Return ``plugin`` if it derives from ``body``, or else the plugin of its precision that does.

    Args:
        namespace: Lightning's package.
        body: :class:`CastingPrecision` or :class:`ShardedPrecision`.
        plugin: a plugin that Lightning or the user chose; ``None`` is fp32.

    Raises:
        TypeError: the plugin has another class, whose effect would be lost.
        ValueError: the plugin has a loss scale with its own settings.
    """
    if isinstance(plugin, body):
        return plugin
    made = build(namespace, body, "plugins.precision.precision.Precision", "ShardedPrecision")
    if plugin is None:
        return made()
    known = [namespace.find(f"plugins.precision.{name}") for name in REPLACEABLE]
    if type(plugin) not in known:
        raise TypeError(
            f"precision plugin {type(plugin).__name__}: sharded strategies cast and scale by themselves and would not "
            "call it; give the Trainer a precision, or the strategy a ShardedPrecision"
        )
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
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
    return made(plugin.precision)


def correct_throughput(namespace: Namespace, trainer: Any, dtype: torch.dtype) -> None:
    """Make ``ThroughputMonitor`` use the peak throughput of ``dtype``.

    The monitor derives the dtype from the plugin's class and assumes fp32 for ours.
    """
    monitor = namespace.find("callbacks.throughput_monitor.ThroughputMonitor")
    for callback in trainer.callbacks if monitor is not None else ():
        if isinstance(callback, monitor):
            throughput = namespace.load_fabric("utilities.throughput")
            flops = throughput.get_available_flops(trainer.strategy.root_device, dtype)
            for each in (callback, *callback._throughputs.values()):
                each.available_flops = flops


_Precision: Any = object  # Lightning's Precision, once built for a namespace


class CastingPrecision(_Precision):  # type: ignore[misc]
    """A precision plugin whose casts the engine makes.

    The engine casts parameters and inputs, keeps fp32 masters and scales losses. "mixed" does not mean autocast: the
    model computes in 16 bits, as with DeepSpeed and FairScale.

    Args:
        precision: an entry of :data:`PRECISIONS`. As precision plugin of a strategy it allows fp16 on a CPU, where
            Lightning changes ``precision="16-mixed"`` to bf16.
    """

    def __init__(self, precision: Any = "32-true") -> None:
        super().__init__()
        self.format = format_of(precision)
        self.precision = self.format.name

    @contextmanager
    def tensor_init_context(self) -> Iterator[None]:
        """Create tensors inside in the dtype of the ``true`` precisions."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(before if self.format.masters else self.format.dtype or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    module_init_context = tensor_init_context
    forward_context = tensor_init_context


class ShardedPrecision(CastingPrecision):
    """The precision plugin of these strategies for the Trainer. Parameters and inputs are cast; autocast is not used.

    Args:
        precision: a value of ``Trainer(precision=...)``, such as ``"16-mixed"``. Given here, fp16 also works on a CPU,
            where Lightning changes ``precision="16-mixed"`` to bf16.

    Examples:
        >>> import lightning.pytorch as pl
        >>> from shardwise.lightning import DeepSpeedStrategy, ShardedPrecision
        >>> precision = ShardedPrecision("bf16-mixed")
        >>> trainer = pl.Trainer(strategy=DeepSpeedStrategy(stage=3), plugins=[precision], devices=2)
    """

    def __init__(self, precision: Any = "32-true") -> None:
        super().__init__(precision)
        self.clips: Callable[[float, str], bool] | None = None
        """Returns whether to apply the Trainer's clipping, by value and algorithm; ``None``: always."""

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run ``model.backward`` with the loss scale."""
        with scaled_pass(model.trainer.strategy.session, tensor) as scaled:
            model.backward(scaled, *args, **kwargs)

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        """Clip gradients, as ``LightningModule.clip_gradients`` asks."""
        algorithm = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
        if clip_val > 0 and (self.clips is None or self.clips(float(clip_val), algorithm)):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip the averaged, unscaled gradients of ``optimizer`` by their global norm."""
        if hasattr(optimizer, "clip_grad_by_norm"):
            optimizer.clip_grad_by_norm(float(clip_val))

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        """Clip each element of the averaged, unscaled gradients."""
        if hasattr(optimizer, "clip_grad_by_value"):
            optimizer.clip_grad_by_value(float(clip_val))


class ColossalAIPrecision(ShardedPrecision):
    """:class:`ShardedPrecision` whose default is fp16 with a loss scale.

    Args:
        precision: as for :class:`ShardedPrecision`; Lightning's class only accepts ``"16-mixed"``.
    """

    def __init__(self, precision: Any = "16-mixed") -> None:
        super().__init__(precision)
