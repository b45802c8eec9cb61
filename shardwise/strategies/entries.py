"""What Lightning keeps beside the weights, as data that a native checkpoint holds: nothing of it is pickled.

Numbers, strings, tensors, lists, tuples and dictionaries are what they are. A few other classes, named here, become
``{"(class)": name, "value": data}``; reading makes those and no others, so a checkpoint cannot name code to run.

This is no second way to write nested values: ``tree`` writes what comes out here. It stands by
itself because the checkpoint's room knows none of these classes, and because what is no data has to be refused, or a
hyper-parameter left out, before the ranks begin to save together.
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

from shardwise.core.base.printable import class_name

__all__ = ["left_out", "pack", "unpack"]

OURS, PLAIN, LEFT_OUT = "lightning", "plain", "left_out"
SHARDED = ("state_dict", "optimizer_states")  # what the session writes itself
HYPER_PARAMETERS = ("hyper_parameters", "hparams_type", "datamodule_hyper_parameters", "datamodule_hparams_type")

CLASS, VALUE = "(class)", "value"
NUMPY = {"bool", *(f"float{b}" for b in (16, 32, 64)), *(f"{s}int{b}" for s in ("", "u") for b in (8, 16, 32, 64))}
PURE = ("PurePosixPath", "PureWindowsPath")
PATHS = {"PosixPath": "Path", "WindowsPath": "Path", **{name: name for name in PURE}}
ATTRIBUTES: dict[str, type[Any]] = {"Namespace": argparse.Namespace, "SimpleNamespace": types.SimpleNamespace}
ATTRIBUTE_DICTS = ("lightning.fabric.utilities.data.AttributeDict", "lightning_fabric.utilities.data.AttributeDict")
OMEGACONF = ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig")


def pack(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Lightning's dictionary as data, without what the session writes.

    Hyper-parameters that are no data are left out; :func:`left_out` names them.

    Raises:
        TypeError: another entry holds something that is no data; its path and class are named.
    """
    entries: dict[str, Any] = {}
    missing: list[str] = []
    for key, value in checkpoint.items():
        if key in SHARDED:
            continue
        if key in HYPER_PARAMETERS:
            kept = _that_are_data(value, key, missing)
            if kept is not None:
                entries[key] = kept
        else:
            entries[key] = _to_data(value, key)
    return {OURS: {PLAIN: entries, LEFT_OUT: missing}}


def unpack(state: Any) -> dict[str, Any]:
    """What :func:`pack` was given; ``{}`` for a checkpoint that no Trainer wrote.

    Args:
        state: the checkpoint's user state.

    Raises:
        ValueError: an entry is of a class that is not known here.
    """
    return {key: _from_data(value) for key, value in _ours(state).get(PLAIN, {}).items()}


def left_out(state: Any) -> list[str]:
    """Paths of the hyper-parameters that a user state lacks, because they were no data."""
    return list(_ours(state).get(LEFT_OUT, ()))


def _ours(state: Any) -> Mapping[str, Any]:
    ours = state.get(OURS) if isinstance(state, Mapping) else None
    return ours if isinstance(ours, Mapping) else {}


def _that_are_data(value: Any, key: str, missing: list[str]) -> Any:
    """Of hyper-parameters; those that are not are added to ``missing``."""
    try:
        return _to_data(value, key)
    except TypeError:
        if type(value) is not dict:
            missing.append(key)
            return None
    kept = {}
    for name, item in value.items():
        try:
            _to_data(item, key)
        except TypeError:
            missing.append(f"{key}/{name}")
        else:
            kept[name] = item
    return _to_data(kept, key)


# ---- to data


def _to_data(value: Any, path: str) -> Any:
    """Raises TypeError for what is none."""
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
    if isinstance(value, Mapping):
        if all(_is_plain_key(key) for key in value):
            return {key: _to_data(item, f"{path}/{key}") for key, item in value.items()}
        return {CLASS: "dict", VALUE: _pairs(value, path)}
    raise TypeError(
        f"the entry {path} is a {class_name(type(value))} ({value!r:.80}), and a checkpoint, in which nothing is "
        "pickled, holds numbers, strings, tensors, arrays, paths and containers of them: save its state_dict() or "
        "vars() instead, or give the strategy a checkpoint_io, which pickles whole files"
    )


