"""Any checkpoint with one optimizer as a universal one of DeepSpeed's, which it and this package read.

Its layout is in :mod:`~shardwise.checkpoint.formats.deepspeed_universal`. One parameter is in memory at a time; in the
model's file trained parameters have no elements, as DeepSpeed writes them at stage 3.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint import tree
from shardwise.checkpoint.atomic import atomic_directory
from shardwise.checkpoint.files import CheckpointError
from shardwise.checkpoint.formats.deepspeed import CLIENT_STATE, KEPT
from shardwise.checkpoint.formats.deepspeed_universal import COMMON, LATEST_UNIVERSAL, MASTER, SCALE, STEP, ZERO
from shardwise.checkpoint.formats.lazy import Entry, model_entries, whole
from shardwise.checkpoint.formats.optimizer_state import to_numbered
from shardwise.checkpoint.formats.output import output_file, write_text, write_torch
from shardwise.checkpoint.source import CheckpointSource, StateTensors
from shardwise.optim.nested_state import flat

__all__ = ["write_universal"]

VERSION = "0.19.8"
"""Whose layout it is; DeepSpeed reads no checkpoint that does not say."""
MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The same under two names: DeepSpeed asks for the first at stages 1 and 2, and for the second at stage 3."""


def write_universal(source: CheckpointSource, path: str | Path) -> tuple[str, ...]:
    """Write ``source`` as the directory ``path``, and its name into ``latest_universal`` beside that.

    Returns:
        What such a checkpoint has no place for, in sentences.

    Raises:
        CheckpointError: it has no optimizer's state, or that of several; or parameters of several names with one file.
        OSError: it cannot be written; what stood there is still there.
    """
    directory, state = Path(path), source.state()
    optimizers = state.get("optimizers") or []
    if len(optimizers) != 1:
        raise CheckpointError(
            f"{directory} is not written: a universal checkpoint has one optimizer, and there are {len(optimizers)}. "
            "zero_to_fp32 writes the model alone"
        )
    written = _Written(source)
    with atomic_directory(directory, lambda name: name in (ZERO, *MODELS)) as fresh:
        (fresh / ZERO).mkdir()
        for name, values in written.parameters():
            (fresh / ZERO / name).mkdir()
            for key, value in values.items():
                write_torch(fresh / ZERO / name / f"{key}.pt", value)
        write_torch(fresh / ZERO / COMMON, written.common())
        write_torch(fresh / MODELS[0], written.model())
        try:
            os.link(fresh / MODELS[0], fresh / MODELS[1])
        except OSError:  # a file system without hard links
            shutil.copyfile(fresh / MODELS[0], fresh / MODELS[1])
    place = directory.absolute()
    with output_file(place.parent / LATEST_UNIVERSAL) as unfinished:
        write_text(unfinished, place.name)
    return tuple(written.notes)


