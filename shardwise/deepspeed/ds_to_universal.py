"""DeepSpeed's universal checkpoints: they are read here as any other, and none is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["enable_universal_checkpoint"]


def enable_universal_checkpoint(param_list: Iterable[Any]) -> None:
    """Nothing: engines load whatever checkpoint there is, into parameters as they are."""
