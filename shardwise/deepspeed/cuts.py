"""``tp_model_init``: what a program says of a model's layers before ``initialize`` cuts them."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.checked import as_kind, whole
from shardwise.comm import ranks_of
from shardwise.deepspeed.config import Settings, load_config, read_config
from shardwise.deepspeed.plan import TENSOR_SIZES, number_format, parallel_sizes
from shardwise.remarks import warn_user

__all__ = ["tp_model_init", "with_asked_size"]


class _Asked(NamedTuple):
    tp_size: int
    dtype: torch.dtype


_ASKED: weakref.WeakKeyDictionary[nn.Module, _Asked] = weakref.WeakKeyDictionary()


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """``model`` as it is: ``initialize`` cuts its layers.

    Args:
        model: what ``initialize`` will be given.
        tp_size: ranks that hold parts of the same layers: ``tensor_parallel.autotp_size`` where the configuration of
            ``initialize`` gives none.
        dtype: what its ``fp16`` and ``bf16`` say. Where neither is enabled parameters keep their own, and another one
            here warns.
        config: compared at once.
        kwargs: ``tp_group``, ``None`` or the ranks that hold this one's layers.

    Raises:
        ValueError: ``config``, or here or in ``initialize`` its own, says otherwise; or ``tp_group`` has other ranks
            than the neighbours between which layers are cut.
        TypeError: there is no such argument, or a value is of another kind.
    """
    as_kind("model", model, nn.Module, "the module that initialize will be given")
    as_kind("dtype", dtype, torch.dtype, "a torch.dtype, such as torch.bfloat16")
    group = kwargs.pop("tp_group", None)
    if kwargs:
        given = ", ".join(f"{name}={value!r:.40}" for name, value in kwargs.items())
        raise TypeError(f"tp_model_init({given}): there are tp_size, dtype, config and tp_group")
    asked = _Asked(whole("tp_size", tp_size, 1, what="a number of ranks,"), dtype)
    if group is not None:
        ranks = ranks_of("tp_group", group)
        first = ranks[0] // tp_size * tp_size
        if ranks != tuple(range(first, first + tp_size)):
            raise ValueError(
                f"tp_group of ranks {list(ranks)} with {tp_size=}: layers are cut between neighbours, here ranks "
                f"{first} to {first + tp_size - 1}; give a group of these, or leave it out"
            )
    if config is not None:
        _compare(asked, read_config(config), model)
    _ASKED[model] = asked
    return model


def with_asked_size(config: Any, model: nn.Module) -> Any:
    """The configuration with the size that :func:`tp_model_init` was given for ``model`` or what it wraps, if it was.

    Raises:
        ValueError: it has another one, or another dtype; or modules of ``model`` were given different ones.
    """
    asked = _asked_of(model)
    if asked is None:
        return config
    settings = read_config(config)
    _compare(asked, settings, model)
    if any(settings.given(path) for path in TENSOR_SIZES):
        return config
    tree = load_config(config)
    return tree | {"tensor_parallel": {**(tree.get("tensor_parallel") or {}), "autotp_size": asked.tp_size}}


def _asked_of(model: nn.Module) -> _Asked | None:
    """Programs wrap what they have asked for, with adapters say, before it comes to ``initialize``."""
    found = [(type(module).__name__, _ASKED[module]) for module in model.modules() if module in _ASKED]
    for name, asked in found[1:]:
        outer, first = found[0]
        if asked != first:
            raise ValueError(
                f"tp_size={first.tp_size}, dtype={first.dtype} of tp_model_init for {outer}, and tp_size="
                f"{asked.tp_size}, dtype={asked.dtype} for {name} in the same model: give the same"
            )
    return found[0][1] if found else None


def _compare(asked: _Asked, settings: Settings, model: nn.Module) -> None:
    found, number = parallel_sizes(settings)[0], number_format(settings)
    if any(settings.given(path) for path in TENSOR_SIZES) and found != asked.tp_size:
        raise ValueError(
            f"tp_size={asked.tp_size} of tp_model_init and tensor_parallel.autotp_size={found} of the configuration: "
            "give the same"
        )
    if number not in (None, asked.dtype):
        raise ValueError(f"dtype={asked.dtype} of tp_model_init and {number} of the configuration: give the same")
    own = next((param.dtype for param in model.parameters() if param.is_floating_point()), asked.dtype)
    if number is None and own != asked.dtype:
        warn_user(
            f"dtype={asked.dtype} of tp_model_init without effect: the configuration enables neither fp16 nor bf16, so "
            f"parameters stay {own}"
        )
