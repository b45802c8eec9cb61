"""Single files, written so that a reader sees the old content or the new content and never a part.

The content goes to ``.<name>.partial`` in the same directory, is flushed to the disk, and takes its name by one
rename. The temporary name is fixed, so what a killed run left behind is overwritten by the next save.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

__all__ = ["CheckpointError", "read_json", "read_safetensors", "read_torch", "write_json", "write_safetensors"]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read."""


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(path: Path, write: Callable[[Path], None]) -> None:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; give the name of a file to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        _sync(partial)
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems cannot flush a directory; the rename is still atomic there
        _sync(path.parent)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write CPU tensors that share no memory, with a string-to-string header.

    Raises:
        OSError: the file cannot be written; what stood under ``path`` before is still there.
    """
    try:
        _replace(path, lambda partial: save_file(dict(tensors), partial, metadata=dict(metadata)))
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def read_safetensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors of the file on the CPU, and its header.

    Raises:
        CheckpointError: the file is not a whole safetensors file.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint file {path}; check the path, and that the save finished")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            return tensors, dict(file.metadata() or {})
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); load another copy") from error


def read_torch(path: Path) -> Any:
    """Content of a file written by ``torch.save``, restricted to tensors and plain containers.

    Raises:
        CheckpointError: the file holds other objects, or is damaged.
        FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint file {path}; check the path, and that the save finished")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as a torch file of tensors and plain containers ({error}); "
            "convert it to safetensors"
        ) from error


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as JSON; numbers that JSON does not have (inf, nan) are refused.

    Raises:
        OSError: the file cannot be written; what stood under ``path`` before is still there.
    """
    text = json.dumps(value, indent=1, allow_nan=False)
    _replace(path, lambda partial: _write_text(partial, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Raises:
    CheckpointError: the file is not JSON.
    FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint file {path}; check the path, and that the save finished")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not a JSON file ({error}); load another copy") from error
