"""The optimizer that ``optimizer.type`` names, as a torch optimizer."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.build import needs_whole_tensors
from shardwise.deepspeed.config import Settings
from shardwise.deepspeed.cpu_optimizers import DeepSpeedCPUAdam, FusedAdam
from shardwise.deepspeed.lamb import FusedLamb
from shardwise.deepspeed.muon import make_muon, mark_matrices
from shardwise.deepspeed.schedules import check_parameters, make_schedule
from shardwise.optim.lion import Lion

__all__ = ["check_optimizer", "make_optimizer", "wide_states"]

_UNAVAILABLE = ("muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam")


def check_optimizer(settings: Settings) -> None:
    """Whether the optimizer and the scheduler that a configuration names can be made and sharded: on one element.

    Raises:
        ValueError, NotImplementedError: see :func:`make_optimizer`, :func:`make_schedule` and
            :func:`~shardwise.build.needs_whole_tensors`.
    """
    name, schedule = settings["optimizer.type"], settings["scheduler.type"]
    params = settings["scheduler.params"] or {}
    # Where a scheduler has a number for each param group, there are so many.
    count = max([1, *(len(each) for each in params.values() if isinstance(each, list))])
    groups: list[Any] = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(count)]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0)  # where the program brings its own
    if name is not None:
        model = nn.Linear(1, 1) if name.lower() == "muon" else None  # a matrix and a vector: its two groups
        held = list(model.parameters()) if model is not None else groups
        optimizer = make_optimizer(name, held, settings["optimizer.params"] or {}, model, wide_states(settings))
        needs_whole_tensors(optimizer)
    if schedule is not None:
        make_schedule(schedule, optimizer, params)


def wide_states(settings: Settings) -> bool | None:
    """Whether Adam's moments are fp32 beside 16-bit masters; ``None``: there are none of these."""
    if settings["fp16.enabled"] and settings["fp16.fp16_master_weights_and_grads"]:
        return True
    if settings["bf16.enabled"] and settings["bf16.bf16_master_weights_and_grads"]:
        return not settings["bf16.bf16_optimizer_states"]
    return None


def make_optimizer(
    name: str,
    parameters: Iterable[Any],
    params: dict[str, Any],
    model: nn.Module | None = None,
    wide: bool | None = None,
) -> torch.optim.Optimizer:
    """``Adam``, ``AdamW``, ``Lamb`` and ``Muon`` as DeepSpeed means them, ``Adagrad``, ``Lion``, or any of
    ``torch.optim``.

    ``Adam`` is AdamW unless ``adam_w_mode`` is false. The default ``weight_decay`` is 0, torch's with ``torch_adam``.
    ``model`` has the names by which parameters without a mark ``use_muon`` get one; ``wide`` is :func:`wide_states`.

    Raises:
        ValueError: an unknown name or parameter; the nearest one is named.
        NotImplementedError: an optimizer of DeepSpeed that torch does not have, or an option of Adam that is not.
    """
    kind, params = name.lower(), dict(params)
    if "max_grad_norm" in params:
        raise ValueError(f"optimizer.params.max_grad_norm={params['max_grad_norm']!r}: give gradient_clipping instead")
    if kind in _UNAVAILABLE:
        raise NotImplementedError(f"optimizer.type={name!r} is not available; pass an optimizer to initialize instead")
    if kind in ("adam", "adamw"):
        return _adam(kind, parameters, params, wide)
    if kind == "muon":
        mark_matrices(model)
        return make_muon(parameters, params)
    own: dict[str, type[torch.optim.Optimizer]] = {"adagrad": torch.optim.Adagrad, "lamb": FusedLamb, "lion": Lion}
    cls: type[torch.optim.Optimizer] = own.get(kind) or _by_name(name)
    if kind in ("lamb", "lion") and "betas" in params:
        params["betas"] = tuple(params["betas"])
    check_parameters("optimizer", cls, params)
    return cls(parameters, **params)


def _by_name(name: str) -> Any:
    known = {n: c for n, c in vars(torch.optim).items() if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    known.pop("Optimizer", None)
    if name not in known:
        # Those are refused once sharded; these are DeepSpeed's own.
        known = {each: cls for each, cls in known.items() if each not in ("LBFGS", "SparseAdam")}
        known |= {"Lamb": FusedLamb, "Lion": Lion}
        near = difflib.get_close_matches(name.lower(), [n.lower() for n in known], 1, 0.4)
        found = [n for n in known if near and n.lower() == near[0]]
        hint = f"did you mean {found[0]!r}?" if found else f"known: {', '.join(known)}"
        raise ValueError(f"optimizer.type={name!r} is not known; {hint}")
    return known[name]


def _adam(kind: str, parameters: Iterable[Any], params: dict[str, Any], wide: bool | None) -> torch.optim.Optimizer:
    mode = params.pop("adam_w_mode", params.pop("adamw_mode", True))
    decoupled = kind == "adamw" or bool(mode)
    cls: type[torch.optim.Optimizer] = torch.optim.AdamW if decoupled else torch.optim.Adam
    given = params.pop("fp32_optimizer_states", None)
    if not params.pop("torch_adam", False):
        params.setdefault("weight_decay", 0.0)
        if wide is not None or given is not None:
            cls, params["adamw_mode"] = DeepSpeedCPUAdam, decoupled
            params["fp32_optimizer_states"] = False if wide is False else given is not False
        elif not params.get("bias_correction", True):  # torch's always correct
            cls, params["adam_w_mode"] = FusedAdam, decoupled
        else:
            params.pop("bias_correction", None)
    params.pop("set_grad_none", None)  # gradients are always dropped
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    check_parameters("optimizer", cls, params)
    return cls(parameters, **params)
