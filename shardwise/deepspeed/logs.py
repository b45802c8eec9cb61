"""``deepspeed.utils.logger``: progress at INFO, one line each, on standard output."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from shardwise.deepspeed.collectives import get_rank


class _Printer(logging.Handler):
    """A handler that writes to the current ``sys.stdout``."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), flush=True)


LOG = logging.getLogger("shardwise.deepspeed")
LOG.setLevel(logging.INFO)
LOG.propagate = False
LOG.addHandler(_Printer())


def known_level(level: int | str) -> int:
    """Return the number of a level.

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
    """Set the log level: ``logging.INFO`` is the default, ``logging.WARNING`` silences progress.

    Returns:
        The previous level.

    Raises:
        ValueError: see :func:`known_level`.
    """
    before = LOG.level
    LOG.setLevel(known_level(level))
    return before


def log_dist(message: Any, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on ``ranks``. ``[-1]`` and an empty list stand for all ranks."""
    if not ranks or ranks[0] == -1 or get_rank() in ranks:
        LOG.log(level, "[Rank %s] %s", get_rank(), message)


@functools.cache
def _warning_once(*args: Any) -> None:
    LOG.warning(*args)


LOG.warning_once = _warning_once  # type: ignore[attr-defined]
