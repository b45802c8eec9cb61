"""Muon for matrices and Adam for all other parameters, in one optimizer. Muon orthogonalizes the momentum."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.core.optim.whole_tensors import WholeTensorOptimizer, as_computed, begun, check_least

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5, which move singular values in (0, 1] near 1. Source:
kellerjordan.github.io/posts/muon."""
LEAST_NORM = 1e-7
RESTART = 2
"""Iterations per Gram matrix, whose rounding error grows. Source: tridao.me/blog, Gram Newton-Schulz."""
METHODS = ("gram", "standard")
OF_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
OF_ADAM = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}


def _orthogonal(matrix: Tensor, steps: int, method: str) -> Tensor:
    """Orthogonalize ``matrix`` (..., rows, columns) with ``steps`` Newton-Schulz iterations: singular values near 1.

    ``"standard"`` multiplies in bf16, as torch's Muon. ``"gram"`` iterates on the Gram matrix of the shorter side, in
    fp16 on a GPU and in fp32 on a CPU. It has no advantage for square matrices, which use the standard method.
    """
    x = matrix.to(torch.bfloat16 if method == "standard" else torch.float32)
    x = x if x.dim() == 2 else x.flatten(0, -3)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=LEAST_NORM)
    if method == "gram" and x.device.type != "cpu":
        x = x.half()  # after normalization, since gradients may be too large or too small for fp16
    by_gram = method == "gram" and x.size(-2) < x.size(-1)
    spans = (min(RESTART, steps), max(0, steps - RESTART)) if by_gram else (1,) * steps
    for span in spans:
        x = _iterated(x, span)
    return (x.mT if tall else x).reshape(matrix.shape)


def _iterated(x: Tensor, steps: int) -> Tensor:
    """Run ``steps`` iterations. All but the last are combined in one factor, which depends only on the Gram matrix."""
    (a, b, c), add = QUINTIC, torch.addmm if x.dim() == 2 else torch.baddbmm
    gram, factor = x @ x.mT, None
    for step in range(steps):
        product = add(gram, gram, gram, beta=b, alpha=c)  # a step is a * I + product
        if step == steps - 1:
            x = x if factor is None else factor @ x
            return add(x, product, x, beta=a)
        if factor is None:
            factor = product.clone()
            factor.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            factor = add(factor, product, factor, beta=a)
        once = add(gram, product, gram, beta=a)
        gram = add(once, product, once, beta=a)
    return x


def muon_update(
    grad: Tensor,
    momentum: Tensor,
    beta: float = 0.95,
    ns_steps: int = 5,
    nesterov: bool = True,
    ns_method: str = "gram",
    is_expert_group: bool = False,
) -> Tensor:
    """Return the update of a matrix, before the learning rate, in its shape and dtype. ``grad`` is not changed.

    Args:
        grad: has two or more dimensions; all but the last two are batch dimensions. With four dimensions (convolution
            filters), all but the first are flattened to columns.
        momentum: momentum buffer in the shape of ``grad``; updated in place.
        beta: decay rate of the momentum.
        ns_steps: number of Newton-Schulz iterations.
        nesterov: use Nesterov momentum.
        ns_method: ``"gram"`` or ``"standard"``; see :class:`MuonWithAuxAdam`.
        is_expert_group: if True, all but the last two dimensions are batch dimensions, also with four dimensions.
    """
    momentum.lerp_(grad, 1 - beta)
    ahead = torch.lerp(grad, momentum, beta) if nesterov else momentum
    if ahead.dim() == 4 and not is_expert_group:
        ahead = ahead.reshape(len(ahead), -1)
    tall: float = max(1.0, grad.size(-2) / grad.size(-1)) ** 0.5
    return _orthogonal(ahead, ns_steps, ns_method).to(grad.dtype).mul_(tall).reshape(grad.shape)


class MuonWithAuxAdam(WholeTensorOptimizer):
    """Muon for the groups with ``use_muon=True``, and Adam with decoupled weight decay for those with
    ``use_muon=False``.

    ``state[p]`` contains ``momentum_buffer`` for Muon, and ``exp_avg``, ``exp_avg_sq`` and the number ``step`` for
    Adam.

    Args:
        param_groups: dicts, each with ``params`` and ``use_muon``. Options of Muon: ``lr`` (0.02), ``momentum`` (0.95),
            ``weight_decay`` (0) and ``ns_method`` (``"gram"``, or ``"standard"``, which multiplies as torch's Muon
            does). Options of Adam: ``lr`` (3e-4), ``betas`` (0.9, 0.95), ``eps`` (1e-10) and ``weight_decay`` (0).

    Raises:
        ValueError: a group without ``use_muon``, a number out of range, or a vector in a Muon group.
    """

    def __init__(self, param_groups: Any) -> None:
        groups = [dict(each) if isinstance(each, dict) else {"params": each} for each in param_groups]
        for place, group in enumerate(groups):
            if not isinstance(group.get("use_muon"), bool):
                raise ValueError(f"use_muon={group.get('use_muon')!r} of group {place}: give True or False")
            params = group["params"]
            group["params"] = [params] if isinstance(params, Tensor) else list(params)
            for name, value in (OF_MUON if group["use_muon"] else OF_ADAM).items():
                group.setdefault(name, value)
            _check(group)
        super().__init__(groups, {})

    def _update(self, group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any]) -> None:
        weight, update = as_computed(param), self._muon if group["use_muon"] else self._adam
        step = update(group, grad, state)
        param.copy_(weight * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * step)

    def _muon(self, group: dict[str, Any], grad: Tensor, state: dict[str, Any]) -> Tensor:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        return muon_update(grad, state["momentum_buffer"], group["momentum"], ns_method=group["ns_method"])

    def _adam(self, group: dict[str, Any], grad: Tensor, state: dict[str, Any]) -> Tensor:
        begun(state, ("exp_avg", "exp_avg_sq"), grad)
        state["step"] += 1
        first, second = group["betas"]
        state["exp_avg"].lerp_(grad, 1 - first)
        state["exp_avg_sq"].lerp_(grad.square(), 1 - second)
        root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt_().add_(group["eps"])
        step: Tensor = state["exp_avg"] / (1 - first ** state["step"]) / root
        return step


def _check(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", *(() if group["use_muon"] else ("eps",))):
        check_least(name, group[name])
    for name in ("momentum",) if group["use_muon"] else ("betas",):
        for beta in (group[name],) if name == "momentum" else group[name]:
            check_least(name, beta, 0.0, 1 - 1e-15)
    if not group["use_muon"]:
        return
    if group["ns_method"] not in METHODS:
        raise ValueError(f"ns_method={group['ns_method']!r}: give one of {', '.join(map(repr, METHODS))}")
    vectors = [tuple(param.shape) for param in group["params"] if param.dim() < 2]
    if vectors:
        raise ValueError(f"use_muon=True for parameters of shapes {vectors[:3]}: give False for what is no matrix")
