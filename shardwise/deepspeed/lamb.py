"""DeepSpeed's name of LAMB."""

from __future__ import annotations

from typing import Any

from shardwise.optim.lamb import BoundedLamb

__all__ = ["FusedLamb"]


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
