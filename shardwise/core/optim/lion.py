"""Lion: the sign of an interpolation between the gradient and its running average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.core.base.validate import as_params, number
from shardwise.core.optim.whole_tensors import loss_of


class Lion(torch.optim.Optimizer):
    """``p <- p * (1 - lr * weight_decay) - lr * sign(b1 * m + (1 - b1) * g)``, then ``m <- b2 * m + (1 - b2) * g``.

    Source: arXiv 2302.06675. ``state[p]`` holds ``step`` (0-dim fp32) and ``exp_avg`` (m, shape of p).

    Args:
        params: parameters, or dicts of param groups.
        lr: learning rate.
        betas: coefficients of the interpolation, and of the running average.
        weight_decay: decoupled weight decay.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        number("lr", lr, "[0, inf)")
        number("weight_decay", weight_decay, "[0, inf)")
        for place, beta in enumerate(betas):
            number(f"betas[{place}]", beta, "[0, 1)")
        super().__init__(as_params(params), {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = loss_of(closure)
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                    state["exp_avg"] = torch.zeros_like(param)
                state["step"] += 1
                average, grad = state["exp_avg"], param.grad
                param.mul_(1.0 - group["lr"] * group["weight_decay"])
                param.sub_(torch.sign(torch.lerp(grad, average, first)), alpha=group["lr"])
                average.lerp_(grad, 1.0 - second)
        return loss
