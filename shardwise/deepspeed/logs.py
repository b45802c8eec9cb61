"""What DeepSpeed logs at INFO: progress, times and throughput, one line each, on standard output."""

from __future__ import annotations

import logging

__all__ = ["LOG", "known_level", "set_level"]


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
