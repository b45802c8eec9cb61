"""Learning-rate schedulers: whose state it is, and their state alone as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.core.checkpoint import tree
from shardwise.core.checkpoint.bounds import checked_tree, read_json, reading, saving
from shardwise.core.checkpoint.files import CheckpointError
from shardwise.core.checkpoint.formats.detect import located
from shardwise.core.checkpoint.formats.output import output_file, write_text, write_torch
from shardwise.core.checkpoint.formats.torch_file import TORCH_SUFFIXES, load_torch
from shardwise.core.checkpoint.formats.trainer import scheduler_files

MOST_VALUES = 1 << 20

__all__ = [
    "SavedScheduler",
    "inner_scheduler",
    "read_lr_scheduler",
    "regrouped",
    "scheduler_class",
    "write_lr_scheduler",
]

BASES = {"LRScheduler", "_LRScheduler", "object"}
UNUSED = {"verbose"}
"""Entries that some versions of torch have."""
ONE_A_GROUP = ("base_lrs", "_last_lr")
"""Lists in the state of torch's schedulers with an entry for each param group."""


@dataclass(frozen=True)
class SavedScheduler:
    """The state of a learning-rate scheduler; ``kind`` is its class, empty where that is not known."""

    state: Mapping[str, Any]
    kind: str = ""

    def misfit(self, scheduler: Any, groups_alike: bool = True) -> str | None:
        """Why it is not a state of ``scheduler``; ``None``: it is, as far as that can be known.

        A class of the same name, or one that ``scheduler`` is derived from, is the same. Otherwise the entries decide:
        all of torch's own, and of others that not both have some that the other lacks.

        Args:
            scheduler: that is to take it.
            groups_alike: the optimizer has the groups that it had then.
        """
        if not isinstance(self.state, Mapping):
            return f"the state of a scheduler is a {type(self.state).__name__}"
        own_kind, own = scheduler_class(scheduler), scheduler.state_dict()
        theirs = f"of {self.kind}" if self.kind else f"one with {_listed(_entries(self.state))}"
        ours = own_kind if self.kind else f"{own_kind}, which has {_listed(_entries(own))}"
        same = self.kind in {each.__name__ for each in type(inner_scheduler(scheduler)).__mro__} - BASES
        only_here, only_there = _entries(own) - _entries(self.state), _entries(self.state) - _entries(own)
        of_torch = type(inner_scheduler(scheduler)).__module__.startswith("torch.optim")
        other = self.kind in vars(torch.optim.lr_scheduler) and of_torch
        exactly = bool(self.kind) or of_torch
        if not same and (other or (only_here or only_there if exactly else only_here and only_there)):
            return f"the state is {theirs}, the scheduler a {ours}"
        for key in ONE_A_GROUP if groups_alike else ():
            rates, own_rates = self.state.get(key), own.get(key)
            if isinstance(rates, list) and isinstance(own_rates, list) and len(rates) != len(own_rates):
                return f"the state is for {len(rates)} parameter groups, the scheduler's optimizer has {len(own_rates)}"
        return None


def inner_scheduler(scheduler: Any) -> Any:
    """The scheduler itself, where accelerate has wrapped it."""
    inner = getattr(scheduler, "scheduler", None)
    return inner if hasattr(inner, "load_state_dict") else scheduler


def scheduler_class(scheduler: Any) -> str:
    """The name of its class."""
    return type(inner_scheduler(scheduler)).__name__


def _entries(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if isinstance(key, str) and not key.startswith("_")} - UNUSED


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def regrouped(
    state: Mapping[str, Any], own: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], links: Sequence[int | None]
) -> dict[str, Any]:
    """``state``, made with other param groups, for those of now.

    Args:
        state: as saved.
        own: the scheduler's as it is.
        groups: of the optimizer, whose options are restored already.
        links: by group, the one that it continues.
    """
    changed = dict(state)
    for key, values in state.items():
        mine = own.get(key)
        if key == "_schedulers" and isinstance(mine, list) and len(mine) == len(values):
            changed[key] = [regrouped(each, one, groups, links) for each, one in zip(values, mine, strict=True)]
        elif key == "base_lrs":
            changed[key] = [group.get("initial_lr", rate) for group, rate in zip(groups, mine or values, strict=False)]
        elif key == "_last_lr":
            changed[key] = [group["lr"] for group in groups]
        elif key.endswith(("lrs", "momentums", "lambdas")) and isinstance(mine, list) and len(mine) == len(groups):
            changed[key] = [
                values[link] if link is not None and link < len(values) else one
                for link, one in zip(links, mine, strict=True)
            ]
    return changed


def write_lr_scheduler(scheduler: Any, path: str | Path) -> None:
    """Write a scheduler's ``state_dict()``: as JSON, with its class, or, by the ending, as a file of ``torch.save``.

    Raises:
        CheckpointError: the state is so large, or nested so deeply, that no reader would take it.
        TypeError: the state holds something that is neither a number, text, tensor nor a list or dictionary of such.
        OSError: the file cannot be written; what stood there is still there.
    """
    encoded = tree.encode(scheduler.state_dict(), None)
    if Path(path).suffix in TORCH_SUFFIXES:
        with output_file(Path(path)) as unfinished:
            write_torch(unfinished, tree.decode(encoded, None))
        return
    content = {"kind": "lr_scheduler", "class": scheduler_class(scheduler), "state": encoded}
    with saving(path):
        checked_tree(content, MOST_VALUES, "its state")
    text = json.dumps(content, indent=1, allow_nan=False)
    with output_file(Path(path)) as unfinished:
        write_text(unfinished, text)


def read_lr_scheduler(path: str | Path) -> SavedScheduler:
    """The scheduler state in a file: our JSON, or a torch file (read with ``weights_only=True``). In a directory of
    Hugging Face's Trainer or of accelerate it is that of the first scheduler there.

    Raises:
        FileNotFoundError: nothing there.
        CheckpointError: the file is damaged, or is not a scheduler's.
    """
    source = Path(path)
    if source.is_dir():
        source = next(iter(scheduler_files(located(source))), source / "scheduler.pt")
    if source.suffix in TORCH_SUFFIXES:
        state = load_torch(source)
        if not isinstance(state, dict):
            raise CheckpointError(f"{source} holds a {type(state).__name__}, not a scheduler's state")
        return SavedScheduler(state)
    data = read_json(source)
    if not isinstance(data, dict) or data.get("kind") != "lr_scheduler":
        raise CheckpointError(f"{source} is not a scheduler's file; give the one that save_lr_scheduler wrote")
    with reading(source):
        checked_tree(data, MOST_VALUES, source)
        decoded = tree.decode(data["state"], None)
    if not isinstance(decoded, dict):
        raise CheckpointError(f"{source} holds a {type(decoded).__name__}, not a scheduler's state")
    return SavedScheduler(decoded, str(data.get("class", "")))
