"""Safetensors files, read by ranges and written as a stream.

The layout is eight bytes with the length of a JSON header, the header (name -> dtype, shape, byte range), and the
tensors in row-major order without gaps (https://github.com/huggingface/safetensors, "Format"). The library's own
``save_file`` needs every tensor in memory at once; this writer holds one block.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from shardwise.core.base.state_dict_names import EXTRA_STATE
from shardwise.core.checkpoint.formats.atomic_files import new_file
from shardwise.core.checkpoint.formats.lazy_tensors import Entry, blocks, closed_on_error
from shardwise.core.checkpoint.input_checks import checked_shape, open_regular
from shardwise.core.checkpoint.native_format import DTYPE_NAMES, MAX_HEADER_BYTES, as_bytes, safetensors_header
from shardwise.core.checkpoint.source import CheckpointDamage, CheckpointSource, TensorInfo

DTYPES = {code: dtype for dtype, code in DTYPE_NAMES.items()}


class SafetensorsFile:
    """An open safetensors file. It has ``entries`` by name, and ``metadata``, a header of strings.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointDamage: the header is invalid or the file has another size than its header says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"no checkpoint file {path}; check the path, and that the save finished")
        self._fd = open_regular(path)
        with closed_on_error(self):
            header, self._data_start = self._header()
            metadata = header.pop("__metadata__", None)
            self.metadata: dict[str, str] = (
                {str(key): value for key, value in metadata.items() if isinstance(value, str)}
                if isinstance(metadata, dict)
                else {}
            )
            self.entries = {name: self._entry(name, infos) for name, infos in header.items()}
            self._check_length(header)

    def _header(self) -> tuple[dict[str, Any], int]:
        length = struct.unpack("<Q", os.pread(self._fd, 8, 0).ljust(8, b"\0"))[0]
        size = os.fstat(self._fd).st_size
        if not 2 <= length <= min(MAX_HEADER_BYTES, max(0, size - 8)):
            raise CheckpointDamage(
                f"{self.path} is not a whole safetensors file (a header of {length} bytes in {size})"
            )
        try:
            header = json.loads(os.pread(self._fd, length, 8))
        except (ValueError, RecursionError) as error:
            raise CheckpointDamage(f"{self.path}: the safetensors header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise CheckpointDamage(f"{self.path}: the safetensors header is {header!r:.80}, not an object")
        return header, 8 + length

    def _entry(self, name: str, infos: Any) -> Entry:
        try:
            dtype = DTYPES[infos["dtype"]]
            start, end = infos["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointDamage(f"{self.path}: {name} is described as {infos!r:.120} ({error!r:.120})") from error
        info = TensorInfo(checked_shape(infos.get("shape"), f"{self.path}: {name}"), dtype)
        if type(start) is not int or type(end) is not int or start < 0 or end - start != info.nbytes:
            raise CheckpointDamage(f"{self.path}: {name} of shape {info.shape}, {dtype}, is at bytes {start} to {end}")
        return Entry(info, partial(self._read, name, dtype, self._data_start + start))

    def _check_length(self, header: Mapping[str, Any]) -> None:
        ranges = sorted(tuple(infos["data_offsets"]) for infos in header.values())
        position = 0
        for start, end in ranges:
            if start != position:
                raise CheckpointDamage(f"{self.path}: a tensor starts at byte {start} of the data, not at {position}")
            position = end
        size = os.fstat(self._fd).st_size
        if size != self._data_start + position:
            raise CheckpointDamage(f"{self.path} has {size} bytes where its header says {self._data_start + position}")

    def _read(self, name: str, dtype: torch.dtype, offset: int, start: int, numel: int) -> torch.Tensor:
        if self._fd < 0:
            raise ValueError(f"{self.path} was closed; open the checkpoint again to read {name!r}")
        result = torch.empty(numel, dtype=dtype, device="cpu")
        view = as_bytes(result).data
        position = offset + start * dtype.itemsize
        while view:
            got = os.preadv(self._fd, [view], position)
            if got == 0:
                raise CheckpointDamage(f"{self.path} ends inside {name} (byte {position})")
            view, position = view[got:], position + got
        return result

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def write_safetensors_stream(path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> int:
    """Write one file block by block, flush it to the disk, and return its size in bytes.

    Raises:
        ValueError: safetensors has no such dtype.
        CheckpointError: there are more tensors than one such file can describe.
        OSError: the file cannot be written.
    """
    tensors = [(name, entry.info.dtype, entry.info.shape) for name, entry in entries.items()]
    header, starts, nbytes = safetensors_header(tensors, metadata, path)
    values = list(entries.values())
    with new_file(path) as file:
        file.write(header)
        for index in sorted(range(len(values)), key=starts.__getitem__):
            for start, numel in blocks(values[index].info):
                file.write(as_bytes(values[index].read(start, numel).contiguous()))
    return nbytes


HEADER = "shardwise"
EXTRA = "state/extra/"


def extra_entries(source: CheckpointSource) -> dict[str, Entry]:
    """Return the tensors of extra state under their names in a file."""
    infos = source.tensors().items()
    return {f"${n.removeprefix('state/')}": Entry(f, partial(source.read, n)) for n, f in infos if n.startswith(EXTRA)}


def model_metadata(source: CheckpointSource) -> dict[str, str]:
    """Return the metadata of a model file."""
    state = source.state()
    header = {"kind": "model", "aliases": state.get("aliases", {}), "extra": state.get("extra", {})}
    return {"format": "pt", HEADER: json.dumps(header, allow_nan=False)}


def optimizer_metadata(source: CheckpointSource, index: int) -> dict[str, str]:
    """Return the metadata of an optimizer file."""
    state = source.state()
    own = {"optimizers": [state["optimizers"][index]], "scaler": state.get("scaler")}
    return {"format": "pt", HEADER: json.dumps({"kind": "optimizer", "state": own}, allow_nan=False)}


def read_header(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry of shardwise in a file's metadata, or ``{}`` for files of other programs."""
    try:
        header = json.loads(metadata.get(HEADER, "{}"))
    except (ValueError, RecursionError):
        return {}
    return header if isinstance(header, dict) else {}


def named_entries(
    entries: Mapping[str, Entry], header: Mapping[str, Any], aliases: Mapping[str, str]
) -> tuple[dict[str, Entry], dict[str, Any]]:
    """Return the entries of a model's files under the names that a source has, and its state."""
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
