"""Full states of fully sharded models and optimizers; replaces an optimizer's parameters by sharded ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.booster.wrappers import OptimizerWrapper, check_state, parameters_of
from shardwise.core.optim.state_form import constructed_state


def _full(value: Any) -> Any:
    if isinstance(value, DTensor):
        there: Any = value.to(value.device_mesh.device_type)  # [Note: Shards away from their mesh]
        value = there.full_tensor()
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _like(value: Any, like: torch.Tensor) -> Any:
    """Return ``value`` sharded like ``like`` and on its device. Every rank has the full value, so nothing is
    communicated.
    """
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    # Torch shards on the mesh's device. See [Note: Shards away from their mesh].
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None).to(like.device)


def full_model_state(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with full CPU tensors; a tensor with two names stays one tensor. Collective."""
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
    """Replace the full parameters in an optimizer by the sharded ones, group by group.

    State is converted, too: state that the constructor creates (Adagrad), and state of earlier steps. Each rank shards
    its own state without communication.

    Args:
        optimizer: built over the full parameters.
        names: name by ``id`` of the full parameter.
        sharded: the new parameter by name.

    Raises:
        ValueError: a parameter that is not the model's, or state that cannot be sharded. The optimizer is unchanged.
    """
    groups, state = list[list[torch.Tensor]](), dict[torch.Tensor, dict[str, Any]]()
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ValueError(
                    f"parameter {place} of group {index} (shape {tuple(parameter.shape)}) is not one of the "
                    "model's; build one optimizer for each model"
                )
            name = names[id(parameter)]
            entry = optimizer.state.get(parameter)
            if entry:
                state[sharded[name]] = _divided(optimizer, group, entry, name, sharded[name])
        groups.append([sharded[names[id(parameter)]] for parameter in group["params"]])
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
    optimizer.state.clear()
    optimizer.state.update(state)


def _divided(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], entry: Mapping[str, Any], name: str, like: torch.Tensor
) -> dict[str, Any]:
    """Return the state of one parameter, sharded as ``like`` is. State on the meta device is created again."""
    tensors = {key: value for key, value in entry.items() if isinstance(value, torch.Tensor)}
    if any(value.is_meta for value in tensors.values()):
        made = constructed_state(optimizer, group, like)
        if made.keys() != entry.keys():
            raise ValueError(
                f"optimizer state {', '.join(tensors)} of {name} is on the meta device, and {type(optimizer).__name__} "
                "does not make it again: build the optimizer on real parameters"
            )
        return made
    for key, value in tensors.items():
        if isinstance(like, DTensor) and value.shape != like.shape and value.numel() != 1:
            raise ValueError(
                f"optimizer state {key!r} of {name} has shape {tuple(value.shape)}, the parameter {tuple(like.shape)}: "
                "only element-wise state can be sharded"
            )
    # As in torch, the step count stays on the host unless the kernel reads it.
    kernel = group.get("fused") or group.get("capturable")
    counts = {key: value for key, value in tensors.items() if value.shape != like.shape}
    moved = {key: value.to(like.device) for key, value in counts.items() if kernel or not value.is_cpu}
    return {key: _like(value, like) for key, value in {**entry, **moved}.items()}


class TorchFSDPOptimizer(OptimizerWrapper):
    """An optimizer over sharded parameters whose ``state_dict`` has full tensors (collective)."""

    def state_dict(self) -> dict[str, Any]:
        """Return full CPU tensors by parameter index on every rank. Collective."""
        state = super().state_dict()
        full = {index: {key: _full(value) for key, value in entry.items()} for index, entry in state["state"].items()}
        return {**state, "state": full}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load full tensors, the same on every rank.

        Raises:
            ValueError: the state is of another optimizer class, or its groups have other sizes.
        """
        check_state(self.optim, state_dict)
        parameters = parameters_of(self.optim)
        order = [index for group in state_dict["param_groups"] for index in group["params"]]
        by_index = dict(zip(order, parameters, strict=True))
        divided = {
            index: {key: _like(value, by_index[index]) for key, value in entry.items()}
            for index, entry in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": divided})
