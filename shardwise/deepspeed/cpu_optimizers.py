"""DeepSpeed's own optimizers by name and arguments. Each runs wherever its shards are; what offloads them is the
configuration."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.optim import CPUAdam
from shardwise.core.optim.lamb import BoundedLamb
from shardwise.core.optim.lion import Lion

__all__ = ["DeepSpeedCPUAdagrad", "DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLamb", "FusedLion"]

Betas = tuple[float, float]


def _only(cls: type, name: str, value: Any, wanted: Any, instead: str) -> None:
    if value != wanted:
        raise NotImplementedError(f"{cls.__name__}({name}={value!r}) is not available; {instead}")


class DeepSpeedCPUAdam(CPUAdam):
    """AdamW, or Adam with ``adamw_mode=False``. Steps are made in fp32 (fp64 of such parameters) and rounded once.

    Moments are fp32 as well. With ``fp32_optimizer_states=False`` they have the dtype of what is updated: of the
    parameters, or of their masters, which are fp32 unless the configuration has 16-bit ones.

    Raises:
        NotImplementedError: ``amsgrad``.
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
        super().__init__(model_params, lr, bias_correction, betas, eps, weight_decay, adamw_mode)
        self.wide_moments = bool(fp32_optimizer_states)

    @property
    def fp32_optimizer_states(self) -> bool:
        """Whether moments are fp32 whatever is updated."""
        return self.wide_moments


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

    State has the dtype of what is updated, whatever ``fp32_optimizer_states`` says: of fp32 masters, where there are
    some.

    Raises:
        NotImplementedError: ``amsgrad``.
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
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """:class:`~shardwise.core.optim.lion.Lion` with DeepSpeed's arguments; state is as
    :class:`DeepSpeedCPUAdagrad`'s."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(model_params, lr, betas, weight_decay)


class FusedLion(Lion):
    """:class:`~shardwise.core.optim.lion.Lion` with DeepSpeed's arguments; ``set_grad_none`` has no effect."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Betas = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, weight_decay)


class FusedLamb(BoundedLamb):
    """LAMB on any device, with DeepSpeed's arguments; sharded, each parameter is whole on one rank.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: of both moments.
        betas: of the moments.
        eps: beside the root of the second one, or in it.
        eps_inside_sqrt: in it.
        weight_decay: decoupled, but within the ratio of norms.
        max_grad_norm: 0 only: clip with ``gradient_clipping`` of the configuration.
        max_coeff: most that the ratio of norms may be.
        min_coeff: least that it may be.
        amsgrad: not available.

    Raises:
        RuntimeError: ``amsgrad``.
        ValueError: ``max_grad_norm``, or a number that is none.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"FusedLamb has no AMSGrad variant (amsgrad={amsgrad}): leave it out")
        if max_grad_norm:
            raise ValueError(f"max_grad_norm={max_grad_norm}: give gradient_clipping in the configuration instead")
        bounds = (min_coeff, max_coeff)
        super().__init__(params, lr, bias_correction, betas, eps, eps_inside_sqrt, weight_decay, bounds)
