"""Directories with an index: ``{"metadata": ..., "weight_map": {name: file}}`` next to the shards that it names.

Hugging Face and ColossalAI share this layout and differ in file names. Shards are safetensors files or torch files.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.core.checkpoint.formats.lazy_tensors import Entry
from shardwise.core.checkpoint.formats.safetensors_file import SafetensorsFile, read_header
from shardwise.core.checkpoint.formats.torch_file import load_torch, tensor_entries
from shardwise.core.checkpoint.input_checks import checked_name, checked_names, read_json
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointError


def read_index(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metadata and the weight map of an index.

    Raises:
        CheckpointError: the file has another form, or it names a file outside its own directory.
    """
    index = read_json(path)
    weights = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(file, str) for file in weights.values()):
        raise CheckpointError(
            f"{path} is not an index, because it has no weight_map of names and files; check the path"
        )
    checked_names(weights, path)
    for name, file in weights.items():
        checked_name(file, f"{path}, for {name!r:.80},")
    metadata = index.get("metadata") or {}
    return metadata if isinstance(metadata, dict) else {}, weights


class Shards:
    """The tensors of some files in one directory. A file is opened at its first read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, SafetensorsFile] = {}
        self._loaded: tuple[str, dict[str, Entry]] | None = None

    def entries(self, weight_map: dict[str, str]) -> tuple[dict[str, Entry], dict[str, str]]:
        """Return entries and aliases of the model that an index describes.

        Raises:
            CheckpointDamage: a shard is missing or does not match the index.
        """
        selected: dict[str, Entry] = {}
        aliases: dict[str, str] = {}
        for file in dict.fromkeys(weight_map.values()):
            if not (self.directory / file).is_file():
                raise CheckpointDamage(f"{self.directory / file} is missing, and the index names it")
            in_file, same = self.file(file)
            aliases.update(same)
            for name in (name for name, place in weight_map.items() if place == file):
                if name not in in_file and name not in same:
                    raise CheckpointDamage(f"{self.directory / file} does not have {name}, which the index names")
            selected.update({name: entry for name, entry in in_file.items() if weight_map.get(name) == file})
        order = {name: place for place, name in enumerate(weight_map)}
        return dict(sorted(selected.items(), key=lambda item: order[item[0]])), aliases

    def file(self, file: str) -> tuple[dict[str, Entry], dict[str, str]]:
        """Return entries and aliases of one file."""
        if file.endswith(".safetensors"):
            if file not in self._open:
                self._open[file] = SafetensorsFile(self.directory / file)
            return self._open[file].entries, {}
        entries, aliases = self._torch(file)
        # The loaded file is not kept alive: entries have only shape and dtype, and a read maps the file again.
        return {name: Entry(entry.info, partial(self._read, file, name)) for name, entry in entries.items()}, aliases

    def header(self) -> dict[str, Any]:
        """Return the header of the first opened file that we wrote."""
        headers = (read_header(opened.metadata) for opened in self._open.values())
        return next((header for header in headers if header), {})

    def _torch(self, file: str) -> tuple[dict[str, Entry], dict[str, str]]:
        state = load_torch(self.directory / file)
        if not isinstance(state, dict):
            raise CheckpointError(f"{self.directory / file} holds a {type(state).__name__}, not a dictionary")
        entries, aliases, _ = tensor_entries(state, str(self.directory / file))
        self._loaded = (file, entries)
        return entries, aliases

    def _read(self, file: str, name: str, start: int, numel: int) -> torch.Tensor:
        if self._loaded is None or self._loaded[0] != file:
            self._torch(file)
        assert self._loaded is not None
        return self._loaded[1][name].read(start, numel)

    def close(self) -> None:
        """Close every file."""
        for opened in self._open.values():
            opened.close()
        self._loaded = None
