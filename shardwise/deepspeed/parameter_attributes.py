"""DeepSpeed's attributes of parameters at stage 3: ``ds_id``, ``ds_shape``, ``ds_status`` and others.

A parameter keeps its shape while it is not gathered, so ``ds_shape`` equals ``shape``.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from shardwise.core.base.torch_internals import current_graph_task
from shardwise.session import Session

_numbers = itertools.count()


class ZeroParamType(Enum):
    """Location of a parameter."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(Enum):
    """Whether a parameter can be read."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


# [Note: The status of what autograd saved]
# An autograd function of a program (TRL's SFTTrainer has one) that saves a parameter gets the parameter back in plain
# PyTorch. Here it gets a tensor with the full value, and reads `ds_status` of it. Autograd creates the tensor object
# again, so an attribute of one object is not enough: the class `Tensor` answers, but only during backward passes. When
# torch's compiler reads the attribute from the class, it is a plain value, because with a descriptor that has `__set__`
# parameters could not have their own status.
class _OfSaved:
    """``ds_status`` of tensors that do not have their own."""

    def __get__(self, tensor: object, kind: type) -> ZeroParamStatus:
        if tensor is not None and current_graph_task() == -1:
            raise AttributeError(f"{kind.__name__!r} object has no attribute 'ds_status'")
        return ZeroParamStatus.AVAILABLE


def mark(param: nn.Parameter, status: ZeroParamStatus) -> None:
    """Set the attributes of a parameter that is sharded at stage 3, or will be."""
    known: Any = param
    if not hasattr(param, "ds_id"):
        known.ds_id, known.ds_param_type = next(_numbers), ZeroParamType.PARTITIONED
        known.ds_active_sub_modules = set()
    known.ds_shape, known.ds_numel, known.ds_status = param.shape, param.numel(), status


def mark_session(session: Session, stage: int) -> None:
    """Set the attributes of all parameters; ``ds_status`` follows gathers and evictions."""
    if stage < 3:
        for param in session.params:
            for name in [each for each in vars(param) if each.startswith("ds_") and each != "ds_process_group"]:
                delattr(param, name)  # built in zero.Init, but not sharded
        return
    if "ds_status" not in vars(torch.Tensor):
        torch.Tensor.ds_status = _OfSaved()  # type: ignore[attr-defined]
    session.module.unwrap().ds_external_parameters = _none  # type: ignore[assignment]
    units: dict[int, list[nn.Parameter]] = {}
    for param in session.params:
        one = session.one(param)
        resident = one is None or one.resident
        param.ds_persist = resident  # type: ignore[attr-defined]
        mark(param, ZeroParamStatus.AVAILABLE if resident else ZeroParamStatus.NOT_AVAILABLE)
        if one is not None and not resident:
            units.setdefault(one.unit, []).append(param)
    session.events.gather_ended.listen(functools.partial(_set, units, ZeroParamStatus.AVAILABLE))
    session.events.evicted.listen(functools.partial(_set, units, ZeroParamStatus.NOT_AVAILABLE))
    if session.optimizers:
        session.optimizer.__dict__["parameter_offload"] = ParameterOffload(session.module.unwrap())


def _set(units: dict[int, list[nn.Parameter]], status: ZeroParamStatus, unit: int) -> None:
    for param in units.get(unit, ()):
        param.ds_status = status  # type: ignore[attr-defined]


def _none() -> Iterator[tuple[str, nn.Parameter]]:
    """Return no external parameters, because they need no registration."""
    return iter(())


class ParameterOffload:
    """Stand-in for DeepSpeed's hooks, which programs remove before they generate, and restore.

    Attributes:
        module: the user's model.
        forward_hooks, backward_hooks: empty.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    @property
    def module(self) -> nn.Module | None:
        """The user's model."""
        return self._module()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing."""


def is_zero_param(parameter: Any) -> bool:
    """Return whether the parameter is sharded at stage 3, or will be."""
    return hasattr(parameter, "ds_id")