def _named(value: Any, path: str) -> tuple[str, Any] | None:
    """The name of one of the other classes, and ``value`` as data; ``None`` where it is of none of them."""
    kind = type(value)
    name = class_name(kind)
    if isinstance(value, np.generic):
        return ("numpy", [value.dtype.name, value.item()]) if value.dtype.name in NUMPY else None
    if kind is np.ndarray:
        return "array", _tensor(value, path)
    if kind is bytes:
        return "bytes", torch.from_numpy(np.frombuffer(value, np.uint8).copy())
    if kind is complex:
        return "complex", [value.real, value.imag]
    if kind in (set, frozenset):
        return kind.__name__, _items(sorted(value, key=repr), path)
    if kind is Counter:
        return "Counter", _pairs(value, path)
    if kind in (torch.dtype, torch.device):
        return name, str(value).removeprefix("torch.")
    if isinstance(value, pathlib.PurePath) and kind.__name__ in PATHS and kind.__module__.startswith("pathlib"):
        return PATHS[kind.__name__], str(value)
    if kind in ATTRIBUTES.values():
        return kind.__name__, _pairs(vars(value), path)
    if name in ATTRIBUTE_DICTS:
        return name, _pairs(value, path)
    if name in OMEGACONF:  # interpolations stay what they are
        return name, _to_data(importlib.import_module("omegaconf").OmegaConf.to_container(value, resolve=False), path)
    if isinstance(value, type) and class_name(value) in (*ATTRIBUTE_DICTS, *OMEGACONF):
        return "type", class_name(value)
    return None


def _items(values: Iterable[Any], path: str) -> list[Any]:
    return [_to_data(item, f"{path}/{index}") for index, item in enumerate(values)]


def _pairs(value: Mapping[Any, Any], path: str) -> list[list[Any]]:
    return [[_to_data(key, f"{path}/(key)"), _to_data(item, f"{path}/{key}")] for key, item in value.items()]


def _is_plain_key(key: Any) -> bool:
    if isinstance(key, tuple):
        return all(_is_plain_key(each) for each in key)
    return key is None or (isinstance(key, str | int | float) and not isinstance(key, np.generic) and key != CLASS)


def _tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    try:
        return torch.from_numpy(np.array(array, order="C"))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"the entry {path} is an array of {array.dtype}, which a checkpoint cannot hold ({error}): save numbers, "
            "or a list of strings"
        ) from error


# ---- from data


def _from_data(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_data(item) for item in value]
    if isinstance(value, tuple):
        return tuple(_from_data(item) for item in value)
    if not isinstance(value, dict):
        return value
    if CLASS not in value:
        return {key: _from_data(item) for key, item in value.items()}
    name, data = value[CLASS], value[VALUE]
    if name not in MAKERS:
        raise ValueError(f"an entry of the checkpoint is a {name!r}, which is not known here; update shardwise")
    return MAKERS[name](data)


def _to_dict(pairs: Any) -> dict[Any, Any]:
    return {_from_data(key): _from_data(item) for key, item in pairs}


def _numpy(data: Any) -> Any:
    name, number = data
    if name not in NUMPY:
        raise ValueError(f"an entry of the checkpoint is a number of numpy's {name!r}, which is not known here")
    return np.dtype(name).type(number)


def _dtype(data: Any) -> torch.dtype:
    found = getattr(torch, data, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"an entry of the checkpoint is the dtype {data!r}, which this torch does not have: update it")
    return found


def _class(name: str) -> Any:
    """One of the classes of other libraries that are known here; ``None`` where it is not installed."""
    if name not in (*ATTRIBUTE_DICTS, *OMEGACONF):
        raise ValueError(f"an entry of the checkpoint is the class {name!r}, which is not known here")
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError:
        return None


def _attributes(kind: type[Any]) -> Callable[[Any], Any]:
    return lambda pairs: kind(**_to_dict(pairs))


def _attribute_dict(name: str) -> Callable[[Any], Any]:
    return lambda pairs: (_class(name) or dict)(_to_dict(pairs))


def _omegaconf(name: str) -> Callable[[Any], Any]:
    def make(data: Any) -> Any:
        plain = _from_data(data)
        return plain if _class(name) is None else importlib.import_module("omegaconf").OmegaConf.create(plain)

    return make


MAKERS: dict[str, Callable[[Any], Any]] = {
    "dict": _to_dict,
    "numpy": _numpy,
    "array": lambda tensor: tensor.numpy(),
    "bytes": lambda tensor: tensor.numpy().tobytes(),
    "complex": lambda parts: complex(*parts),
    "set": lambda items: set(_from_data(items)),
    "frozenset": lambda items: frozenset(_from_data(items)),
    "Counter": lambda pairs: Counter(_to_dict(pairs)),
    "torch.dtype": _dtype,
    "torch.device": torch.device,
    "type": _class,
    **{name: getattr(pathlib, name) for name in PATHS.values()},
    **{name: _attributes(kind) for name, kind in ATTRIBUTES.items()},
    **{name: _attribute_dict(name) for name in ATTRIBUTE_DICTS},
    **{name: _omegaconf(name) for name in OMEGACONF},
}
