"""Second moments of matrices as rows and columns: Adafactor (arXiv 1804.04235) and CAME (arXiv 2307.02047)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.whole_tensors import WholeTensorOptimizer, as_computed, check_least, rms

__all__ = ["CAME", "Adafactor", "adafactor_update"]


def _moments(state: dict[str, Any], name: str, like: Tensor) -> None:
    """Zeros: of rows and columns, or of a vector's elements."""
    if like.dim() >= 2:
        state[f"{name}_row"] = like.new_zeros(like.shape[:-1])
        state[f"{name}_col"] = like.new_zeros(like.shape[:-2] + like.shape[-1:])
    else:
        state[name] = torch.zeros_like(like)


def _over_root(state: dict[str, Any], name: str, squares: Tensor, kept: float, value: Tensor) -> Tensor:
    """Average ``squares`` into the moments, of which ``kept`` stays, and divide ``value`` by their root."""
    if value.dim() < 2:
        average: Tensor = state[name].mul_(kept).add_(squares, alpha=1 - kept)
        return value * average.rsqrt()
    row: Tensor = state[f"{name}_row"]
    column: Tensor = state[f"{name}_col"]
    row.mul_(kept).add_(squares.mean(dim=-1), alpha=1 - kept)
    column.mul_(kept).add_(squares.mean(dim=-2), alpha=1 - kept)
    by_row: Tensor = (row / row.mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
    return value * by_row * column.rsqrt().unsqueeze(-2)


def _clipped(update: Tensor, threshold: float) -> Tensor:
    return update / (rms(update) / threshold).clamp(min=1.0)


def adafactor_update(
    group: dict[str, Any], state: dict[str, Any], grad: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor | float]:
    """What is taken from ``weight``, before decay, and the step size that was used; ``grad`` may have another shape."""
    beta1 = group["beta1"]
    if "step" not in state:
        state["step"] = 0
    if not any(key.startswith("exp_avg_sq") for key in state):
        _moments(state, "exp_avg_sq", grad)
        if beta1 is not None:
            state["exp_avg"] = torch.zeros_like(grad)
    state["step"] += 1
    lr: Any = group["lr"]
    if group["relative_step"]:
        lr = min(1e-6 * state["step"] if group["warmup_init"] else 1e-2, 1.0 / math.sqrt(state["step"]))
    if group["scale_parameter"]:
        lr = lr * rms(weight).clamp(min=group["eps"][1])
    kept = 1.0 - state["step"] ** group["decay_rate"]
    update = _over_root(state, "exp_avg_sq", grad.square() + group["eps"][0], kept, grad)
    update = lr * _clipped(update, group["clip_threshold"])
    return (update if beta1 is None else state["exp_avg"].lerp_(update, 1 - beta1)), lr


def _check_rates(lr: float | None, relative_step: bool, warmup_init: bool) -> None:
    """Raises:
    ValueError: the three do not go together.
    """
    if lr is not None and relative_step:
        raise ValueError(f"lr={lr!r} with relative_step=True: give one of them (relative_step=False uses lr)")
    if lr is None and not relative_step:
        raise ValueError(f"lr={lr!r} with relative_step=False: give lr")
    if warmup_init and not relative_step:
        raise ValueError(f"warmup_init={warmup_init!r} with relative_step=False: it is of relative steps only")
    if lr is not None:
        check_least("lr", lr)


class Adafactor(WholeTensorOptimizer):
    """Adafactor, with ColossalAI's arguments (``torch.optim.Adafactor`` has others).

    Args:
        params: parameters, or groups of them.
        lr: with ``relative_step=False``.
        eps: added to squared gradients; the least size of a parameter for ``scale_parameter``.
        clip_threshold: of an update's root mean square.
        decay_rate: moments keep ``1 - step ** decay_rate`` of themselves.
        beta1: of a first moment; ``None``: there is none.
        weight_decay: decoupled.
        scale_parameter: step sizes are relative to parameters' root mean squares.
        relative_step: step sizes of its own.
        warmup_init: which begin small.

    Raises:
        ValueError: ``lr`` and ``relative_step`` are both given, or neither.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        _check_rates(lr, relative_step, warmup_init)
        options = {"clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1}
        switches = {"scale_parameter": scale_parameter, "relative_step": relative_step, "warmup_init": warmup_init}
        super().__init__(params, {"lr": lr, "eps": eps, **options, "weight_decay": weight_decay, **switches})

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        weight = as_computed(param)
        update, lr = adafactor_update(group, state, grad, weight)
        param.copy_(weight - group["weight_decay"] * lr * weight - update)


class CAME(WholeTensorOptimizer):
    """CAME: Adafactor with a first moment that is trusted as far as it agrees with the updates.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, which has to be given.
        eps: added to squared gradients, and to squared differences.
        clip_threshold: of an update's root mean square.
        betas: of the first moment, the second one and the differences.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        if lr is None or isinstance(lr, bool) or not lr > 0:
            raise ValueError(f"lr={lr!r}: CAME needs a learning rate above 0")
        for number, beta in enumerate(betas):
            check_least(f"betas[{number}]", beta, 0.0, 1.0)
        options = {"eps": eps, "clip_threshold": clip_threshold, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **options})

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        if "step" not in state:
            state.update(step=0, exp_avg=torch.zeros_like(grad))
            _moments(state, "exp_avg_sq", grad)
            if grad.dim() >= 2:
                _moments(state, "exp_avg_res", grad)
        (beta1, beta2, beta3), lr, weight = group["betas"], group["lr"], as_computed(param)
        state["step"] += 1
        update = _over_root(state, "exp_avg_sq", grad.square() + group["eps"][0], beta2, grad)
        update = _clipped(update, group["clip_threshold"])
        average = state["exp_avg"].lerp_(update, 1 - beta1)
        if grad.dim() >= 2:
            differences = (update - average).square() + group["eps"][1]
            average = _over_root(state, "exp_avg_res", differences, beta3, average)
        param.copy_(weight - group["weight_decay"] * lr * weight - lr * average)
