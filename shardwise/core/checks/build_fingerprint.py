"""A description of a build that has to be equal on every rank, as data that can be compared.

It leaves out what may differ between ranks: values (rank 0's are used, or the user wants them to differ), devices and
their capacities, directories and the other settings of a disk, what is printed, and functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn

from shardwise import __version__
from shardwise.core.base.tensors import SPARSE, parts_of
from shardwise.core.base.validate import class_name
from shardwise.core.comm import Description
from shardwise.core.shards.layout import ParamInfo
from shardwise.plan import ByModule, Plan

# Fields without a name here are compared: a forgotten field raises an error instead of hiding a difference.
PER_RANK = {"verbose", "mesh", "shared_memory", "pin_memory", "device_capacity_bytes", "disk"}
"""Fields of a plan that may differ between ranks, or that the mesh has compared already."""
ONLY_WHETHER = {"device_capacity_bytes", "disk"}
"""Fields of these that either all ranks set or none."""


def describe_build(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    plan: Plan,
    every: Sequence[tuple[nn.Parameter, ParamInfo]],
) -> Description:
    """Return versions, plan, parameters, optimizers and their groups.

    Args:
        every: the model's parameters and their facts.
    """
    subjects: dict[str, Mapping[str, Any]] = {
        "the installation": {"version of shardwise": __version__, "version of torch": torch.__version__.split("+")[0]},
        "the plan": dict(_plan_fields(plan)),
        "the model": {"number of parameters": len(every), "number of optimizers": len(optimizers)},
    }
    for index, optimizer in enumerate(optimizers):
        groups = optimizer.param_groups
        subjects[called(index)] = {"class": class_name(type(optimizer)), "number of groups": len(groups)}
        for number, group in enumerate(groups):
            subjects[called(index, number)] = group_values(optimizer, group)
    subjects |= _parameters(optimizers, every)
    if plan.comm.sync_init:
        subjects |= {
            f"tensor {name}": {"shape": list(value.shape), "dtype": str(value.dtype)} | _of_sparse(value)
            for name, value in model.named_buffers()
        }
    return subjects | _modules(model, plan)


def _of_sparse(value: torch.Tensor) -> dict[str, Any]:
    """Return also the forms of the components of a sparse tensor, since rank 0's are broadcast one by one."""
    if value.layout not in SPARSE:
        return {}
    shapes = [[list(part.shape), str(part.dtype)] for part in parts_of(value)]
    coalesced = value.layout is not torch.sparse_coo or value.is_coalesced()
    return {"layout": str(value.layout), "indices and values": shapes, "coalesced": coalesced}


def called(optimizer: int, group: int | None = None) -> str:
    """Return the name of an optimizer or of a param group in the description."""
    return f"optimizer {optimizer}" if group is None else f"group {group} of optimizer {optimizer}"


def _plan_fields(part: Any, prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for field in fields(part):
        value, name = getattr(part, field.name), f"{prefix}{field.name}"
        if field.name in ONLY_WHETHER:
            rows.append((name, "none" if value is None else "given"))
        elif field.name in PER_RANK:
            continue
        elif is_dataclass(value):
            rows.append((name, type(value).__name__))
            rows += _plan_fields(value, f"{name}.")
        else:
            rows.append((name, plain(value)))
    return rows


def _parameters(
    optimizers: Sequence[torch.optim.Optimizer], every: Sequence[tuple[nn.Parameter, ParamInfo]]
) -> dict[str, Mapping[str, Any]]:
    place = {
        id(param): position
        for optimizer in optimizers
        for group in optimizer.param_groups
        for position, param in enumerate(group["params"])
    }
    subjects: dict[str, Mapping[str, Any]] = {}
    for param, fact in every:
        about: dict[str, Any] = {
            "shape": list(fact.full_shape),
            "dtype": str(param.dtype),
            "requires_grad": fact.trainable,
            "holder": "no optimizer" if fact.optimizer < 0 else called(fact.optimizer, fact.group),
        }
        if len(fact.names) > 1:
            about["names"] = list(fact.names)
        if fact.optimizer >= 0:
            about["position"] = place[id(param)]
            state = optimizers[fact.optimizer].state.get(param)
            if state:
                about["optimizer state"] = sorted(map(str, state))
        subjects[f"parameter {fact.names[0]}"] = about
    return subjects


def group_values(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of an optimizer's group by name, without texts that the user stored under other
    keys."""
    return {
        key: plain(value)
        for key, value in sorted(group.items())
        if key != "params" and (key in optimizer.defaults or isinstance(value, Real | torch.Tensor))
    }


def plain(value: Any) -> Any:
    """Return ``value`` as JSON: a number, a text, or a sequence of these.

    A tensor of one element becomes a number. Other values become the name of their type.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and not value.is_meta else f"a tensor of shape {tuple(value.shape)}"
    return str(value) if isinstance(value, torch.dtype) else type(value).__name__


def described(value: Any) -> dict[str, Any]:
    """Describe an entry of a state: a tensor by shape and dtype, any other value by :func:`plain`."""
    if isinstance(value, torch.Tensor):
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    return {"value": plain(value)}


def _modules(model: nn.Module, plan: Plan) -> dict[str, Mapping[str, Any]]:
    """Describe the modules that determine which parameters are gathered together."""
    packing = plan.shard.packing
    if not isinstance(packing, ByModule):
        return {}
    return {
        f"module {name or '(the model)'}": {"class": type(module).__name__}
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) or type(module).__name__ in packing.unit_classes
    }
