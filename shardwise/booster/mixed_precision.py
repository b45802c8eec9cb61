"""Autocast and the loss scale, for plugins without their own precision (DDP, or no plugin)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.booster.wrappers import ModelWrapper, OptimizerWrapper, unwrap_optimizer
from shardwise.core.base.module_wrapper import attribute_of
from shardwise.core.base.validate import MOST_SCALE, integer, number

Criterion = Callable[..., Any]
Configured = tuple[nn.Module, torch.optim.Optimizer | None, Criterion | None]


class MixedPrecision(ABC):
    """Changes model, optimizer and criterion for a lower precision."""

    @abstractmethod
    def configure(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, criterion: Criterion | None = None
    ) -> Configured:
        """Return wrapped model, optimizer and criterion.

        Args:
            model: a plain module.
            optimizer: its optimizer.
            criterion: the loss function.
        """


class AutocastPrecision(MixedPrecision):
    """Runs model and criterion under ``torch.autocast`` with ``dtype``."""

    dtype: torch.dtype

    def configure(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, criterion: Criterion | None = None
    ) -> Configured:
        device = _device_type(model)
        if optimizer is not None:
            optimizer = self.wrap(optimizer, device)
        if criterion is not None:
            criterion = AutocastCriterion(criterion, device, self.dtype)
        return AutocastModel(model, self.dtype), optimizer, criterion

    def wrap(self, optimizer: torch.optim.Optimizer, device_type: str) -> OptimizerWrapper:
        """Return the optimizer with the methods of a boosted one."""
        return optimizer if isinstance(optimizer, OptimizerWrapper) else OptimizerWrapper(optimizer)


def _device_type(module: nn.Module) -> str:
    tensors = (*module.parameters(), *module.buffers())
    return tensors[0].device.type if tensors else "cpu"


class AutocastModel(ModelWrapper):
    """Runs the module's forward under ``torch.autocast``. Parameters keep their own dtypes."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._autocast = (_device_type(module), dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*self._autocast):
            return super().forward(*args, **kwargs)


class AutocastCriterion:
    """Call the criterion under ``torch.autocast``, which computes losses in fp32 if they need it."""

    def __init__(self, criterion: Criterion, device_type: str, dtype: torch.dtype) -> None:
        self.criterion = criterion
        self._autocast = (device_type, dtype)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*self._autocast):
            return self.criterion(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "criterion":
            raise AttributeError(name)
        return attribute_of(self.criterion, name, self)


class ScaledOptimizer(OptimizerWrapper):
    """Multiplies the loss by a dynamic scale and divides gradients by it before they are used.

    Gradients are unscaled with the scale of their backward pass; the scale changes afterwards. ``state_dict`` has the
    scaler's state under ``"scaler"``.
    """

    def __init__(self, optim: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        super().__init__(optim)
        self.scaler = scaler
        self.last_step_skipped = False
        self._unscaled = False

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run ``loss.backward()``, with the loss scale.

        Raises:
            RuntimeError: clipping has unscaled the gradients, so this pass cannot add to them.
        """
        self._check_scaled("backward")
        super().backward(self.scaler.scale(loss), *args, **kwargs)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """Run :meth:`backward` from ``tensor`` with the gradient ``grad`` of its shape."""
        self._check_scaled("backward_by_grad")
        super().backward_by_grad(tensor, self.scaler.scale(grad))

    def _check_scaled(self, what: str) -> None:
        # model.zero_grad(set_to_none=False) leaves zeros, which are the same for every scale.
        if self._unscaled and not self._all_zero():
            raise RuntimeError(
                f"{what}() after clipping, which has divided the gradients by the loss scale "
                f"{self.scaler.get_scale():g}: call step() or zero_grad() of the optimizer first, and clip after the "
                "last backward pass"
            )
        self._leave_unscaled()

    def _leave_unscaled(self) -> None:
        """Update the scale for unscaled gradients that were dropped, as a step would."""
        if self._unscaled:
            self.scaler.update()
            self._unscaled = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the optimizer's ``zero_grad``. Non-finite gradients that clipping has detected lower the scale."""
        super().zero_grad(set_to_none)
        self._leave_unscaled()

    def _unscale(self) -> None:
        if not self._unscaled and self._with_gradients():
            self.scaler.unscale_(unwrap_optimizer(self))
            self._unscaled = True

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        self._unscale()
        return super().clip_grad_by_norm(max_norm, norm_type, error_if_nonfinite)

    def clip_grad_by_value(self, clip_value: float) -> None:
        self._unscale()
        super().clip_grad_by_value(clip_value)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Run the optimizer's step, which is skipped if a gradient is not finite.

        Raises:
            ValueError: there is a closure, because a skipped step would have to run it again.
        """
        if closure is not None:
            raise ValueError(f"closure={closure!r}: an fp16 step cannot take a closure; call backward, then step()")
        if not self._with_gradients():
            return self.optim.step()
        before = self.scaler.get_scale()
        result = self.scaler.step(unwrap_optimizer(self))
        self.scaler.update()
        self._unscaled = False
        self.last_step_skipped = self.scaler.get_scale() < before
        return result

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of optimizer and scaler. A state without ``"scaler"`` does not change the scale."""
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "scaler"})
        if state_dict.get("scaler"):
            self.scaler.load_state_dict(state_dict["scaler"])


