"""``deepspeed.utils.safe_get_*`` and ``safe_set_*``: parameters, gradients and optimizer state, whole or in parts.

At every stage, offloaded or not. Every rank calls each of them for the same parameters in the same order, those that
are about a rank's own part included. Getters return copies, and ``None`` for what is frozen or of no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from shardwise.deepspeed.stepping import PassesApart
from shardwise.deepspeed.zero import session_of
from shardwise.session import OneParameter

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]


def _one(param: nn.Parameter) -> OneParameter | None:
    """``None`` where nobody trains it."""
    session = session_of(param) if param.requires_grad else None
    return None if session is None else session.one(param)


def _trained(param: nn.Parameter, what: str) -> OneParameter:
    found = _one(param)
    if found is None:
        raise ValueError(
            f"{what} of a parameter of shape {tuple(param.shape)} (requires_grad={param.requires_grad}): give one that "
            "an engine of deepspeed.initialize trains"
        )
    return found


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The fp32 master, in the parameter's shape (of a parameter in another dtype without a master: itself)."""
    found = _one(param)
    return None if found is None else found.value()


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace master and parameter by ``value``, which is the same on every rank."""
    _trained(param, "safe_set_full_fp32_param()").set_value(value)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Such as ``"exp_avg"``; ``None`` before the first step.

    Raises:
        KeyError: the optimizer keeps nothing of that name.
    """
    found = _one(param)
    return None if found is None else found.state(optim_state_key)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace it by ``value``, which is the same on every rank.

    Raises:
        RuntimeError: there is none before the first step.
        KeyError: the optimizer keeps nothing of that name.
    """
    _trained(param, "safe_set_full_optimizer_state()").set_state(optim_state_key, value)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """What the next step would apply before clipping, averaged over the ranks and unscaled, at least fp32; ``None``:
    there is none. Inside of ``engine.no_sync()`` what this rank's own passes in it have added up, unscaled.

    Raises:
        RuntimeError: between the passes of an accumulation at stages 0 and 1, where it is not averaged yet.
    """
    session = session_of(param) if param.requires_grad else None
    found = None if session is None else session.one(param)
    if session is None or found is None:
        return None
    return found.unreduced() if PassesApart.has(session) else found.gradient()


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace it by ``value``, which is the same on every rank."""
    _trained(param, "safe_set_full_grad()").set_gradient(value)


def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Replace the gradient of each by ``update_func(gradient, parameter)``."""
    for param in param_list:
        found = safe_get_full_grad(param)
        if found is not None:
            with torch.no_grad():
                safe_set_full_grad(param, update_func(found, param))


# This rank's part: the elements that are in its shard, which may be none.


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of :func:`safe_get_full_fp32_param`, 1-D."""
    found = _one(param)
    return None if found is None else found.value(own=True)


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part; as long as what the getter gives."""
    _trained(param, "safe_set_local_fp32_param()").set_value(value, own=True)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of :func:`safe_get_full_optimizer_state`, 1-D."""
    found = _one(param)
    return None if found is None else found.state(optim_state_key, own=True)


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Replace this rank's part; as long as what the getter gives."""
    _trained(param, "safe_set_local_optimizer_state()").set_state(optim_state_key, value, own=True)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of :func:`safe_get_full_grad`, 1-D."""
    found = _one(param)
    return None if found is None else found.gradient(own=True)


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Replace this rank's part; as long as what the getter gives."""
    _trained(param, "safe_set_local_grad()").set_gradient(value, own=True)
