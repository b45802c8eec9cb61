"""Conversion of a directory that a Trainer or Fabric saved to one file, or to a dictionary in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base import tree
from shardwise.core.base.warnings import warn_user
from shardwise.core.checkpoint.formats import open_checkpoint
from shardwise.core.checkpoint.formats.atomic_files import output_file, write_torch
from shardwise.core.checkpoint.formats.lazy_tensors import Entry
from shardwise.core.checkpoint.formats.optimizer_state import to_numbered
from shardwise.core.checkpoint.formats.registry import detect_format
from shardwise.core.checkpoint.source import CheckpointSource, StateTensors
from shardwise.core.optim.nested_state import mapped
from shardwise.strategies.checkpoint_entries import left_out, unpack
from shardwise.strategies.lightning_packages import Namespace
from shardwise.strategies.trainer_checkpoints import FABRIC, FABRIC_NAMES

MODEL = "model/"
VERSION = "pytorch-lightning_version"


def to_single_file(
    directory: str | os.PathLike[str], file: str | os.PathLike[str], optimizers: bool = False
) -> dict[str, Any]:
    """Write ``file`` with the full weights and Lightning's entries, in one process and without a Trainer.

    Args:
        directory: a checkpoint of one of these strategies, or of any format with weights by name.
        file: a file of ``torch.save``, as Lightning's are; an existing file is replaced atomically.
        optimizers: include optimizer states, so that training can continue from the file with any strategy.

    Returns:
        The written dictionary: ``state_dict`` and Lightning's entries; for Fabric the program's own entries. A warning
        names hyperparameters that the directory does not have.

    Raises:
        CheckpointDamage: a file is damaged.
        OSError: ``file`` cannot be written; an existing file is unchanged.
    """
    content = single_file_content(os.fspath(directory), optimizers)
    with output_file(Path(file)) as unfinished:
        write_torch(unfinished, content)
    return content


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str], output_file: str | os.PathLike[str], tag: str | None = None
) -> dict[str, Any]:
    """Convert a checkpoint like Lightning's function of that name, for directories of shardwise and of DeepSpeed.

    Args:
        checkpoint_dir: a directory that a Trainer or Fabric saved.
        output_file: the file to write; see :func:`to_single_file`.
        tag: a directory in ``checkpoint_dir``.

    Returns:
        The written dictionary.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    directory = os.path.join(checkpoint_dir, tag) if tag is not None else os.fspath(checkpoint_dir)
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"checkpoint_dir={os.fspath(checkpoint_dir)!r} with tag={tag!r}: no such directory")
    return to_single_file(directory, output_file)


def single_file_content(directory: str, optimizers: bool, module_alone: bool = False) -> dict[str, Any]:
    """Return the content for :func:`to_single_file`.

    With ``module_alone``, the entries of a Fabric program are left out.
    """
    with open_checkpoint(directory) as source:
        facts, state = source.tensors(), source.state()
        weights = {
            name.removeprefix(MODEL): source.read(name, 0, fact.numel).reshape(fact.shape).clone()
            for name, fact in facts.items()
            if name.startswith(MODEL)
        }
        weights |= {other: weights[name] for other, name in state.get("aliases", {}).items() if name in weights}
        weights |= {name: tree.decode(value, StateTensors(source)) for name, value in state.get("extra", {}).items()}
        user_state = tree.decode(state.get("user_state"), StateTensors(source))
        count = len(state.get("optimizers", ())) if optimizers else 0
        states = [_optimizer(source, index) for index in range(count)]
    missing = left_out(user_state)
    if missing:
        warn_user(
            f"{directory} was saved without {', '.join(missing)}: give these hyperparameters to load_from_checkpoint"
        )
    entries = unpack(user_state)
    if FABRIC in entries and module_alone:
        entries = {}
    elif FABRIC in entries:
        model, *named = entries[FABRIC_NAMES]
        return {**entries[FABRIC], model: weights, **(dict(zip(named, states, strict=False)) if optimizers else {})}
    if optimizers:
        entries = {"epoch": 0, "global_step": 0, "lr_schedulers": [], **entries, "optimizer_states": states}
    return {VERSION: "2.2.0", **entries, "state_dict": weights}


def _optimizer(source: CheckpointSource, index: int) -> dict[str, Any]:
    """Return the optimizer's state in the format of torch's ``state_dict()``."""
    state, groups = to_numbered(source, index)
    return {
        "state": {number: mapped(values, _read) for number, values in state.items()},
        "param_groups": groups,
    }


def _read(value: Any) -> Any:
    return value.read(0, value.info.numel).reshape(value.info.shape).clone() if isinstance(value, Entry) else value


def read_directories(namespace: Namespace) -> None:
    """Make ``load_from_checkpoint``, and strategies that read single files, read our directories as well.

    Lightning's function that opens files is replaced by one that reads our directories completely in this process, and
    calls Lightning's own for everything else.
    """
    for module, optimizers in (
        (namespace.find("core.saving"), False),  # load_from_checkpoint uses it; Fabric has none
        (namespace.load_fabric("plugins.io.torch_io"), True),
    ):
        if module is not None and not isinstance(module.pl_load, _Reader):
            module.pl_load = _Reader(module.pl_load, optimizers)


class _Reader:
    """Lightning's ``pl_load``, with :func:`single_file_content` for our directories."""

    def __init__(self, files: Callable[..., Any], optimizers: bool) -> None:
        self._files, self._optimizers = files, optimizers

    def __call__(self, path_or_url: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        place = os.fspath(path_or_url) if isinstance(path_or_url, (str, os.PathLike)) else None
        if not isinstance(place, str) or not os.path.isdir(place) or detect_format(place) != "native":
            return self._files(path_or_url, map_location, *args, **kwargs)
        content = single_file_content(place, self._optimizers, module_alone=not self._optimizers)
        device = map_location.get("cpu") if isinstance(map_location, Mapping) else map_location
        if not isinstance(device, (str, torch.device)):  # a function of storages, which leaves CPU storages unchanged
            return content
        return {key: _moved(value, torch.device(device)) for key, value in content.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return {key: _moved(item, device) for key, item in value.items()} if type(value) is dict else value
