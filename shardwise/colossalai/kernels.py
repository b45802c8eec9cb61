"""``kernel_loader``'s optimizer kernels and ``multi_tensor_applier``: Adam's update, called on tensors by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from shardwise.checked import as_kind
from shardwise.optim.adam_tiles import AdamRule, AdamSlot, AdamTiles, moment_dtype

__all__ = ["CPUAdamLoader", "FusedOptimizerLoader", "multi_tensor_applier"]

CHUNK_NUMEL = 2**16


def multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: torch.Tensor, tensor_lists: Sequence[Sequence[torch.Tensor]], *args: Any
) -> Any:
    """``op(elements, noop_flag_buffer, tensor_lists, *args)``, as such kernels are called."""
    as_kind("op", op, Callable, "a kernel, such as FusedOptimizerLoader().load().multi_tensor_adam")  # type: ignore[arg-type]
    return op(CHUNK_NUMEL, noop_flag_buffer, tensor_lists, *args)


class CPUAdamOptimizer:
    """Adam on the host, a parameter at a time.

    Args:
        lr: as all others a default that each ``step`` gives anew.
        adamw_mode: decoupled weight decay; this one holds for every step.
    """

    def __init__(
        self, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, adamw_mode: bool = True
    ) -> None:
        self.defaults = AdamRule(lr, beta1, beta2, eps, weight_decay, adamw_mode)

    def step(
        self,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        bias_correction: bool,
        *tensors_and_scale: Any,
    ) -> None:
        """One update in place.

        Args:
            step: how many this one makes.
            bias_correction: divide the moments by ``1 - beta**step``.
            tensors_and_scale: parameter, gradient, first and second moment, alike in shape; then what the gradient is
                divided by, where it is above 0.
        """
        *tensors, loss_scale = tensors_and_scale
        rule = AdamRule(lr, beta1, beta2, eps, weight_decay, self.defaults.decoupled, bool(bias_correction))
        _update([tensors], step, rule, loss_scale)


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: torch.Tensor,
    tensor_lists: Sequence[Sequence[torch.Tensor]],
    *numbers: Any,
) -> None:
    """One update of many parameters in place, on whichever device they are.

    Args:
        chunk_size: without effect.
        noop_flag: nothing is updated where it is not 0.
        tensor_lists: gradients, parameters, first and second moments.
        numbers: lr, beta1, beta2, eps, the step, 1 for decoupled weight decay, 1 for bias correction, weight decay, and
            what gradients are divided by, where it is above 0.
    """
    if bool(noop_flag.any()):
        return
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay, div_scale = numbers
    rule = AdamRule(lr, beta1, beta2, eps, weight_decay, bool(mode), bool(bias_correction))
    _update([(p, g, m, v) for g, p, m, v in zip(*tensor_lists, strict=True)], step, rule, div_scale)


@torch.no_grad()
def _update(each: Sequence[Sequence[torch.Tensor]], step: int, rule: AdamRule, divisor: float) -> None:
    slots, moments = [], []
    for param, grad, first, second in each:
        wide = [moment.to(moment_dtype(param)) for moment in (first, second)]
        moments += list(zip((first, second), wide, strict=True))
        slots.append(AdamSlot(param, grad, wide[0], wide[1], torch.tensor(float(step), device=param.device)))
    AdamTiles().update(slots, rule, 1.0 / divisor if divisor > 0 else 1.0)
    for moment, updated in moments:
        if moment is not updated:
            moment.copy_(updated)


class CPUAdamLoader:
    """Loads nothing: torch's own kernels are used."""

    def load(self) -> SimpleNamespace:
        """What has ``CPUAdamOptimizer``."""
        return SimpleNamespace(CPUAdamOptimizer=CPUAdamOptimizer)


class FusedOptimizerLoader:
    """Loads nothing: torch's own kernels are used."""

    def load(self) -> SimpleNamespace:
        """What has ``multi_tensor_adam``."""
        return SimpleNamespace(multi_tensor_adam=multi_tensor_adam)
