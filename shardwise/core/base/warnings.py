"""Warnings that name the user's own line, however many frames of this and other libraries lie between."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

# A fixed `stacklevel` is wrong as soon as a call goes through a context manager, a base class or another front-end.
PYTHON = {"abc", "concurrent", "contextlib", "functools", "importlib", "runpy", "threading"}
TORCH = {
    "accelerate",
    "lightning",
    "lightning_fabric",
    "peft",
    "pydantic",
    "pytorch_lightning",
    "torch",
    "transformers",
}
LIBRARIES = {__name__.partition(".")[0], *PYTHON, *TORCH}
"""Packages whose frames are not the user's program."""


def warn_user(message: str) -> None:
    """Issue a ``UserWarning`` at the innermost line of the call stack that is the user's own.

    Args:
        message: text that names the setting without effect, or the difference from the request, and the remedy.
    """
    caller = sys._getframe(1)
    frame: FrameType | None = caller
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in LIBRARIES:
        frame = frame.f_back
    at = caller if frame is None else frame  # in a thread of this library, or under `python -m shardwise`
    # The module keeps what was shown once for each line, as `warnings.warn` does it.
    registry = at.f_globals.setdefault("__warningregistry__", {})
    name = at.f_globals.get("__name__", "<string>")
    warnings.warn_explicit(message, UserWarning, at.f_code.co_filename, at.f_lineno, name, registry)


def called_by(module: str) -> bool:
    """Return whether a function of ``module`` is on the call stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None
