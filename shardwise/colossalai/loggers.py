"""A logger for distributed programs: ``get_dist_logger().info(message, ranks=[0])``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

NAME = "shardwise.colossalai"
FORM = logging.Formatter("%(name)s - %(levelname)s: %(filename)s:%(lineno)d %(funcName)s: %(message)s")


class _Printer(logging.Handler):
    """A handler that writes to the current ``sys.stderr``, which a program may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class DistributedLogger:
    """A logger; :func:`get_dist_logger` returns the only one of each name.

    Raises:
        ValueError: a logger of that name exists.
    """

    _made: ClassVar[dict[str, DistributedLogger]] = {}

    def __init__(self, name: str) -> None:
        if name in self._made:
            raise ValueError(f"a DistributedLogger {name!r} exists already: call get_dist_logger({name!r})")
        self._name, self._logger = name, logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        handler = _Printer()
        handler.setFormatter(FORM)
        self._logger.addHandler(handler)
        self._made[name] = self

    @classmethod
    def get_instance(cls, name: str) -> DistributedLogger:
        """Return the logger of that name; create it if it does not exist."""
        return cls._made[name] if name in cls._made else cls(name)

    @property
    def rank(self) -> int:
        """Return the rank of this process; 0 without a process group."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def set_level(self, level: str) -> None:
        """Do not log messages below ``level``.

        Raises:
            ValueError: ``level`` is not the name of a level: ``"DEBUG"``, ``"INFO"``, ``"WARNING"``, ``"ERROR"``.
        """
        self._logger.setLevel(level)

    def log_to_file(self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Also write to ``path/rank_<rank>.log``, or ``path/rank_<rank>_<suffix>.log``.

        Args:
            path: a directory, created if it does not exist.
            mode: ``"a"`` appends to the file, ``"w"`` replaces it.
            level: the lowest level that is written.
            suffix: part of the file's name.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        end = f"_{suffix}" if suffix is not None else ""
        handler = logging.FileHandler(Path(path) / f"rank_{self.rank}{end}.log", mode)
        handler.setLevel(level)
        handler.setFormatter(FORM)
        self._logger.addHandler(handler)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on ``ranks``, or on all ranks if it is ``None``."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on ``ranks``, or on all ranks if it is ``None``."""
        self._log(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on ``ranks``, or on all ranks if it is ``None``."""
        self._log(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on ``ranks``, or on all ranks if it is ``None``."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or self.rank in ranks:
            self._logger.log(level, "%s", message, stacklevel=3)


def get_dist_logger(name: str = NAME) -> DistributedLogger:
    """Return the logger of that name, which is the same in each call."""
    return DistributedLogger.get_instance(name)


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = (NAME,)) -> None:
    """Make existing loggers log only warnings and errors.

    Args:
        include: names of the loggers.
        exclude: if ``include`` is ``None``: all loggers except these.
    """
    for name in list(logging.Logger.manager.loggerDict):
        if name in include if include is not None else name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)
