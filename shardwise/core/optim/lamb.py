"""LAMB (arXiv 1904.00962): Adam with a layer-wise trust ratio."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.core.optim.whole_tensors import WholeTensorOptimizer, as_computed, begun, check_least, loss_of


def _ratio(weight: Tensor, update: Tensor) -> Tensor:
    """Return the ratio of two norms, or 1 if one of them is 0."""
    return torch.where((weight > 0) & (update > 0), weight / update, torch.ones_like(weight))


class Lamb(WholeTensorOptimizer):
    """LAMB: Adam's update, scaled for each parameter by the ratio of the norms of weight and update.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay, applied before the ratio of norms.
        adam: whether the ratio is always 1.
        bias_correction: apply bias correction of both moments through the learning rate.

    Examples:
        >>> from shardwise.nn.optimizer import Lamb
        >>> session = shardwise.shard(model, Lamb(model.parameters(), lr=1e-3), stage=1)
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
        """Return the denominator of the update."""
        return exp_avg_sq.sqrt().add_(group["eps"])

    def _trust(self, group: dict[str, Any], param: Tensor, weight: Tensor, update: Tensor) -> Tensor:
        """Return the factor of the update of ``param``, computed from the norms of weight and update."""
        return _ratio(weight, update)


class BoundedLamb(Lamb):
    """LAMB with bounds for the ratio of norms. Bias correction is enabled by default.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        bias_correction: apply bias correction of both moments.
        betas: decay rates of the moments.
        eps: added to the square root of the second moment, or inside it.
        eps_inside_sqrt: add ``eps`` inside the square root.
        weight_decay: decoupled weight decay, applied before the ratio of norms.
        bounds: the minimum and maximum of the ratio (``min_coeff`` and ``max_coeff`` of a group). If a norm is 0, the
            ratio is 1 regardless of the bounds.
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
        """The bounded ratios (0-dim) of the last updates, in parameter order. A sharded optimizer has this rank's
        ratios."""
        params = [param for group in self.param_groups for param in group["params"]]
        return [self._ratios[param] for param in params if param in self._ratios]

    def get_lamb_coeffs(self) -> list[float]:
        """Return :attr:`lamb_coeffs` as numbers."""
        return [float(each) for each in self.lamb_coeffs]

    def _root(self, group: dict[str, Any], exp_avg_sq: Tensor) -> Tensor:
        return exp_avg_sq.add(group["eps"]).sqrt_() if self.eps_inside_sqrt else super()._root(group, exp_avg_sq)

    def _trust(self, group: dict[str, Any], param: Tensor, weight: Tensor, update: Tensor) -> Tensor:
        bounded = (weight / update).clamp(group["min_coeff"], group["max_coeff"])
        ratio = torch.where((weight > 0) & (update > 0), bounded, torch.ones_like(weight))
        self._ratios[param] = ratio
        return ratio


class FusedLAMB(WholeTensorOptimizer):
    """LAMB that first clips gradients by their norm over all parameters. ``step`` is counted per parameter.

    Args:
        params: parameters, or parameter groups.
        lr: learning rate.
        bias_correction: apply bias correction of both moments.
        betas: decay rates of the moments.
        eps: added to the square root of the second moment.
        weight_decay: see ``adam_w_mode``; without weight decay, the ratio of norms is 1 unless ``use_nvlamb``.
        amsgrad: must be False.
        adam_w_mode: if True, weight decay is added to the update, otherwise to the gradient.
        grad_averaging: multiply the gradient by ``1 - betas[0]`` in the first moment.
        set_grad_none: default of ``zero_grad()``.
        max_grad_norm: maximal norm of the gradients; 0 disables clipping. Sharded models need 0: use
            ``max_norm`` of ``shard``.
        use_nvlamb: apply the ratio of norms to every parameter.

    Raises:
        RuntimeError: ``amsgrad`` is True.

    Examples:
        >>> from shardwise.nn.optimizer import FusedLAMB
        >>> optimizer = FusedLAMB(model.parameters(), lr=1e-3, max_grad_norm=0.0)
        >>> session = shardwise.shard(model, optimizer, stage=2, max_norm=1.0)
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
        """Return why the update of a parameter depends on other parameters. Empty if it does not."""
        norms = [group["max_grad_norm"] for group in self.param_groups]
        return f"max_grad_norm={max(norms)} needs all gradients: give 0 here, and clip with the front-end" * any(norms)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Set all gradients to None or to zero. ``set_to_none=None`` is the argument ``set_grad_none``.

        Args:
            set_to_none: None or zero; ``None`` is the constructor's ``set_grad_none``.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient, and return the result of ``closure``, which runs first.

        Args:
            closure: recomputes the loss and returns it.

        Returns:
            The result of ``closure``.
        """
        if closure is None:
            most = self.param_groups[0]["max_grad_norm"]
            norms = [as_computed(grad).norm(2).double() for _, _, grad in self._live()] if most else []
            norm = float(torch.stack([each.cpu() for each in norms]).norm(2)) if norms else 0.0
            self._clip = norm / most if most and norm > most else 1.0
            return super().step()
        loss = loss_of(closure)
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