class FP16TorchMixedPrecision(AutocastPrecision):
    """fp16 autocast and ``torch.amp.GradScaler``.

    Args:
        init_scale: the first loss scale.
        growth_factor: the scale is multiplied by it after ``growth_interval`` steps without overflow.
        backoff_factor: the scale is multiplied by it after an overflow.
        growth_interval: number of steps without overflow after which the scale grows.
    """

    dtype = torch.float16

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        what = f"a loss scale > 0, at most {MOST_SCALE:g}"
        number("init_scale", init_scale, f"(0, {MOST_SCALE!r}]", what)
        number("growth_factor", growth_factor, f"(1, {MOST_SCALE!r}]", "a factor > 1 and finite")
        number("backoff_factor", backoff_factor, "(0, 1)", "a factor in (0, 1)")
        integer("growth_interval", growth_interval, 1, what="a number of steps")
        self.scaler_arguments: dict[str, Any] = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }

    def wrap(self, optimizer: torch.optim.Optimizer, device_type: str) -> OptimizerWrapper:
        return ScaledOptimizer(optimizer, torch.amp.GradScaler(device_type, **self.scaler_arguments))


class BF16MixedPrecision(AutocastPrecision):
    """bf16 autocast; bf16 has the range of fp32 and needs no loss scale."""

    dtype = torch.bfloat16


_REPLACED = {
    "fp16_apex": "use mixed_precision='fp16', which needs no extension",
    "fp16_naive": "use mixed_precision='fp16', or LowLevelZeroPlugin(precision='fp16') for fp16 parameters",
    "fp8": "use mixed_precision='bf16'",
}


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision:
    """Return the mixed precision of that name: ``"fp16"`` or ``"bf16"``.

    Args:
        mixed_precision_type: ``"fp16"`` or ``"bf16"``.

    Raises:
        NotImplementedError: ``"fp16_apex"``, ``"fp16_naive"`` or ``"fp8"``; the message says what to use.
        ValueError: any other name.
    """
    if mixed_precision_type == "fp16":
        return FP16TorchMixedPrecision()
    if mixed_precision_type == "bf16":
        return BF16MixedPrecision()
    if mixed_precision_type in _REPLACED:
        advice = _REPLACED[mixed_precision_type]
        raise NotImplementedError(f"mixed_precision={mixed_precision_type!r} is not available; {advice}")
    raise ValueError(f"mixed_precision={mixed_precision_type!r}: give 'fp16', 'bf16' or a MixedPrecision")
