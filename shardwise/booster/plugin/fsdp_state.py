"""Full states of fully sharded models and optimizers, and the optimizer's hand-over to sharded parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.booster.interface import OptimizerWrapper, parameters_of

__all__ = ["TorchFSDPOptimizer", "full_model_state", "load_full_model_state", "repoint"]


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _like(value: Any, like: torch.Tensor) -> Any:
    """``value`` divided over ranks as ``like`` is. Every rank has the full value, so nothing travels."""
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    value = value.to(like.device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def full_model_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with full CPU tensors; a tensor under two names stays one. Collective."""
    done: dict[int, Any] = {}
    own = dict(module.named_parameters(remove_duplicate=False))
    full = {}
    for name, value in state.items():
        key = id(own.get(name, value))
        if key not in done:
            done[key] = _full(value)
        full[name] = done[key]
    return full


def load_full_model_state(module: nn.Module, state: Mapping[str, Any], strict: bool) -> Any:
    """Load full tensors into a sharded module."""
    own = module.state_dict()
    divided = {name: _like(value, own[name]) if name in own else value for name, value in state.items()}
    return module.load_state_dict(divided, strict=strict)


def repoint(optimizer: torch.optim.Optimizer, names: Mapping[int, str], sharded: Mapping[str, torch.Tensor]) -> None:
    """Put the sharded parameters in the place of the whole ones, group by group.

    Args:
        optimizer: built over the whole parameters, not yet stepped.
        names: name by ``id`` of the whole parameter.
        sharded: the new parameter by name.

    Raises:
        ValueError: the optimizer has state, or a parameter that is not the model's.
    """
    if optimizer.state:
        raise ValueError(
            f"the optimizer already has state for {len(optimizer.state)} parameters; boost it before its first step, "
            "and load its state with booster.load_optimizer"
        )
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {place} of group {index} (shape {tuple(parameter.shape)}) is not the model's; "
                    "build one optimizer a model"
                )
        group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]


class TorchFSDPOptimizer(OptimizerWrapper):
    """An optimizer over sharded parameters whose ``state_dict`` holds full tensors (collective)."""

    def state_dict(self) -> dict[str, Any]:
        """Full CPU tensors per parameter index, on every rank. Collective."""
        state = super().state_dict()
        full = {index: {key: _full(value) for key, value in entry.items()} for index, entry in state["state"].items()}
        return {**state, "state": full}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load full tensors, the same on every rank."""
        parameters = parameters_of(self.optim)
        order = [index for group in state_dict["param_groups"] for index in group["params"]]
        by_index = dict(zip(order, parameters, strict=True))
        divided = {
            index: {key: _like(value, by_index[index]) for key, value in entry.items()}
            for index, entry in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": divided})
