"""What the Booster's checkpoints take by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from shardwise.core.checkpoint.fitting import Rows

__all__ = ["FitOptions", "SaveOptions"]


class SaveOptions(TypedDict, total=False):
    """What :meth:`Booster.save_checkpoint` takes besides the run, all by name.

    ``tag`` (default ``step-<step>``), ``step`` (default: updates so far), ``data_position`` (where this rank is in its
    data) and ``user_state`` (rank 0's): numbers, strings, tensors and containers of them; ``keep``: how many
    whole checkpoints remain; ``use_async``.
    """

    tag: str
    step: int
    data_position: Any
    user_state: Any
    keep: int
    use_async: bool


class FitOptions(TypedDict, total=False):
    """How :meth:`Booster.load_checkpoint` fits a checkpoint to another model; see :meth:`Checkpointer.load`."""

    rename: Mapping[str, str] | None
    """Names in the checkpoint, or regular expressions, and what they are here."""
    rows: Mapping[str, Rows] | None
    """Parameters that may have another number of rows, and what new ones get: ``"keep"``, ``"zero"``, ``"mean"``."""
