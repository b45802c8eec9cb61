"""LAMB (arXiv 1904.00962): Adam with a step size for each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.core.optim.whole_tensors import WholeTensorOptimizer, as_computed, begun, check_least

__all__ = ["BoundedLamb", "FusedLAMB", "Lamb"]


def _ratio(weight: Tensor, update: Tensor) -> Tensor:
    """Of two norms; 1 where one is 0."""
    return torch.where((weight > 0) & (update > 0), weight / update, torch.ones_like(weight))


class Lamb(WholeTensorOptimizer):
    """LAMB: Adam's step, and as large as the weights.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        betas: of the moments.
        eps: beside the root of the second one.
        weight_decay: decoupled, but within the ratio of norms.
        adam: the ratio is 1.
        bias_correction: of both moments, in the learning rate.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
    ) -> None:
        _check_adam(lr, betas, eps)
        self.adam = adam
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": bias_correction}
        super().__init__(params, {"lr": lr, **options})

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        begun(state, ("exp_avg", "exp_avg_sq"), grad)
        (beta1, beta2), weight = group["betas"], as_computed(param)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        lr = group["lr"]
        if group["bias_correction"]:
            lr = lr * (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        update = state["exp_avg"] / self._root(group, state["exp_avg_sq"])
        if group["weight_decay"]:
            update.add_(weight, alpha=group["weight_decay"])
        if not self.adam:
            update.mul_(self._trust(group, param, weight.norm(2), update.norm(2)))
        param.copy_(weight - lr * update)

    def _root(self, group: dict[str, Any], exp_avg_sq: Tensor) -> Tensor:
        """What the first moment is divided by."""
        return exp_avg_sq.sqrt().add_(group["eps"])

    def _trust(self, group: dict[str, Any], param: Tensor, weight: Tensor, update: Tensor) -> Tensor:
        """What the update of ``param`` is multiplied with, from the norms of weight and update."""
        return _ratio(weight, update)


class BoundedLamb(Lamb):
    """LAMB with bounds of the ratio of norms, and bias correction unless it is switched off.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: of both moments.
        betas: of the moments.
        eps: beside the root of the second one, or in it.
        eps_inside_sqrt: in it.
        weight_decay: decoupled, but within the ratio of norms.
        bounds: the least and the most that the ratio may be (``min_coeff`` and ``max_coeff`` of a group); it is 1
            where a norm is 0, whatever the bounds.
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
        bounds: tuple[float, float] = (0.01, 10.0),
    ) -> None:
        min_coeff, max_coeff = bounds
        check_least("min_coeff", min_coeff)
        check_least("max_coeff", max_coeff, min_coeff)
        self.eps_inside_sqrt = bool(eps_inside_sqrt)
        self._ratios: dict[Tensor, Tensor] = {}
        super().__init__(params, lr, tuple(betas), eps, weight_decay, bias_correction=bias_correction)  # type: ignore[arg-type]
        for group in self.param_groups:
            group.setdefault("max_coeff", max_coeff)
            group.setdefault("min_coeff", min_coeff)
        self.defaults |= {"max_coeff": max_coeff, "min_coeff": min_coeff}

    @property
    def lamb_coeffs(self) -> list[Tensor]:
        """The bounded ratios (0-dim) of the last updates, in the order of the parameters; sharded, of this rank's."""
        params = [param for group in self.param_groups for param in group["params"]]
        return [self._ratios[param] for param in params if param in self._ratios]

    def get_lamb_coeffs(self) -> list[float]:
        """:attr:`lamb_coeffs` as numbers."""
        return [float(each) for each in self.lamb_coeffs]

    def _root(self, group: dict[str, Any], exp_avg_sq: Tensor) -> Tensor:
        return exp_avg_sq.add(group["eps"]).sqrt_() if self.eps_inside_sqrt else super()._root(group, exp_avg_sq)

    def _trust(self, group: dict[str, Any], param: Tensor, weight: Tensor, update: Tensor) -> Tensor:
        bounded = (weight / update).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight > 0) & (update > 0), bounded, torch.ones_like(weight))
        self._ratios[param] = ratio
        return ratio


class FusedLAMB(WholeTensorOptimizer):
    """LAMB with gradients clipped by their norm over all parameters first. ``step`` is counted by parameter.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        bias_correction: of both moments.
        betas: of the moments.
        eps: beside the root of the second one.
        weight_decay: see ``adam_w_mode``; the ratio of norms is 1 where it is 0, unless ``use_nvlamb``.
        amsgrad: not available.
        adam_w_mode: decay is a part of the update; otherwise of the gradient.
        grad_averaging: the first moment takes ``1 - betas[0]`` of the gradient; otherwise all of it.
        set_grad_none: what ``zero_grad()`` does.
        max_grad_norm: 0 leaves gradients as they are, which sharded models need: clip with the front-end.
        use_nvlamb: the ratio of norms counts for every parameter.

    Raises:
        RuntimeError: ``amsgrad``.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"FusedLAMB has no AMSGrad variant (amsgrad={amsgrad}): leave it out")
        _check_adam(lr, betas, eps)
        check_least("max_grad_norm", max_grad_norm)
        self.adam_w_mode, self.set_grad_none, self.use_nvlamb = bool(adam_w_mode), set_grad_none, use_nvlamb
        options = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(
            params, {"lr": lr, **options, "grad_averaging": grad_averaging, "max_grad_norm": max_grad_norm}
        )
        self._clip = 1.0

    @property
    def couples_parameters(self) -> str:
        """Why one parameter's update needs the others; empty where it does not."""
        norms = [group["max_grad_norm"] for group in self.param_groups]
        return f"max_grad_norm={max(norms)} needs all gradients: give 0 here, and clip with the front-end" * any(norms)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop all gradients or fill them with zeros; ``None``: what ``set_grad_none`` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; what ``closure``, which is run first, returned."""
        if closure is None:
            most = self.param_groups[0]["max_grad_norm"]
            norms = [as_computed(grad).norm(2).double() for _, _, grad in self._live()] if most else []
            norm = float(torch.stack([each.cpu() for each in norms]).norm(2)) if norms else 0.0
            self._clip = norm / most if most and norm > most else 1.0
            return super().step()
        with torch.enable_grad():
            loss = closure()
        self.step()
        return loss

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        begun(state, ("exp_avg", "exp_avg_sq"), grad)
        (beta1, beta2), weight, decay = group["betas"], as_computed(param), group["weight_decay"]
        state["step"] += 1
        grad = grad / self._clip
        if decay and not self.adam_w_mode:
            grad = grad + decay * weight
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1 if group["grad_averaging"] else 1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        first, second = (1 - beta1 ** state["step"], 1 - beta2 ** state["step"]) if group["bias_correction"] else (1, 1)
        update = (state["exp_avg"] / first) / (state["exp_avg_sq"] / second).sqrt_().add_(group["eps"])
        if decay and self.adam_w_mode:
            update.add_(weight, alpha=decay)
        if self.use_nvlamb or decay:
            update.mul_(_ratio(weight.norm(2), update.norm(2)))
        param.copy_(weight - group["lr"] * update)


def _check_adam(lr: float, betas: tuple[float, float], eps: float) -> None:
    check_least("lr", lr)
    check_least("eps", eps)
    for number, beta in enumerate(betas):
        check_least(f"betas[{number}]", beta, 0.0, 1 - 1e-15)