class _Written:
    """What is written of one source, in DeepSpeed's words. ``notes`` says what is not."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source, self._state = source, source.state()
        self._entries = model_entries(source)
        self._values, self._groups = to_numbered(source, 0)
        listed = self._state["optimizers"][0]["groups"]
        names = [name for group in listed for name in group["params"]]
        bad = [name for name in names if name not in self._entries or Path(name).name != name]
        if bad:
            raise CheckpointError(f"the optimizer has {bad[0]!r}, which is no parameter of the checkpoint: not written")
        self._numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        self._names = [list(group["params"]) for group in listed]
        self.notes: list[str] = []
        self._client = self._user("client_state")
        self._counters = self._user("counters")
        for kind, what in (("rng", "states of random number generators"), ("extra", "extra state of modules")):
            if self._state.get(kind):
                self.notes.append(f"{what} have no place in a universal checkpoint and were left out")

    def _user(self, kind: str) -> dict[str, Any]:
        """Of what an engine saves beside the values."""
        saved = tree.decode(self._state.get("user_state"), StateTensors(self._source))
        if isinstance(saved, Mapping) and isinstance(saved.get(kind), Mapping):
            return dict(saved[kind])
        other = self._state.get("other") or {}
        if kind == "counters":
            return {key: tree.decode(other[key], None) for key in ("global_samples", "skipped_steps") if other.get(key)}
        found = {key.removeprefix(CLIENT_STATE): value for key, value in other.items() if key.startswith(CLIENT_STATE)}
        return {key: tree.decode(value, None) for key, value in found.items()}

    def parameters(self) -> Any:
        """``(name, {file: content})`` of each trained parameter."""
        for name, number in self._numbers.items():
            master = self._entries[name]
            master = master.cast(torch.float32) if master.fact.dtype.itemsize < 4 else master
            state = {MASTER: master, **flat(self._values.get(number, {}), (torch.Tensor, Entry))}
            content: dict[str, Any] = {}
            for key, value in state.items():
                value = whole(value) if isinstance(value, Entry) else value
                content[key] = value if key == STEP else {"cat_dim": 0, "param": value}
            yield name, content

    def common(self) -> dict[str, Any]:
        """``optimizer_state.pt``: param groups, step counts as ZeRO-3 has them, the loss scale."""
        groups = [{**group, "params": [index]} for index, group in enumerate(self._groups)]
        first = [next((self._values.get(self._numbers[name], {}) for name in names), {}) for names in self._names]
        steps = {index: {STEP: values[STEP]} for index, values in enumerate(first) if STEP in values}
        found: dict[str, Any] = {"ds_version": VERSION, "zero_stage": 1, "param_groups": groups}
        found["optimizer_state_dict"] = {"state": steps, "param_groups": groups}
        scale = self._scale()
        return {**found, SCALE: scale} if scale else found

    def _scale(self) -> dict[str, Any]:
        """The fields of DeepSpeed's loss scaler. (The object itself is of a class of its own, and is not written.)"""
        ours = self._state.get("scaler")
        if not ours:
            theirs = (self._state.get("other") or {}).get("loss_scaler") or {}
            return {key: tree.decode(value, None) for key, value in theirs.items()}
        return {
            "cur_scale": float(ours["scale"]),
            "cur_iter": int(ours["good_steps"]) + 1,
            "last_overflow_iter": -1,
            "delayed_shift": int(ours["overflows"]),
            "cur_hysteresis": 0,
        }

    def model(self) -> dict[str, Any]:
        """``mp_rank_00_model_states.pt``."""
        half = self._state.get("compute_dtype") or {}
        module: dict[str, Any] = {}
        for name, entry in self._entries.items():
            dtype = getattr(torch, half[name]) if name in half else entry.fact.dtype
            module[name] = (
                torch.empty(0, dtype=dtype, device="cpu") if name in self._numbers else whole(entry).to(dtype)
            )
        aliases = dict(self._state.get("aliases") or {})
        frozen = set(self._state.get("frozen") or self._frozen())
        shapes = {name: torch.Size(self._entries[name].fact.shape) for name in self._numbers}
        counted = {key: int(self._counters.get(key, 0)) for key in ("global_samples", "skipped_steps")}
        found = {
            "module": {**module, **{name: module[first] for name, first in aliases.items() if first in module}},
            "buffer_names": [name for name in module if name not in self._numbers and name not in frozen],
            "optimizer": None,
            "param_shapes": [{name: shapes[name] for name in names} for names in self._names],
            "frozen_param_shapes": None,
            "shared_params": aliases,
            "frozen_param_fragments": None,
            "lr_scheduler": self._schedule(),
            "global_steps": int(self._state.get("step") or 0),
            **counted,
            "dp_world_size": 1,
            "mp_world_size": 1,
            "ds_config": {},
            "ds_version": VERSION,
        }
        clash = sorted(set(self._client) & (KEPT | set(found)))
        if clash:
            self.notes.append(
                f"{', '.join(clash)} of the client state have names of DeepSpeed's own, and were left out"
            )
        return {**{key: value for key, value in self._client.items() if key not in clash}, **found}

    def _frozen(self) -> list[str]:
        saved = self._state.get("user_state")
        return list(saved.get("frozen") or []) if isinstance(saved, Mapping) else []

    def _schedule(self) -> Any:
        saved = self._state.get("lr_schedulers")
        if saved is None:
            there = (self._state.get("other") or {}).get("lr_scheduler")
            return None if there is None else tree.decode(there, None)
        found = tree.decode(saved, StateTensors(self._source))
        if len(found) > 1:
            self.notes.append(f"of {len(found)} learning-rate schedulers the first was written")
        return found[0] if found else None
