"""The optimizer that ``optimizer.type`` names, as a torch optimizer."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.core.optim.lion import Lion
from shardwise.core.optim.muon import MuonWithAuxAdam
from shardwise.deepspeed.config import Settings
from shardwise.deepspeed.cpu_optimizers import DeepSpeedCPUAdam, FusedAdam, FusedLamb
from shardwise.deepspeed.schedules import check_parameters

__all__ = ["make_optimizer", "wide_states"]

_UNAVAILABLE = ("muadam", "muadamw", "musgd", "onebitadam", "onebitlamb", "zerooneadam")


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
        _mark_matrices(model)
        return _make_muon(parameters, params)
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


# ---- Muon: which parameters are matrices, and the param groups of its two halves

APART = ("embed", "lm_head")
"""Texts in names of parameters that Adam updates, whatever their shape."""
KEYS = {True: ("lr", "momentum", "weight_decay", "ns_method"), False: ("lr", "betas", "eps", "weight_decay")}
"""Of the configuration, by ``use_muon``."""
OWN_RATES = {True: "muon_lr", False: "adam_lr"}


def _mark_matrices(model: nn.Module | None) -> None:
    """Give parameters that have no mark ``use_muon`` theirs: matrices, but for embeddings and heads by their names."""
    for name, param in model.named_parameters() if model is not None else ():
        if not hasattr(param, "use_muon"):
            apart = any(text in name.lower() for text in APART)
            param.use_muon = param.dim() >= 2 and not apart  # type: ignore[attr-defined]


def _make_muon(parameters: Iterable[Any], params: dict[str, Any]) -> torch.optim.Optimizer:
    """Groups ``muon-params`` and ``adam-params`` of what is trained, each where it has any.

    Raises:
        ValueError: an unknown option (the nearest one is named); a parameter without a mark, or a group of parameters
            with options of its own.
    """
    known = [*dict.fromkeys([*KEYS[True], *KEYS[False], *OWN_RATES.values()])]
    for name, value in params.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"optimizer.params.{name}={value!r:.60}: Muon has no such parameter; {hint}")
    held = [param for param in _flat(parameters) if param.requires_grad]
    unmarked = [tuple(param.shape) for param in held if not isinstance(getattr(param, "use_muon", None), bool)]
    if unmarked:
        raise ValueError(
            f"optimizer.type='Muon' with parameters of shapes {unmarked[:3]} that have no mark: set param.use_muon to "
            "True or False, or give initialize parameters of its model"
        )
    groups = []
    for use_muon, title in ((True, "muon-params"), (False, "adam-params")):
        mine = [param for param in held if param.use_muon is use_muon]
        options = {key: params[key] for key in KEYS[use_muon] if key in params}
        if OWN_RATES[use_muon] in params:
            options["lr"] = params[OWN_RATES[use_muon]]
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        if mine:
            groups.append({"params": mine, "use_muon": use_muon, "name": title, **options})
    return MuonWithAuxAdam(groups)


def _flat(parameters: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for each in parameters:
        if not isinstance(each, dict):
            found.append(each)
            continue
        options = sorted(set(each) - {"params", "name"})
        if options:
            raise ValueError(
                f"model_parameters has a group with {', '.join(options)}, and Muon makes groups of its own: give "
                "muon_lr, adam_lr and the like in optimizer.params, or parameters without groups"
            )
        found += [each["params"]] if isinstance(each["params"], torch.Tensor) else list(each["params"])
    return found
