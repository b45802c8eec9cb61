"""What a model and its optimizers say of each parameter, which is all that a layout is made from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from shardwise.core.parallel.tensor import TPPlan
from shardwise.core.shards.layout import ParamFact
from shardwise.plan import Plan

__all__ = ["all_names", "parameter_facts"]


def all_names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """By ``id`` of parameter: every name it has in ``model``."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return {key: tuple(value) for key, value in names.items()}


def parameter_facts(
    params: Sequence[nn.Parameter],
    names: dict[int, tuple[str, ...]],
    optimizers: Sequence[torch.optim.Optimizer],
    plan: Plan,
    cutting: TPPlan | None = None,
) -> list[ParamFact]:
    """Name, shape, dtype, optimizer and group of each of ``params``, and which part of it ``cutting`` leaves here.

    Raises:
        ValueError: an optimizer holds a tensor that is not a parameter of the model, or two hold the same one.
    """
    held: dict[int, tuple[int, int]] = {}
    for optimizer_index, optimizer in enumerate(optimizers):
        for group_index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                if id(param) not in names:
                    raise ValueError(
                        f"optimizer {optimizer_index}, group {group_index} holds a tensor of shape "
                        f"{tuple(param.shape)} that is not a parameter of the model; build it on model.parameters()"
                    )
                if id(param) in held:
                    raise ValueError(f"{names[id(param)][0]} is in two optimizers; give each parameter to one")
                held[id(param)] = (optimizer_index, group_index)
    facts = []
    for param in params:
        optimizer_index, group_index = held.get(id(param), (-1, -1))
        dtype = (plan.precision.param_dtype if param.is_floating_point() else None) or param.dtype
        part = cutting.part_of(param) if cutting is not None else None
        shape = param.shape if part is None else part.shape
        known = (names[id(param)], shape, dtype, param.requires_grad, optimizer_index, group_index)
        facts.append(ParamFact(*known, part=part))
    return facts
