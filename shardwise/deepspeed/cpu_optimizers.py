"""DeepSpeed's own optimizers by name and arguments. Each runs wherever its shards are; what offloads them is the
configuration."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.optim import CPUAdam
from shardwise.optim.lion import Lion

__all__ = ["DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion"]

Betas = tuple[float, float]


def _only(cls: type, name: str, value: Any, wanted: Any, instead: str) -> None:
    if value != wanted:
        raise NotImplementedError(f"{cls.__name__}({name}={value!r}) is not available; {instead}")


class DeepSpeedCPUAdam(CPUAdam):
    """AdamW, or Adam with ``adamw_mode=False``. Its state has the dtype of the masters, fp32 in mixed precision.

    Raises:
        NotImplementedError: ``amsgrad``, or state in 16 bits.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _only(type(self), "amsgrad", amsgrad, False, "use torch.optim.AdamW(amsgrad=True)")
        _only(type(self), "fp32_optimizer_states", fp32_optimizer_states, True, "leave it True")
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode)


class FusedAdam(CPUAdam):
    """As :class:`DeepSpeedCPUAdam`, with the arguments of ``deepspeed.ops.adam.FusedAdam`` in their order.

    ``set_grad_none`` has no effect: gradients are always dropped.

    Raises:
        NotImplementedError: ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _only(type(self), "amsgrad", amsgrad, False, "use torch.optim.AdamW(amsgrad=True)")
        super().__init__(params, lr, bias_correction, betas, eps, weight_decay, bool(adam_w_mode))


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad with DeepSpeed's defaults.

    Raises:
        NotImplementedError: ``amsgrad``, or state in 16 bits.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _only(type(self), "amsgrad", amsgrad, False, "leave it False")
        _only(type(self), "fp32_optimizer_states", fp32_optimizer_states, True, "leave it True")
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """:class:`~shardwise.optim.lion.Lion` with DeepSpeed's arguments.

    Raises:
        NotImplementedError: state in 16 bits.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        _only(type(self), "fp32_optimizer_states", fp32_optimizer_states, True, "leave it True")
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(Lion):
    """:class:`~shardwise.optim.lion.Lion` with DeepSpeed's arguments; ``set_grad_none`` has no effect."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)
