"""``optimizer.type`` ``Muon``: which parameters are matrices, and the param groups of its two halves."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.optim.muon import MuonWithAuxAdam

__all__ = ["make_muon", "mark_matrices"]

APART = ("embed", "lm_head")
"""Texts in names of parameters that Adam updates, whatever their shape."""
KEYS = {True: ("lr", "momentum", "weight_decay", "ns_method"), False: ("lr", "betas", "eps", "weight_decay")}
"""Of the configuration, by ``use_muon``."""
OWN_RATES = {True: "muon_lr", False: "adam_lr"}


def mark_matrices(model: nn.Module | None) -> None:
    """Give parameters that have no mark ``use_muon`` theirs: matrices, but for embeddings and heads by their names."""
    for name, param in model.named_parameters() if model is not None else ():
        if not hasattr(param, "use_muon"):
            apart = any(text in name.lower() for text in APART)
            param.use_muon = param.dim() >= 2 and not apart  # type: ignore[attr-defined]


def make_muon(parameters: Iterable[Any], params: dict[str, Any]) -> torch.optim.Optimizer:
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
