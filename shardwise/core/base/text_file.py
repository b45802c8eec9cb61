"""Write small text files atomically."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path``. A reader sees the previous file or the complete new file.

    Raises:
        OSError: the file cannot be written; the previous one is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
