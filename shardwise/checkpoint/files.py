"""The error of every checkpoint, and JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["CheckpointError", "read_json"]


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read."""


def read_json(path: Path) -> Any:
    """Raises:
    CheckpointError: the file is not JSON.
    FileNotFoundError: there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint file {path}; check the path, and that the save finished")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON file ({error!s:.200}); load another copy") from error
