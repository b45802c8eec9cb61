"""``deepspeed.utils.safe_get_*`` and ``safe_set_*``: parameters, gradients and optimizer state, full or local shards.

They work at every stage, with and without offload. All of them are collective: every rank calls them for the same
parameters in the same order. Getters return copies, or ``None`` for frozen parameters and parameters without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwise.deepspeed.backward_passes import PassesApart
from shardwise.deepspeed.zero import session_of
from shardwise.session import OneParameter


def _one(param: nn.Parameter) -> OneParameter | None:
    """Return the engine's record of ``param``; ``None`` if it is not trained."""
    session = session_of(param) if param.requires_grad else None
    return None if session is None else session.one(param)


def _trained(param: nn.Parameter, what: str) -> OneParameter:
    state = _one(param)
    if state is None:
        raise ValueError(
            f"{what} of a parameter of shape {tuple(param.shape)} (requires_grad={param.requires_grad}) without an "
            "engine; give a parameter that deepspeed.initialize trains"
        )
    return state


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the fp32 master in the parameter's shape, or the parameter if it has no master."""
    owner = _one(param)
    return None if owner is None else owner.value()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace master and parameter by ``value``, which is the same on every rank."""
    _trained(param, "safe_set_full_fp32_param()").set_value(value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return optimizer state such as ``"exp_avg"``; ``None`` before the first step.

    Raises:
        KeyError: the optimizer has no state of that name.
    """
    owner = _one(param)
    return None if owner is None else owner.state(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace optimizer state by ``value``, which is the same on every rank.

    Raises:
        RuntimeError: before the first step.
        KeyError: the optimizer has no state of that name.
    """
    _trained(param, "safe_set_full_optimizer_state()").set_state(optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient of the next step before clipping, averaged and unscaled, at least in fp32, or ``None``.

    Inside ``engine.no_sync()`` it is the unscaled sum of this rank's passes.

    Raises:
        RuntimeError: between the passes of an accumulation at stages 0 and 1, before gradients are averaged.
    """
    session = session_of(param) if param.requires_grad else None
    owner = None if session is None else session.one(param)
    if session is None or owner is None:
        return None
    return owner.unreduced() if PassesApart.has(session) else owner.gradient()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the gradient by ``value``, which is the same on every rank."""
    _trained(param, "safe_set_full_grad()").set_gradient(value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient of each parameter by ``update_func(gradient, parameter)``."""
    for param in param_list:
        grad = safe_get_full_grad(param)
        if grad is not None:
            with torch.no_grad():
                safe_set_full_grad(param, update_func(grad, param))


# The local shard of a parameter, which may be empty.


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the local shard of :func:`safe_get_full_fp32_param`, 1-D."""
    owner = _one(param)
    return None if owner is None else owner.value(own=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace the local shard by a tensor of the same length."""
    _trained(param, "safe_set_local_fp32_param()").set_value(value, own=True)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return the local shard of :func:`safe_get_full_optimizer_state`, 1-D."""
    owner = _one(param)
    return None if owner is None else owner.state(optim_state_key, own=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace the local shard by a tensor of the same length."""
    _trained(param, "safe_set_local_optimizer_state()").set_state(optim_state_key, value, own=True)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """Return the local shard of :func:`safe_get_full_grad`, 1-D."""
    owner = _one(param)
    return None if owner is None else owner.gradient(own=True)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace the local shard by a tensor of the same length."""
    _trained(param, "safe_set_local_grad()").set_gradient(value, own=True)
