"""A logger that knows its rank: ``get_dist_logger().info(message, ranks=[0])``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]

NAME = "shardwise.colossalai"
FORM = logging.Formatter("%(name)s - %(levelname)s: %(filename)s:%(lineno)d %(funcName)s: %(message)s")
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class _Printer(logging.Handler):
    """To what standard error is when it is written to, as a program may have put another in its place."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class DistributedLogger:
    """One for each name; :func:`get_dist_logger` gives it.

    Raises:
        ValueError: there is one of that name.
    """

    _made: ClassVar[dict[str, DistributedLogger]] = {}

    def __init__(self, name: str) -> None:
        if name in self._made:
            raise ValueError(f"there is a DistributedLogger {name!r} already: get_dist_logger({name!r}) gives it")
        self._name, self._logger = name, logging.getLogger(name)
        self._logger.setLevel(logging.INFO)
        self._logger.propagate = False
        handler = _Printer()
        handler.setFormatter(FORM)
        self._logger.addHandler(handler)
        self._made[name] = self

    @classmethod
    def get_instance(cls, name: str) -> DistributedLogger:
        """Return the logger of that name; it is made if there is none yet."""
        return cls._made[name] if name in cls._made else cls(name)

    @property
    def rank(self) -> int:
        """This process' among all; 0 before they meet."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    def set_level(self, level: str) -> None:
        """What is below ``level`` is not logged.

        Raises:
            ValueError: it is none of ``"DEBUG"``, ``"INFO"``, ``"WARNING"``, ``"ERROR"``.
        """
        self._logger.setLevel(_checked(level))

    def log_to_file(self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Also write to ``path/rank_<rank>.log``, or ``path/rank_<rank>_<suffix>.log``.

        Args:
            path: a directory, made if it does not exist.
            mode: ``"a"`` adds to the file, ``"w"`` replaces it.
            level: what is below it is not written.
            suffix: part of the file's name.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        end = f"_{suffix}" if suffix is not None else ""
        handler = logging.FileHandler(Path(path) / f"rank_{self.rank}{end}.log", mode)
        handler.setLevel(_checked(level))
        handler.setFormatter(FORM)
        self._logger.addHandler(handler)

    def info(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on the given ranks; ``None``: on all."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on the given ranks; ``None``: on all."""
        self._log(logging.WARNING, message, ranks)

    def debug(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on the given ranks; ``None``: on all."""
        self._log(logging.DEBUG, message, ranks)

    def error(self, message: str, ranks: Sequence[int] | None = None) -> None:
        """Log on the given ranks; ``None``: on all."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: str, ranks: Sequence[int] | None) -> None:
        if ranks is None or self.rank in ranks:
            self._logger.log(level, "%s", message, stacklevel=3)


def _checked(level: str) -> int:
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: give one of {', '.join(map(repr, LEVELS))}")
    return int(getattr(logging, level))


def get_dist_logger(name: str = NAME) -> DistributedLogger:
    """The logger of that name, the same each time."""
    return DistributedLogger.get_instance(name)


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = (NAME,)) -> None:
    """Loggers that exist now log nothing below a warning.

    Args:
        include: these.
        exclude: where ``include`` is ``None``: all but these.
    """
    for name in list(logging.Logger.manager.loggerDict):
        if name in include if include is not None else name not in exclude:
            logging.getLogger(name).setLevel(logging.WARNING)
