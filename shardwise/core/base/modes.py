"""Tensors that the engine makes while the program is in torch's inference mode.

Made there, what is kept could not be written outside of it, and what is returned not be changed in place or trained.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ["ordinary_tensors"]

_NOTHING = nullcontext()


class _OutsideInference:
    """Neither inference mode nor a graph."""

    def __enter__(self) -> None:
        self._modes = torch.inference_mode(False), torch.no_grad()
        for each in self._modes:
            each.__enter__()

    def __exit__(self, *error: Any) -> None:
        for each in reversed(self._modes):
            each.__exit__(*error)


def ordinary_tensors() -> AbstractContextManager[None]:
    """Inside the block no graph is made, and what is made can be written and trained anywhere. Where that is so
    already, as in most backward passes, it costs nothing."""
    if torch.is_inference_mode_enabled():
        return _OutsideInference()
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING
