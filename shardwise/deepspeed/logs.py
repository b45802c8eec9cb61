"""What DeepSpeed logs at INFO: progress, times and throughput, one line each, on standard output; ``deepspeed.utils``'
logger, and what programs log with it."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.deepspeed.collectives import get_rank, is_initialized

__all__ = [
    "LOG",
    "known_level",
    "log_dist",
    "log_dist_once",
    "print_dist",
    "print_json_dist",
    "set_level",
    "set_log_level_from_string",
    "should_log_le",
    "warning_once",
]


class _Printer(logging.Handler):
    """Standard output as it is when a line is written."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


def _make() -> logging.Logger:
    logger = logging.getLogger("shardwise.deepspeed")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(_Printer())
    return logger


LOG = _make()


def known_level(level: int | str) -> int:
    """Its number.

    Raises:
        ValueError: a name that :mod:`logging` does not know.
    """
    known = logging.getLevelNamesMapping()
    if isinstance(level, int):
        return level
    if level.upper() not in known:
        raise ValueError(f"logging_level={level!r}: give one of {', '.join(known)}, or its number")
    return known[level.upper()]


def set_level(level: int | str) -> int:
    """Log what is at least that important: ``logging.INFO`` is the default, ``logging.WARNING`` silences it.

    Returns:
        The level until now.

    Raises:
        ValueError: see :func:`known_level`.
    """
    before = LOG.level
    LOG.setLevel(known_level(level))
    return before


# ---- deepspeed.utils


def _spoken(message: Any, ranks: Sequence[int] | None) -> str | None:
    """``message`` with this rank's number, where it is one of ``ranks`` (-1: all) or there are none."""
    if is_initialized() and not (ranks and (ranks[0] == -1 or get_rank() in ranks)):
        return None
    return f"[Rank {get_rank() if is_initialized() else -1}] {message}"


def log_dist(message: Any, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks; ``[-1]``: on all."""
    text = _spoken(message, ranks)
    if text is not None:
        LOG.log(level, text)


def print_dist(message: Any, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks, whatever the level is."""
    text = _spoken(message, ranks)
    if text is not None:
        print(text)


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: Any = None) -> None:
    """Write ``message`` and the rank's number to ``path`` as JSON, on these ranks."""
    if _spoken(message, ranks) is not None:
        Path(path).write_text(json.dumps({**message, "rank": get_rank()}), encoding="utf-8")


@functools.cache
def _once(message: Any, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: Any, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, the first time that it is called with this."""
    _once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def warning_once(*args: Any) -> None:
    """A warning, the first time that it is given."""
    LOG.warning(*args)


LOG.warning_once = warning_once  # type: ignore[attr-defined]
LOG.log_dist_once = log_dist_once  # type: ignore[attr-defined]


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger (DeepSpeed's) and its handlers by name.

    Raises:
        ValueError: a name that :mod:`logging` does not know.
    """
    level, logger = known_level(log_level_str), custom_logger or LOG
    logger.setLevel(level)
    for each in logger.handlers:
        each.setLevel(level)


def should_log_le(max_log_level_str: str) -> bool:
    """Whether what is of that level is logged."""
    return LOG.getEffectiveLevel() <= known_level(max_log_level_str)
