"""What our own safetensors files say beside their tensors: one JSON entry, ``shardwise``, of the file's metadata.

A model's holds other names of tied tensors and what modules returned from ``get_extra_state``; tensors in that are in
the file under ``$extra/…``. An optimizer's holds its parameter groups, step counts and loss scale. Other readers see
plain safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from shardwise.core.base.names import EXTRA_STATE
from shardwise.core.checkpoint.formats.lazy import Entry
from shardwise.core.checkpoint.source import CheckpointSource

__all__ = ["HEADER", "extra_entries", "model_metadata", "named_entries", "optimizer_metadata", "read_header"]

HEADER = "shardwise"
EXTRA = "state/extra/"


def extra_entries(source: CheckpointSource) -> dict[str, Entry]:
    """The tensors of extra state, under their names in a file."""
    facts = source.tensors().items()
    return {f"${n.removeprefix('state/')}": Entry(f, partial(source.read, n)) for n, f in facts if n.startswith(EXTRA)}


def model_metadata(source: CheckpointSource) -> dict[str, str]:
    """A model file's metadata."""
    state = source.state()
    header = {"kind": "model", "aliases": state.get("aliases", {}), "extra": state.get("extra", {})}
    return {"format": "pt", HEADER: json.dumps(header, allow_nan=False)}


def optimizer_metadata(source: CheckpointSource, index: int) -> dict[str, str]:
    """The same of an optimizer's file."""
    state = source.state()
    kept = {"optimizers": [state["optimizers"][index]], "scaler": state.get("scaler")}
    return {"format": "pt", HEADER: json.dumps({"kind": "optimizer", "state": kept}, allow_nan=False)}


def read_header(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The entry in a file's metadata, ``{}`` where it is not one of ours."""
    try:
        header = json.loads(metadata.get(HEADER, "{}"))
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def named_entries(
    entries: Mapping[str, Entry], header: Mapping[str, Any], aliases: Mapping[str, str]
) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The entries of a model's files under the names that a source has, and its state."""
    named: dict[str, Entry] = {}
    extra: dict[str, Any] = {}
    for name, entry in entries.items():
        if name.endswith(EXTRA_STATE):  # a tensor from get_extra_state, as torch and others save it
            named[f"{EXTRA}{name}"] = entry
            extra[name] = {"$tensor": f"extra/{name}"}
        else:
            named[f"state/{name[1:]}" if name.startswith("$") else f"model/{name}"] = entry
    state: dict[str, Any] = {}
    ties = {**(header.get("aliases") or {}), **aliases}
    if ties:
        state["aliases"] = ties
    extra |= header.get("extra") or {}
    if extra:
        state["extra"] = extra
    return named, state
