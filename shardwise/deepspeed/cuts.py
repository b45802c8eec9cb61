"""``tp_model_init``: what a program says of a model's layers before ``initialize`` cuts them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from shardwise.core.base.checked import as_kind, whole
from shardwise.deepspeed.config import load_config, read_config
from shardwise.deepspeed.plan import TENSOR_SIZES, parallel_sizes

__all__ = ["tp_model_init", "with_asked_size"]

_ASKED: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, tp_group: Any = None) -> Any:
    """``model`` as it is: ``initialize`` cuts its layers.

    Args:
        model: what ``initialize`` will be given, or what that will wrap.
        tp_size: neighbouring ranks that hold parts of the same layers: ``tensor_parallel.autotp_size`` where the
            configuration of ``initialize`` gives none.
        dtype, config: no effect: ``fp16`` and ``bf16`` of the configuration of ``initialize`` decide.
        tp_group: not available.

    Raises:
        NotImplementedError: ``tp_group``.
    """
    as_kind("model", model, nn.Module, "the module that initialize will be given")
    if tp_group is not None:
        raise NotImplementedError(f"{tp_group=!r:.80}: leave it out: layers are cut between neighbouring ranks")
    _ASKED[model] = whole("tp_size", tp_size, 1, what="a number of ranks,")
    return model


def with_asked_size(config: Any, model: nn.Module) -> Any:
    """The configuration with the size that :func:`tp_model_init` was given for ``model`` or what it wraps, if it was.

    Raises:
        ValueError: it has another one, or modules of ``model`` were given different ones.
    """
    sizes = {_ASKED[module] for module in model.modules() if module in _ASKED}
    if not sizes:
        return config
    settings = read_config(config)
    if any(settings.given(path) for path in TENSOR_SIZES):
        sizes.add(parallel_sizes(settings)[0])
    if len(sizes) > 1:
        raise ValueError(
            f"tp_size of tp_model_init and tensor_parallel.autotp_size of the configuration are {sorted(sizes)}: give "
            "the same"
        )
    tree = load_config(config)
    return tree | {"tensor_parallel": {**(tree.get("tensor_parallel") or {}), "autotp_size": sizes.pop()}}
