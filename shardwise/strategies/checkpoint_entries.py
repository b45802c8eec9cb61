"""Lightning's own entries of a checkpoint as plain data: nothing in a checkpoint is pickled.

Numbers, strings, tensors, lists, tuples and dictionaries are unchanged; the checkpoint's own codec writes them. Objects
of a few other classes become ``{"(class)": name, "value": data}``. Reading creates only the classes that this module
lists, so a checkpoint cannot name code to run. Any other object raises an error, or is left out if it is a
hyperparameter, before the collective save begins.
"""

from __future__ import annotations

import argparse
import importlib
import numbers
import pathlib
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from shardwise.core.base.validate import class_name

OURS, PLAIN, LEFT_OUT = "lightning", "plain", "left_out"
SHARDED = ("state_dict", "optimizer_states")  # the session writes these itself
HYPER_PARAMETERS = ("hyper_parameters", "hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_type")

CLASS, VALUE = "(class)", "value"
ATTRIBUTES: dict[str, type[Any]] = {"Namespace": argparse.Namespace, "SimpleNamespace": types.SimpleNamespace}
ATTRIBUTE_DICTS = ("lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict")
OMEGACONF = ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig")


def pack(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return Lightning's dictionary as plain data, without the state that the session writes.

    Hyperparameters that are not data are left out; :func:`left_out` names them.

    Raises:
        TypeError: another entry is not data; the error names its path and class.
    """
    entries: dict[str, Any] = {}
    missing: list[str] = []
    for key, value in checkpoint.items():
        if key in HYPER_PARAMETERS:
            _add_hyper_parameters(entries, key, value, missing)
        elif key not in SHARDED:
            entries[key] = _to_data(value, key)
    return {OURS: {PLAIN: entries, LEFT_OUT: missing}}


def unpack(state: Any) -> dict[str, Any]:
    """Return the entries that :func:`pack` was given; ``{}`` for a checkpoint that Lightning did not write.

    Args:
        state: the checkpoint's user state.

    Raises:
        ValueError: an entry has a class that this version does not know.
    """
    return {key: _from_data(value) for key, value in _ours(state).get(PLAIN, {}).items()}


def left_out(state: Any) -> list[str]:
    """Return the paths of hyperparameters that were not saved because they are not data."""
    return list(_ours(state).get(LEFT_OUT, ()))


def _ours(state: Any) -> Mapping[str, Any]:
    ours = state.get(OURS) if isinstance(state, Mapping) else None
    return ours if isinstance(ours, Mapping) else {}


def _add_hyper_parameters(entries: dict[str, Any], key: str, value: Any, missing: list[str]) -> None:
    """Add ``entries[key]``; hyperparameters that are not data are added to ``missing`` instead."""
    try:
        entries[key] = _to_data(value, key)
        return
    except TypeError:
        if type(value) is not dict:
            missing.append(key)
            return
    entries[key] = {}
    for name, item in value.items():
        try:
            entries[key] |= _to_data({name: item}, key)
        except TypeError:
            missing.append(f"{key}/{name}")


# ---- to data


def _to_data(value: Any, path: str) -> Any:
    """Raise TypeError if ``value`` cannot be written as data."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | torch.Tensor):
        return value
    named = _named(value, path)
    if named is not None:
        return {CLASS: named[0], VALUE: named[1]}
    if isinstance(value, numbers.Real):
        return value
    if isinstance(value, list):
        return _items(value, path)
    if isinstance(value, tuple):
        return tuple(_items(value, path))
    if isinstance(value, Mapping) and all(_is_plain_key(key) for key in value):
        kind = Counter if type(value) is Counter else dict
        return kind({key: _to_data(item, f"{path}/{key}") for key, item in value.items()})
    raise TypeError(
        f"the entry {path} is a {class_name(type(value))} ({value!r:.80}), and a checkpoint, in which nothing is "
        "pickled, holds numbers, strings, tensors, arrays, paths and containers of them. Save its state_dict() or "
        "vars() instead, or give the strategy a checkpoint_io, which pickles whole files"
    )


def _named(value: Any, path: str) -> tuple[str, Any] | None:
    """Return the class's name and ``value`` as data if it is one of the other classes, else ``None``."""
    kind = type(value)
    name = class_name(kind)
    if kind is bytes:
        return "bytes", torch.from_numpy(np.frombuffer(value, np.uint8).copy())
    if kind is np.ndarray:
        return "array", _tensor(value, path)
    if kind in (set, frozenset):
        return kind.__name__, _items(sorted(value, key=repr), path)
    if kind in (torch.dtype, torch.device):
        return name, str(value).removeprefix("torch.")
    if isinstance(value, pathlib.PurePath):
        return "Path", str(value)
    if kind in ATTRIBUTES.values():
        return kind.__name__, _to_data(vars(value), path)
    if name in ATTRIBUTE_DICTS:
        return name, _to_data(dict(value), path)
    if name in OMEGACONF:  # interpolations are not resolved
        return name, _to_data(importlib.import_module("omegaconf").OmegaConf.to_container(value, resolve=False), path)
    if isinstance(value, type) and class_name(value) in (*ATTRIBUTE_DICTS, *OMEGACONF):
        return "type", class_name(value)
    return None


def _items(values: Iterable[Any], path: str) -> list[Any]:
    return [_to_data(item, f"{path}/{index}") for index, item in enumerate(values)]


def _is_plain_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(_is_plain_key(each) for each in key)
    return key is None or (isinstance(key, str | numbers.Real) and key != CLASS)


def _tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the entry {path} is an array of {array.dtype}, which a checkpoint cannot hold ({error}). Save numbers, "
            "or a list of strings"
        ) from error


# ---- from data


def _from_data(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_data(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_from_data(item) for item in value)
    if not isinstance(value, dict) or type(value) is Counter:
        return value
    if CLASS not in value:
        return {key: _from_data(item) for key, item in value.items()}
    name, data = value[CLASS], _from_data(value[VALUE])
    if name not in MAKERS:
        raise ValueError(f"an entry of the checkpoint is a {name!r}, unknown to this version; update shardwise")
    return MAKERS[name](data)


def _dtype(data: Any) -> torch.dtype:
    dtype = getattr(torch, data, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"an entry of the checkpoint has the dtype {data!r}, unknown to this torch; update torch")
    return dtype


def _class(name: str) -> Any:
    """Return a class of another library that is known here, or ``None`` if the library is not installed."""
    if name not in (*ATTRIBUTE_DICTS, *OMEGACONF):
        raise ValueError(f"an entry of the checkpoint is a {name!r}, unknown to this version; update shardwise")
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError:
        return None


def _attributes(kind: type[Any]) -> Callable[[Any], Any]:
    return lambda values: kind(**values)


def _attribute_dict(name: str) -> Callable[[Any], Any]:
    return lambda values: (_class(name) or dict)(values)


def _omegaconf(name: str) -> Callable[[Any], Any]:
    return lambda plain: plain if _class(name) is None else importlib.import_module("omegaconf").OmegaConf.create(plain)


MAKERS: dict[str, Callable[[Any], Any]] = {
    "bytes": lambda tensor: tensor.numpy().tobytes(),
    "array": lambda tensor: tensor.numpy(),
    "set": set,
    "frozenset": frozenset,
    "Path": pathlib.Path,
    "torch.dtype": _dtype,
    "torch.device": torch.device,
    "type": _class,
    **{name: _attributes(kind) for name, kind in ATTRIBUTES.items()},
    **{name: _attribute_dict(name) for name in ATTRIBUTE_DICTS},
    **{name: _omegaconf(name) for name in OMEGACONF},
}
